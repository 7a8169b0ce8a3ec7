"""What happened in a run, one JSON object per line: figures in one file, events in another.

    metrics.jsonl   round     one site's part in a round: how far it is, losses, seconds, bytes
                    quality   of the EMA weights of a version; version 0 is the untrained model
    journal.jsonl   event     sites that join and leave, refusals, warnings, the end; for
                              `fedwan verify` also versions and checkpoints

The coordinator appends; everything else (live table, summary, report) reads. A line is written and
flushed at once, so that a crash costs no more than half a line, which readers leave out.
"""

from __future__ import annotations

import heapq
import json
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from threading import Lock
from typing import Any, TextIO

from fedwan.errors import ConfigError
from fedwan.files import write_atomically
from fedwan.output.journal import JOURNAL, Journal, Sign

METRICS = "metrics.jsonl"


@dataclass(frozen=True)
class RoundRecord:
    """One site's contribution to one round."""

    t: float
    """Unix seconds."""
    version: int
    """That the round made."""
    site: str
    step: int
    """Completed steps since the run began."""
    samples: int
    """In this contribution."""
    losses: Mapping[str, float | None]
    """Mean over this round's steps, by name; None where it was not finite."""
    compute_s: float
    """Of this round, as are the next three."""
    wait_s: float
    bytes_up: int
    """On the wire."""
    bytes_down: int
    norms: Mapping[str, float | None]
    """Of the contribution, by network."""
    round_s: float
    """From the round's beginning to its update."""
    fragment: int = 0
    """Which of the strategy's fragments."""
    staleness: int = 0
    """Versions by which it came late."""
    run_step: int = 0
    """Steps of every site that the run has come to; at a pace of their own, on average."""
    figures: Mapping[str, float | None] = field(default_factory=dict)
    """Of the site's data, rates and networks, see `fedwan.site.vitals`."""
    cosines: Mapping[str, float | None] = field(default_factory=dict)
    """With the mean of the other sites' contributions, by network."""
    agreement: Mapping[str, float | None] = field(default_factory=dict)
    """Of all sites' contributions, by network, see `fedwan.doctor.sampling`."""
    backward: Mapping[str, float | None] = field(default_factory=dict)
    """Largest cosine with what the last updates moved by, by network."""


@dataclass(frozen=True)
class QualityRecord:
    """Quality of the EMA weights of a version."""

    t: float
    version: int
    step: int
    figures: Mapping[str, Any]
    """`fd`, `fd_floor` and whatever else the workload measures; `seen_through` is a text."""
    site: str = ""
    """Who measured; several, with commas, together."""

    @property
    def numbers(self) -> dict[str, float]:
        """Figures that are finite numbers, in order of their names."""
        return numbers_of(self.figures)


def numbers_of(figures: Mapping[str, Any]) -> dict[str, float]:
    """Those that are finite numbers, in order of their names.

    >>> numbers_of({"fd": 2, "histogram": [1], "a": math.inf, "b": True})
    {'fd': 2}
    """
    return {
        name: value
        for name, value in sorted(figures.items())
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    }


@dataclass(frozen=True)
class EventRecord:
    """Something worth a line in the report."""

    t: float
    event: str
    site: str | None
    text: str
    details: Mapping[str, Any] = field(default_factory=dict)
    """Whatever else the line holds."""


Record = RoundRecord | QualityRecord | EventRecord
SPENT = ("compute_s", "wait_s", "bytes_up", "bytes_down")
"""What a round's record, and the event `leave`, tell of a site's time and bytes."""

NOT_A_RECORD = (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError)
"""What `to_record` of a damaged row raises."""


def _numbers(value: Mapping[str, Any]) -> dict[str, float | None]:
    return {name: None if number is None else float(number) for name, number in value.items()}


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError(f"{value!r} is no text")
    return value


_AS: dict[str, Callable[[Any], Any]] = {
    "float": float,
    "int": int,
    "str": _text,
    "Mapping[str, float | None]": _numbers,
}
_ROUND_FIELDS = {field.name: _AS[str(field.type)] for field in fields(RoundRecord)}


def to_record(row: Mapping[str, Any]) -> Record | None:
    """A row as a record; None for an event without text, and for a kind that is not known here.

    Raises `NOT_A_RECORD` where something that every row of its kind holds is missing, or none.
    """
    rest = dict(row)
    kind, t = rest.pop("kind"), float(rest["t"])
    if kind == "round":
        return RoundRecord(**{n: _ROUND_FIELDS[n](rest[n]) for n in rest if n in _ROUND_FIELDS})
    del rest["t"]
    if kind == "quality":
        version, step, site = int(rest.pop("version")), int(rest.pop("step")), rest.pop("site", "")
        return QualityRecord(t, version, step, rest, str(site))
    if kind == "event" and "text" in rest:
        event, site, text = _text(rest.pop("event")), rest.pop("site"), _text(rest.pop("text"))
        return EventRecord(t, event, None if site is None else _text(site), text, rest)
    return None


Resumed = tuple[int, Sequence[int]]
"""Where a run goes on: whole rounds that it has had, and the version of each fragment."""


class Recorder:
    """Appends records to the files of a run's folder. Safe to call from several threads.

    A resumed run keeps them, less the rounds and the quality that are about to be made again.
    `sign` is `Journal`'s.
    """

    def __init__(self, out: Path, resumed: Resumed | None = None, sign: Sign | None = None) -> None:
        path = out / METRICS
        kept = () if resumed is None else _lines_until(path, *resumed)
        write_atomically(path, lambda file: file.writelines(kept))
        self._file: TextIO = path.open("a", encoding="utf-8")
        self._lock = Lock()
        self._journal = Journal(out / JOURNAL, is_new=resumed is None, sign=sign)
        self._num_cut = self._journal.num_cut

    def write(self, row: Mapping[str, Any]) -> Record | None:
        """Append one row; `t` is filled in. Values that are not finite become null."""
        row = finite({"kind": row["kind"], "t": time.time(), **row})
        record = to_record(row)
        if row["kind"] == "event":
            self._journal.append(row)
            if cut := self._num_cut:  # after the line that says by which key all are signed now
                self._num_cut = 0
                text = f"{cut} bytes at the end of {JOURNAL} were no whole line; they are cut off"
                self.write({"kind": "event", "event": "warning", "site": None, "text": text})
            return record
        assert record is not None, f"no record is of kind {row['kind']!r}"
        with self._lock:
            self._file.write(json.dumps(row, allow_nan=False, separators=(",", ":")) + "\n")
            self._file.flush()
        return record

    def close(self) -> None:
        """Close the files."""
        self._journal.close()
        with self._lock:
            self._file.close()


def iter_records(out: Path, at: dict[str, int] | None = None) -> Iterator[Record]:
    """Records in a run's folder in their order, finished or not; none if there is no file yet.

    With `at`, those of whole lines beyond so many bytes of each file, and it moves on.

    Raises:
        ConfigError: a line that is not the last one is no record.
    """
    both = [_read(out / name, at) for name in (METRICS, JOURNAL)]
    merged = heapq.merge(*both, key=lambda found: found[1].t)
    return (record for _, record in merged)


def _read(path: Path, at: dict[str, int] | None = None) -> Iterator[tuple[bytes, Record]]:
    """Records of a file, with their lines."""
    if not path.exists():
        return
    with path.open("rb") as file:
        file.seek((at or {}).get(path.name, 0))
        for number, line in enumerate(file, start=1):
            is_whole = line.endswith(b"\n")  # else its writer was killed, or writes it now
            if at is not None:
                if not is_whole:
                    return
                at[path.name] = at.get(path.name, 0) + len(line)
            text = line.decode(errors="replace")
            try:
                record = to_record(json.loads(text)) if text.strip() else None
            except NOT_A_RECORD:
                if not is_whole:
                    return
                raise ConfigError(
                    f"{path} line {number} is no record ({text[:40].strip()!r}); "
                    "remove the line, or restore the file"
                ) from None
            if record is not None:
                yield line, record


def _lines_until(path: Path, rounds: int, versions: Sequence[int]) -> Iterator[bytes]:
    def is_kept(record: Record) -> bool:
        if isinstance(record, RoundRecord):
            is_one = 0 <= record.fragment < len(versions)
            return is_one and record.version <= versions[record.fragment]
        return getattr(record, "version", 0) <= rounds

    return (line.rstrip(b"\n") + b"\n" for line, record in _read(path) if is_kept(record))


def finite(value: Any) -> Any:
    """The value with None for every number that JSON cannot hold."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): finite(item) for key, item in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [finite(item) for item in value]
    return value
