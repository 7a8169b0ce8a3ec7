"""The doctor: takes a run's rounds as they are recorded, and tells each finding once."""

from __future__ import annotations

import logging
from collections import defaultdict, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from itertools import groupby
from typing import Any, NamedTuple, Self

from fedwan.doctor.chart import Chart
from fedwan.doctor.rules import RUN_RULES, SITE_RULES, Rule
from fedwan.errors import STOPPED
from fedwan.output.records import EventRecord, Record, RoundRecord, finite, to_record

_log = logging.getLogger(__name__)

_OFTEN = 3
"""Processes of a site, one after the other, ..."""
_SOON = 10
"""... within so many versions, for which something ends them."""
_OWN = {"small_shard", "memorising"}
_SPREADING = {rank for rank, rule in enumerate(SITE_RULES, start=1) if rule.kind not in _OWN}
"""Of faults of one site that lead the whole run astray."""


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

    @property
    def details(self) -> dict[str, Any]:
        """What an event `finding` holds beside its site and text."""
        rest = self._asdict()
        del rest["site"]
        return {"finding": rest.pop("kind"), **rest}

    @classmethod
    def of(cls, event: EventRecord) -> Self:
        """The finding that an event `finding` tells of."""
        rest = {name: event.details[name] for name in cls._fields[2:]}
        return cls(event.details["finding"], event.site, **rest)


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
        if not any(self._rank.get(site, 0) in _SPREADING for site in self._chart.sites):
            found += [finding for rule in RUN_RULES for finding in self._told_by(rule)]
        new = {finding[:3]: finding for finding in found if finding[:3] not in self._told}
        self._told |= new.keys()
        return list(new.values())

    def recall(self, records: Iterable[Record]) -> None:
        """What a resumed run has recorded: figures to compare with, and what was told already."""
        ranks = {rule.kind: rank for rank, rule in enumerate(SITE_RULES, start=1)}

        def rounds() -> Iterator[RoundRecord]:
            for record in records:
                if isinstance(record, RoundRecord):
                    yield record
                elif isinstance(record, EventRecord) and record.event == "finding":
                    found = Finding.of(record)
                    self._told.add(found[:3])
                    if found.site and found.kind in ranks:
                        rank = self._rank.get(found.site, len(ranks))
                        self._rank[found.site] = min(rank, ranks[found.kind])

        for _, group in groupby(rounds(), key=lambda record: (record.fragment, record.version)):
            self._chart.take(list(group))

    def look(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """As `take`, of one round as a run records it; rows of events. It tells the log."""
        try:
            records = [to_record({"t": 0.0, **finite(row)}) for row in rows]
            findings = self.take([r for r in records if isinstance(r, RoundRecord)])
        except Exception:
            _log.warning("the doctor failed at this round; training goes on", exc_info=True)
            return []
        told = []
        for finding in findings:
            text = f"round {finding.version}: {finding.text}"
            _log.warning("%s", text)
            row = {"kind": "event", "event": "finding", "site": finding.site, "text": text}
            told.append(row | finding.details)
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


def _ends_often(site: str | None, version: int, last: str) -> Finding:
    error = last.partition("; ")[2]
    why = f"it was started again {_OFTEN} times within {_SOON} versions"
    mend = "see in its log what ends it; of two services with one certificate end one"
    return Finding("ends_often", site, None, version, f"{why}{error and ': '}{error}", mend)


def diagnose(records: Iterable[Record]) -> Iterator[Finding]:
    """What a run's coordinator found and refused, each thing once, and what ended it."""
    told, here = set[tuple[Any, ...]](), set[str | None]()
    at_door: dict[str | None, Finding] = {}
    """Of no interest once the site is let in."""
    begun: dict[str | None, deque[int]] = defaultdict(partial(deque, maxlen=_OFTEN))
    """By site, the versions at which its latest processes began."""
    stopped, version = "", 0
    for record in records:
        if isinstance(record, RoundRecord):
            version = max(version, record.version)
        if not isinstance(record, EventRecord):
            continue
        event, site, found = record.event, record.site, None
        if event in ("stopped", "listening"):
            stopped = record.text if event == "stopped" else ""
            here.clear()
            begun.clear()  # who lives through the coordinator's restart joins anew as well
        elif event in ("join", "rejoin", "back"):
            here.add(site)
            at_door.pop(site, None)
            if event == "rejoin":
                begun[site].append(version)
                if len(begun[site]) == _OFTEN and version - begun[site][0] <= _SOON:
                    found = _ends_often(site, version, record.text)
        elif event == "lost":
            here.discard(site)
        elif event == "finding":
            found = Finding.of(record)
        elif event == "rejected" and site:
            why, _, mend = record.text.partition("; ")
            found = Finding("refused", site, None, version + 1, why, mend or "see its log")
            if site not in here:
                at_door[site], found = found, None
        if found and found[:3] not in told:
            told.add(found[:3])
            yield found
    yield from at_door.values()
    if stopped and stopped != STOPPED:
        yield Finding("stopped", None, None, version, stopped, "see to that")
