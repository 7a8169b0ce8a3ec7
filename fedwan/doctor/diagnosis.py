"""The doctor: takes a run's rounds as they are recorded, and tells each finding once."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from fedwan.doctor.chart import Chart
from fedwan.doctor.rules import RUN_RULES, SITE_RULES, Rule
from fedwan.errors import STOPPED
from fedwan.output.records import EventRecord, Record, RoundRecord, finite, to_record

_log = logging.getLogger(__name__)


class Finding(NamedTuple):
    """One thing that is wrong."""

    kind: str
    """As the table in docs/doctor.md has it."""
    site: str | None
    """Where; None for the run as a whole."""
    network: str | None
    """In which network; None for all of them, as with data."""
    version: int
    """The round in which it was told first."""
    why: str
    """The figures behind it, in one sentence."""
    mend: str
    """What to do about it, in one sentence."""

    @property
    def text(self) -> str:
        """One line for a log."""
        where = self.site or "the run"
        network = f", {self.network}" if self.network else ""
        return f"{where}{network}: {self.kind.replace('_', ' ')}: {self.why}; {self.mend}"


class Doctor:
    """Looks at one run."""

    def __init__(self) -> None:
        self._chart = Chart()
        self._told: set[tuple[str, str | None, str | None]] = set()
        self._rank: dict[str, int] = {}
        """By site, the highest rule that has told of it."""
        self._failed: set[tuple[str, str | None]] = set()
        """Kinds of rules, by site, that could not be asked."""

    def take(self, records: Sequence[RoundRecord]) -> list[Finding]:
        """What is new after one round: records of one fragment and version."""
        self._chart.take(records)
        found: list[Finding] = []
        for site in dict.fromkeys(record.site for record in records):
            ranked = SITE_RULES[: self._rank.get(site, len(SITE_RULES))]
            for rank, rule in enumerate(ranked, start=1):
                if told := self._told_by(rule, site):
                    self._rank[site] = rank
                    found += told
                    break
        if not self._rank:
            found += [finding for rule in RUN_RULES for finding in self._told_by(rule)]
        new = {finding[:3]: finding for finding in found if finding[:3] not in self._told}
        self._told |= new.keys()
        return list(new.values())

    def look(self, rounds: Sequence[Sequence[Mapping[str, Any]]]) -> list[dict[str, Any]]:
        """As `take`, of the rows of rounds that a run records; rows of events. It tells the log."""
        findings: list[Finding] = []
        try:
            for rows in rounds:
                records = [to_record({"t": 0.0, **finite(row)}) for row in rows]
                findings += self.take([r for r in records if isinstance(r, RoundRecord)])
        except Exception:
            _log.warning("the doctor failed at these rounds; training goes on", exc_info=True)
        told = []
        for finding in findings:
            text = f"round {finding.version}: {finding.text}"
            _log.warning("%s", text)
            row = {"kind": "event", "event": "finding", "text": text, "finding": finding.kind}
            told.append(finding._asdict() | row)
        return told

    def _told_by(self, rule: Rule, site: str | None = None) -> list[Finding]:
        try:
            return [
                Finding(rule.kind, site, network, self._chart.version, why, mend)
                for network, why, mend in rule.told(self._chart, site or "")
            ]
        except Exception as error:  # figures can be whatever a site likes; other rules go on
            if (rule.kind, site) not in self._failed:
                self._failed.add((rule.kind, site))
                where = site or "the run"
                _log.warning("%s cannot be looked at for %r: %r", where, rule.kind, error)
            return []


def diagnose(records: Iterable[Record]) -> Iterator[Finding]:
    """Findings of a run from its records, in the order in which they were told."""
    doctor = Doctor()
    told, here = set[str](), set[str]()
    at_door: dict[str, Finding] = {}
    """Of no interest once the site is let in."""
    stopped, version = "", 0
    for round_, group in groupby(records, key=_round_of):
        if round_ is not None:
            version = max(version, round_[1])
            yield from doctor.take([record for record in group if isinstance(record, RoundRecord)])
            continue
        for event in (event for event in group if isinstance(event, EventRecord)):
            if event.event in ("stopped", "listening"):
                stopped = event.text if event.event == "stopped" else ""
                here.clear()
            site = event.site or ""
            if event.event in ("join", "rejoin", "back"):
                here.add(site)
                at_door.pop(site, None)
            elif event.event == "lost":
                here.discard(site)
            if site and site not in told and (found := _of_event(event, version)):
                if event.event == "rejected" and site not in here:
                    at_door[site] = found
                else:
                    told.add(site)
                    yield found
    yield from at_door.values()
    if stopped and stopped != STOPPED:
        yield Finding("stopped", None, None, version, stopped, "see to that")


def _round_of(record: Record) -> tuple[int, int] | None:
    return (record.fragment, record.version) if isinstance(record, RoundRecord) else None


def _of_event(event: EventRecord, version: int) -> Finding | None:
    """What the gate refused, and weights that differ at the end: told in the event itself."""
    why, _, mend = event.text.partition("; ")
    if event.event == "rejected":
        return Finding("refused", event.site, None, version + 1, why, mend or "see its log")
    if event.details.get("finding") == "different_weights":
        mend = "run the same app and library versions on the same kind of device at every site"
        return Finding("different_weights", event.site, None, version, event.text, mend)
    return None
