"""The state of a run as its records tell it: what the live table shows, without the showing."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path

from fedwan.config import Config, load, site_names
from fedwan.output.records import (
    NOT_A_RECORD,
    EventRecord,
    QualityRecord,
    Record,
    RoundRecord,
    to_record,
)

__all__ = ["Board", "Follower", "SiteRow"]

_STATES = {"join": "training", "rejoin": "training", "lost": "silent", "leave": "left"}
_NEWS = frozenset({"lost", "rejoin", "rejected", "paused", "warning", "resume", "finding"})
_SMOOTHING = 0.3
"""Weight of the latest round in a site's speed."""


@dataclass
class SiteRow:
    """One site, as far as is known."""

    name: str
    state: str = "expected"
    """`expected`, `training`, `silent` or `left`."""
    step: int = 0
    losses: dict[str, float | None] = field(default_factory=dict)
    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    steps_per_s: float | None = None
    seen_t: float = 0.0

    @property
    def utilisation(self) -> float | None:
        """Share of the time spent computing; None before the first round."""
        busy_s = self.compute_s + self.wait_s
        return self.compute_s / busy_s if busy_s > 0 else None

    def take(self, record: RoundRecord, *, is_now: bool) -> None:
        """Account for one round; one of an earlier start says nothing of state and speed."""
        steps, seconds = record.step - self.step, record.t - self.seen_t
        if self.seen_t and steps > 0 and seconds > 0:
            latest = steps / seconds
            before = latest if self.steps_per_s is None else self.steps_per_s
            self.steps_per_s = before + _SMOOTHING * (latest - before)
        if is_now:
            self.state, self.seen_t = "training", record.t
        self.step = record.step
        self.losses = dict(record.losses) or self.losses  # two fragments may leave after one step
        self.compute_s += record.compute_s
        self.wait_s += record.wait_s
        self.bytes_up += record.bytes_up
        self.bytes_down += record.bytes_down


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
        self.fd: float | None = None
        self.fd_floor: float | None = None
        self.fd_untrained: float | None = None
        self.is_listening = False
        self.is_done = False
        self.news: list[EventRecord] = []
        """Events that a reader should see, oldest first."""

    def take(self, record: Record) -> None:
        """Account for one record."""
        if isinstance(record, RoundRecord):
            self.version = max(self.version, record.version)
            self.step = max(self.step, record.run_step)
            row = self.sites.setdefault(record.site, SiteRow(record.site))
            row.take(record, is_now=record.t >= self._since)
        elif isinstance(record, QualityRecord):
            self.fd, self.fd_floor = record.figure("fd"), record.figure("fd_floor")
            if record.version == 0:
                self.fd_untrained = self.fd
        elif record.t >= self._since:
            self._take_event(record)

    def _take_event(self, record: EventRecord) -> None:
        self.is_listening = self.is_listening or record.event == "listening"
        self.is_done = self.is_done or record.event == "done"
        if record.site in self.sites and record.event in _STATES:
            row = self.sites[record.site]
            row.state = _STATES[record.event]
            row.seen_t = 0.0  # the time away is no measure of its speed
        if record.event in _NEWS:
            self.news.append(record)

    @property
    def phase(self) -> str:
        """What the run is doing, in a few words."""
        waiting = [row.name for row in self.sites.values() if row.state in ("expected", "silent")]
        if self.is_done:
            return "done"
        if not self.is_listening:
            return "starting services"
        if self.step >= self.config.steps > 0:
            return "measuring quality"
        if waiting and len(waiting) == len(self.sites):
            return "waiting for sites"
        if waiting:
            return f"waiting for {', '.join(waiting)}"
        return "training"

    @property
    def remaining_s(self) -> float | None:
        """Seconds of training left at the slowest site's speed; None before it is known."""
        speeds = [row.steps_per_s for row in self.sites.values() if row.steps_per_s]
        if not speeds:
            return None
        return max(0, self.config.steps - self.step) / min(speeds)

    @property
    def utilisation(self) -> float | None:
        """Of all sites together, as `summary.json` has it; None before the first round."""
        compute_s = sum(row.compute_s for row in self.sites.values())
        busy_s = compute_s + sum(row.wait_s for row in self.sites.values())
        return compute_s / busy_s if busy_s > 0 else None


class Follower:
    """A board that follows a run's folder while the run goes on."""

    def __init__(self, out: Path, config: Config) -> None:
        self._out = out
        self._config = config
        self._offset, self._inode = 0, 0
        self._began, self._since = time.monotonic(), time.time()
        self.board = Board(config, self._since)

    @property
    def elapsed_s(self) -> float:
        """Since the watch began."""
        return time.monotonic() - self._began

    def poll(self) -> bool:
        """Take the whole lines that are new; whether there were any.

        A file that was replaced, as by a run that is resumed, starts the board afresh.
        """
        path = self._out / "metrics.jsonl"
        try:
            stat = path.stat()
        except FileNotFoundError:
            return False
        if stat.st_ino != self._inode or stat.st_size < self._offset:
            self._inode, self._offset = stat.st_ino, 0
            self.board = Board(self._config, self._since)
        with path.open("rb") as file:
            file.seek(self._offset)
            data = file.read()
        whole = data[: data.rfind(b"\n") + 1]
        self._offset += len(whole)
        for line in whole.splitlines():
            self._take(line)
        return bool(whole)

    def _take(self, line: bytes) -> None:
        try:
            record = to_record(json.loads(line))
        except NOT_A_RECORD:
            return  # a live view must not end for that
        if getattr(record, "event", "") == "agreed":  # their script's steps are known now
            self._config = self.board.config = load(self._out / "config.yaml")
        if record is not None:
            self.board.take(record)
