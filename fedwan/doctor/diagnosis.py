"""The doctor: takes a run's rounds as they are recorded, and tells each finding once.

The same code runs live in the coordinator and over the `metrics.jsonl` of a run that ended, was
killed, or goes on.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby

from fedwan.doctor.chart import Chart
from fedwan.doctor.finding import Finding
from fedwan.doctor.rules import RUN_RULES, SITE_RULES
from fedwan.output.records import EventRecord, Record, RoundRecord

__all__ = ["Doctor", "diagnose"]


class Doctor:
    """Looks at one run."""

    def __init__(self) -> None:
        self._chart = Chart()
        self._told: set[tuple[str, str | None, str | None]] = set()
        self._rank: dict[str, int] = {}
        """By site, the highest rule that has told of it."""

    def take(self, records: Sequence[RoundRecord]) -> list[Finding]:
        """What is new after one round.

        Args:
            records: of one fragment and version, one for each contribution that was merged.
        """
        self._chart.take(records)
        found: list[Finding] = []
        for site in dict.fromkeys(record.site for record in records):
            found += self._of_site(site)
        if not self._rank:
            for rule in RUN_RULES:
                found += self._new(rule(self._chart))
        return found

    def _of_site(self, site: str) -> list[Finding]:
        highest = self._rank.get(site, len(SITE_RULES) - 1)
        for rank, rule in enumerate(SITE_RULES[: highest + 1]):
            findings = list(rule(self._chart, site))
            if findings:
                self._rank[site] = rank
                return self._new(findings)
        return []

    def _new(self, findings: Iterable[Finding]) -> list[Finding]:
        """Those that were not told before."""
        new = []
        for finding in findings:
            key = (finding.kind, finding.site, finding.network)
            if key not in self._told:
                self._told.add(key)
                new.append(finding)
        return new


def diagnose(records: Iterable[Record]) -> Iterator[Finding]:
    """Findings of a run from its records, in the order in which they were told."""
    doctor = Doctor()
    refused: set[str] = set()
    version = 0
    for _, group in groupby(records, key=_round_of):
        for record in (members := list(group)):
            if isinstance(record, EventRecord) and record.site not in (None, *refused):
                for finding in _of_event(record, version):
                    refused.add(finding.site or "")
                    yield finding
        rounds = [record for record in members if isinstance(record, RoundRecord)]
        if rounds:
            version = max(version, rounds[0].version)
            yield from doctor.take(rounds)


def _round_of(record: Record) -> tuple[int, int] | None:
    return (record.fragment, record.version) if isinstance(record, RoundRecord) else None


def _of_event(event: EventRecord, version: int) -> Iterator[Finding]:
    """What the gate refused, and weights that differ at the end: told in the event itself."""
    why, _, mend = event.text.partition("; ")
    if event.event == "rejected":
        yield Finding("refused", event.site, None, version + 1, why, mend or "see its log")
    if event.details.get("finding") == "different_weights":
        yield Finding(
            "different_weights",
            event.site,
            None,
            version,
            event.text,
            "run the same app and library versions on the same kind of device at every site",
        )
