"""A run's state, built record by record: what live table, summary and report show."""

from __future__ import annotations

import shlex
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedwan.config import COMMAND, Config, load_dumped, site_names
from fedwan.errors import ConfigError
from fedwan.output.journal import JOURNAL
from fedwan.output.records import (
    METRICS,
    SPENT,
    EventRecord,
    QualityRecord,
    Record,
    RoundRecord,
    iter_records,
    numbers_of,
)
from fedwan.output.units import bytes_text, number_text

_DECIDED = {"drained": "draining", "ejected": "ejected", "admitted": "admitted"}
_STATES = {"join": "training", "rejoin": "training", "back": "training"}
_STATES |= {"lost": "silent", **_DECIDED}
_NEWS = {"failed", "lost", "back", "rejoin", "rejected", "paused", "warning", "resume", "finding"}
_NEWS |= _DECIDED.keys()
ABSENT = {"expected": "not here yet", "silent": "silent"}
"""States of sites that a run waits for, in words."""
_GONE = ("draining", "drained", "ejected")
"""Of sites that the operator has let go."""
_LIVE = ("training", "measuring")
FEW = 50
"""Held-out samples below which noise comes as near to the floor as what was trained."""
MOST_OWN = 8
"""Of a script's own figures."""


def clock_text(t: float) -> str:
    """A moment in Unix seconds, by this machine's clock."""
    return time.strftime("%d %b %H:%M:%S", time.localtime(t))


def waiting_text(
    absent: Sequence[tuple[str, str, float]], states: Mapping[str, str], config: Config
) -> str:
    """For whom a run waits, since when, and what would let it go on; nothing if for nobody.

    `absent`: of each site that is waited for and not there name, state and since when; `states`: of
    all sites.
    """
    if not absent:
        return ""
    who = ", ".join(f"{name} ({ABSENT[state]} since {clock_text(t)})" for name, state, t in absent)
    text = f"waiting for {who}; goes on when {'it is' if len(absent) == 1 else 'all are'} here"
    if 0 < config.round.quorum <= config.num_sites - len(absent):
        are_gone = all(state == "silent" for _, state, _ in absent)
        after = f"after {config.round.patience_s:g} s of the round at most"
        text += f", without {'once the others have contributed' if are_gone else after}"
    gone = [name for name, state in states.items() if state in _GONE]
    way, names = "without after `fedwan sites {} drain {}`", [name for name, _, _ in absent]
    if len(names) + len(gone) >= len(states):  # without them it would wait for ever
        way, names = "with another after `fedwan sites {} admit {}`", gone
    return ", or ".join([text, *(way.format(shlex.quote(config.out), name) for name in names)])


@dataclass
class SiteRow:
    """One site, as far as is known."""

    name: str
    state: str = "expected"
    """`expected`, `training`, `measuring`, `silent`, `left`, `draining`, `drained`, `ejected` or
    `admitted`."""
    step: int = 0
    losses: dict[str, float | None] = field(default_factory=dict)
    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    since: float = 0.0
    """When its state began, in Unix seconds."""
    rounds: int = 0
    """That it took part in: the first fragment travels once in each."""
    version: int = -1
    """Of the first fragment, the latest that it took part in."""

    @property
    def utilisation(self) -> float | None:
        """Share of the time spent computing; None before the first round."""
        busy_s = self.compute_s + self.wait_s
        return self.compute_s / busy_s if busy_s else None

    def take(self, record: RoundRecord, *, is_now: bool) -> None:
        """Account for one round; one of an earlier start says nothing of its state."""
        # Of two that measure one is told of. Else it may be merged after its site has gone.
        if is_now and self.state in ("expected", "measuring"):
            self.state = "training"
        if record.fragment == 0 and record.version > self.version:  # else it is made again
            self.rounds, self.version = self.rounds + 1, record.version
        self.step = record.step
        self.losses = dict(record.losses) or self.losses  # two fragments may leave after one step
        self.spend(vars(record))

    def move(self, event: EventRecord) -> None:
        """Be in the state that an event tells of, and account for what it says was spent."""
        self.spend(event.details)
        if event.event == "measuring" and self.state == "training":
            self.state, self.since = "measuring", event.t
        elif event.event == "rejected" and self.state == "measuring":  # what it has measured
            self.state, self.since = "training", event.t
        elif event.event in (*_STATES, "leave"):
            left = "drained" if self.state in ("draining", "drained") else "left"
            self.state = _STATES.get(event.event, left)
            self.since = event.details.get("heard", event.t)

    def spend(self, spent: Mapping[str, Any]) -> None:
        """Account for time and bytes, where they are told."""
        for name in SPENT:
            setattr(self, name, getattr(self, name) + spent.get(name, 0))


class Board:
    """A run's state, built record by record.

    What a resumed run did before `since`, in Unix seconds, counts, but its sites are not there yet
    and its news are old.
    """

    def __init__(self, config: Config, since: float = 0.0) -> None:
        self.config = config
        self._since = since
        self.sites = {name: SiteRow(name) for name in site_names(config)}
        self.version = 0
        self.step = 0
        """Steps of every site that have been merged."""
        self.quality: QualityRecord | None = None
        """The latest."""
        self.fd_untrained: float | None = None
        self.payload_bytes: int | None = None
        """Of all networks in fp32; told at the end."""
        self.keeps_samples = False
        """Whether the sites keep what could be drawn."""
        self.is_listening = False
        self.is_done = False
        self.stopped = ""
        """Why the run ended before it was done, if it has."""
        self._paces: list[tuple[float, int]] = []
        """When a step was reached, of the first round that was seen and of the latest."""
        self._measured_s: float | None = None
        """How long the latest site took that measured quality."""
        self.news: list[EventRecord] = []
        """Events that a reader should see, oldest first."""

    def take(self, record: Record) -> None:
        """Account for one record."""
        if isinstance(record, RoundRecord):
            if record.fragment == 0:  # it travels once a round
                self.version = max(self.version, record.version)
            self.step = max(self.step, record.run_step)
            if record.t >= self._since:
                self._paces = [*self._paces[:1], (record.t, self.step)]
            row = self.sites.setdefault(record.site, SiteRow(record.site))
            row.take(record, is_now=record.t >= self._since)
        elif isinstance(record, QualityRecord):
            if self.quality is None or record.version >= self.quality.version:
                self.quality = record
            for site in record.site.split(", "):
                one = self.sites.get(site)
                if one is not None and one.state == "measuring":
                    self._measured_s = record.t - one.since
                    one.state, one.since = "training", record.t
            if record.version == 0:
                self.fd_untrained = record.numbers.get("fd")
            elif self.config.data.split == "own":
                self.fd_untrained = None  # it was one site's, and what follows is of all of them
        elif record.t >= self._since or record.event in _DECIDED:
            self._take_event(record)
        elif record.site in self.sites:
            self.sites[record.site].spend(record.details)

    def _take_event(self, record: EventRecord) -> None:
        if record.event == "listening":
            self.is_listening, self.stopped = True, ""
            names = site_names(self.config)  # a run may go on with fewer
            for row in self.sites.values():
                row.since = record.t
                if row.state not in _GONE:
                    row.state = "expected" if row.name in names else "left"
        if record.event == "stopped":
            self.stopped = record.text
        self.is_done = self.is_done or record.event == "done"
        self.keeps_samples = self.keeps_samples or record.event == "samples_kept"
        self.payload_bytes = record.details.get("payload_bytes", self.payload_bytes)
        if record.site in self.sites:
            self.sites[record.site].move(record)
        if record.event in _NEWS and record.t >= self._since:
            self.news.append(record)

    @property
    def phase(self) -> str:
        """What the run is doing, in a few words."""
        waiting = [row.name for row in self._awaited()]
        if self.is_done or self.stopped:
            return "done" if self.is_done else "stopped"
        if not self.is_listening:
            return "starting services"
        is_over = self.step >= self.config.steps > 0
        if any(row.state == "measuring" for row in self.sites.values()):
            if is_over or not self.step:  # between, the others go on
                has_none = self.quality is not None and not self.quality.figures
                return "asking for samples" if has_none else "measuring quality"
        if is_over:
            return "ending"
        if waiting and len(waiting) == len(self.sites):
            return "waiting for sites"
        if waiting:
            return f"waiting for {', '.join(waiting)}"
        return "training"

    @property
    def waiting(self) -> str:
        """See `waiting_text`."""
        if self.is_done or self.stopped or not self.is_listening:
            return ""
        absent = [(row.name, row.state, row.since) for row in self._awaited()]
        return waiting_text(
            absent, {row.name: row.state for row in self.sites.values()}, self.config
        )

    def _awaited(self) -> list[SiteRow]:
        """Sites that are not there, unless there is a quorum and each contribution is a version."""
        rows = self.sites.values()
        num_live = sum(row.state in _LIVE for row in rows)
        is_on_arrival = sum(row.version == self.version for row in rows) == 1
        if is_on_arrival and num_live >= (self.config.round.quorum or len(rows)):
            return []
        return [row for row in rows if row.state in ABSENT]

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training left at the pace so far; None before it is known."""
        if not self._paces or self._paces[0][1] == self._paces[-1][1]:
            return None
        (begun, first), (now, last) = self._paces[0], self._paces[-1]
        return max(0, self.config.steps - last) * (now - begun) / (last - first)

    def measuring_left_s(self, now: float) -> float | None:
        """Seconds of measuring left at `now`, in Unix seconds, if it takes as long as before."""
        since = [row.since for row in self.sites.values() if row.state == "measuring"]
        if not since or self._measured_s is None:
            return None
        return max(0.0, self._measured_s - (now - max(since)))

    @property
    def total(self) -> SiteRow:
        """The sums over all sites."""
        rows = self.sites.values()
        return SiteRow("", **{name: sum(getattr(row, name) for row in rows) for name in SPENT})

    def quality_told(self, figures: Mapping[str, Any] | None = None) -> tuple[str, str, list[str]]:
        """What was measured, its value, and what to hold it against; of the latest figures."""
        if figures is None:
            figures = self.quality.figures if self.quality else {}
        numbers = numbers_of(figures)
        fd, floor, beside = numbers.get("fd"), numbers.get("fd_floor"), list[str]()
        if fd is None and numbers:
            (name, value), *others = numbers.items()
            texts = (f"{other} {number_text(x)}" for other, x in others[:MOST_OWN])
            return name, number_text(value), list(texts)
        if fd is None:
            odd = sorted(
                n for n, value in figures.items() if value is None or isinstance(value, float)
            )
            text = f"no finite number: {', '.join(odd)}" if odd else "not measured"
            if self.config.workload == COMMAND and not figures:
                text = "the script gives no evaluate="
            return "quality", number_text(None), [text]
        num = numbers.get("num_real")
        is_few = num is not None and num < FEW
        if floor:
            times = "" if is_few else f"{fd / floor:.1f} times the "
            beside.append(f"{times}floor {number_text(floor)}")
        if num:
            seen = figures.get("seen_through")
            few = ", too few to compare" if is_few else ""
            beside.append((f"{seen}, " if seen else "") + f"n = {int(num)}{few}")
        if self.fd_untrained is not None:
            beside.append(f"untrained {number_text(self.fd_untrained)}")
        return "Fréchet distance", number_text(fd), beside

    def beside_sync(self, sent: int) -> tuple[str, str] | None:
        """What exchanging fp32 gradients at every step would send, and how often so many bytes.

        None where that says nothing: of `sync` itself, or before the networks' size is known.
        """
        if not (self.payload_bytes and sent) or self.config.strategy == "sync":
            return None
        sync = 2 * self.config.steps * self.config.num_sites * self.payload_bytes
        times, what = max(sync / sent, sent / sync), "more" if sync >= sent else "less"
        return bytes_text(sync), f"{times:,.{0 if times >= 10 else 1}f} times {what}"


def read_run(out: Path, take: Callable[[Record], object] = lambda _: None) -> Board:
    """A run's state after all of its records, from its folder; `take` is handed each of these.

    Raises:
        ConfigError: a file of it is damaged, or gone.
    """
    is_done = (out / "summary.json").exists()
    for path in (out / METRICS, out / JOURNAL):
        # No round may have been merged yet; that a run has begun is in its journal.
        least = int(is_done or path.name == JOURNAL)
        if is_done or any((out / "checkpoint").glob("*.safetensors")):
            if not path.exists() or path.stat().st_size < least:
                raise ConfigError(
                    f"{path} was removed or emptied, which tells what the run has done; restore it"
                )
    board = Board(load_dumped(out))
    for record in iter_records(out):
        board.take(record)
        take(record)
    return board
