"""`journal.jsonl`: a run's events in the order in which they happened, and the check of them.

Each line ends with a SHA-256 of itself, and holds that of the line before: none can be changed,
left out or put in without a trace, unless all that follow are written anew. Whoever keeps the last
hash elsewhere sees that, too. Where the coordinator has an identity, the lines that it relies on
(`DURABLE`) are signed by its key, which vouches for all before them, and contributions by their
sites' keys. Some lines have no text; they are for the check alone:

    contribution   what the next version is made of: site, version that it started from, SHA-256 of
                   its payload, steps, samples, weight
    version        of a fragment; SHA-256 of the global weights of its tensors, as `hash_state`
    checkpoint     versions of the fragments in it
"""

from __future__ import annotations

import hashlib
import json
import os
from base64 import b64encode
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any

from fedwan.config import require_run
from fedwan.errors import CheckpointError, ConfigError, FedwanError, IdentityError
from fedwan.files import replace_bytes

if TYPE_CHECKING:
    from fedwan.output.signatures import Signatures

JOURNAL = "journal.jsonl"
_TAIL = 1 << 20
"""Bytes that are read to find the last line; more where it is longer."""
FIRST = "0" * 64
"""What the first line holds as the hash of the line before."""
DURABLE = frozenset(
    "start resume version checkpoint stopped done drained ejected admitted warning".split()
)
"""Events that are on disk when `append` returns. A warning may say that all sites begin anew."""


Sign = Callable[[bytes], bytes]
"""A signature of some bytes; see `fedwan.link.tls.Identity.sign`."""
SIGNED = b"fedwan journal "
"""Before what is signed of a line, so that it is no other statement."""


class Journal:
    """Appends lines to a new file, or to one that is there. Safe to call from several threads.

    `sign` signs lines of `DURABLE` events; without it none is signed.
    """

    def __init__(self, path: Path, *, is_new: bool, sign: Sign | None = None) -> None:
        if is_new or not path.exists():
            replace_bytes(path, b"")
        self._last, end = _end(path)
        self.num_cut = path.stat().st_size - end
        """Bytes at the end that were no whole line, as a crash leaves them; they are gone."""
        if not end and path.read_bytes().count(b"\n") > 1:
            raise ConfigError(
                f"{path}: none of its lines is as it was written, as where an editor has changed "
                "their ends; restore the file"
            )
        if self.num_cut:
            os.truncate(path, end)
        self._file, self._sign = path.open("ab", buffering=0), sign
        self._lock = Lock()

    def append(self, row: Mapping[str, Any]) -> None:
        """Add one event; an `OSError` where it could not be written, and then nothing was.

        Others may add theirs while one is on its way to the disk; before them it stays, even so.
        """
        is_durable = row["event"] in DURABLE
        with self._lock:
            before = self._last
            line, last = _seal(row, before, self._sign if is_durable else None)
            begin = self._file.seek(0, os.SEEK_END)
            try:
                while line:
                    line = line[self._file.write(line) :]
            except OSError:
                self._file.truncate(begin)  # what failed must not be read as done
                raise
            self._last = last
        if is_durable:
            try:
                os.fsync(self._file.fileno())
            except OSError:
                with self._lock:
                    if self._last == last:
                        self._file.truncate(begin)
                        self._last = before
                raise

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._file.close()


def _seal(row: Mapping[str, Any], before: str, sign: Sign | None) -> tuple[bytes, str]:
    """A line, and its hash: of all that stands before it, as `signed` is a signature of."""
    text = json.dumps({**row, "before": before}, allow_nan=False, separators=(",", ":"))
    body = text[:-1].encode()
    if sign is not None:
        body += b',"signed":"%b"' % b64encode(sign(SIGNED + body))
    digest = hashlib.sha256(body).hexdigest()
    return body + f',"hash":"{digest}"}}\n'.encode(), digest


def require_begun(path: Path) -> None:
    """Refuse a journal without a whole line; one of a run that has a checkpoint had some."""
    if not path.exists() or not _end(path)[1]:
        what = "holds no line as it was written" if path.exists() else "was removed"
        raise ConfigError(f"{path} {what}, and the run cannot go on without it; restore it")


def _end(path: Path) -> tuple[str, int]:
    """The hash of the last line that is whole, and where it ends; `FIRST` and 0 if none is."""
    size, taken = path.stat().st_size, _TAIL
    with path.open("rb") as file:
        while True:
            end, begin = size, max(0, size - taken)
            file.seek(begin)
            lines = file.read(size - begin).splitlines(keepends=True)
            for line in reversed(lines[begin > 0 :]):  # the first may lack its beginning
                try:
                    return _open_line(line)["hash"], end
                except ValueError:
                    end -= len(line)
            if not begin:
                return FIRST, 0
            taken *= 16


def _open_line(line: bytes) -> dict[str, Any]:
    body, _, end = line.rpartition(b',"hash":"')
    if end != f'{hashlib.sha256(body).hexdigest()}"}}\n'.encode():
        raise ValueError("it does not have the hash that it ends with: it was changed")
    row: dict[str, Any] = json.loads(line)
    return row


# The check ---------------------------------------------------------------------------------------


def verify(out: Path, ca: Path | None = None) -> dict[str, Any]:
    """Walk the journal of a run's folder from end to end; what it tells, ready for JSON.

    Signatures are checked by the certificates that the journal has. With `ca`, a file of
    authorities, these must be theirs, and nothing may be unsigned.

    Raises:
        ConfigError: there is no run, or no journal of it; or `ca` cannot be read.
        FedwanError: the first line that cannot be, or is not true of the folder's other files.
    """
    from fedwan.output.signatures import Signatures
    from fedwan.output.summary import read_summary

    path, summary = out / JOURNAL, out / "summary.json"
    if not path.is_file():
        require_run(out)
        has_begun = summary.exists() or (out / "checkpoint").exists()
        why = "it was removed; restore it" if has_begun else "the run has not begun; start it again"
        raise ConfigError(f"{str(out)!r} holds no {JOURNAL}: {why}")
    # Each before what is written after it: a run may go on meanwhile.
    ended = read_summary(summary).global_sha256 if summary.exists() else ""
    saved = _checkpoint(out)
    lines = path.read_bytes().splitlines(keepends=True)
    torn = lines.pop() if lines and not lines[-1].endswith(b"\n") else b""
    history = _History(Signatures(ca))
    for number, line in enumerate(lines, start=1):
        try:
            history.take(number, _open_line(line), line)
        except (ValueError, KeyError, TypeError, IndexError, IdentityError) as error:
            is_told = type(error) in (ValueError, IdentityError)
            text = error if is_told else f"it is none of its kind ({error!r})"
            raise FedwanError(f"{path} line {number}: {text}") from None
    try:
        if saved is not None:
            history.compare("the checkpoint stands", *saved)
    except ValueError as error:
        raise FedwanError(f"{path}: {error}") from None
    if ended and history.end != ended:
        raise FedwanError(
            f"{path}: its last line tells of {history.end[:12] or 'no end'}, {summary} of one with "
            f"weights {ended[:12]}: lines are missing, or one of the two was changed"
        )
    if ended and (saved is None or saved[0] != history.versions):
        found = "there is none" if saved is None else f"it is of versions {saved[0]}"
        raise FedwanError(
            f"{out / 'checkpoint'}: the run ended at versions {history.versions}, and {found}: "
            "the last one was removed or replaced; restore it"
        )
    return {
        "lines": len(lines),
        "hash": history.last,
        "torn_bytes": len(torn),
        "versions": history.versions,
        "contributions": len(history.merged),
        "events": dict(history.counts),
        "checkpoint": None if saved is None else saved[0],
        "is_done": bool(history.end),
        **history.signatures.found(),
    }


def _checkpoint(out: Path) -> tuple[list[int], list[str]] | None:
    """Versions of the fragments in the checkpoint, and the hashes of their weights."""
    from fedwan.coordinator.model import CHECKPOINT, another_version
    from fedwan.state import check_tensors, hash_state, read_tensors, select_prefix

    path = out / "checkpoint" / CHECKPOINT
    if not path.exists():
        return None
    try:
        check_tensors(path)  # the moving average and the outer state, too
        tensors, meta = read_tensors(path, "global:")
        weights = select_prefix("global", tensors)
        parts = [{name: weights[name] for name in names} for names in meta["fragments"]]
        return meta["versions"], [hash_state(part) for part in parts]
    except KeyError as error:
        raise FedwanError(str(another_version(path.parent, error))) from None
    except CheckpointError as error:
        raise FedwanError(str(error)) from None


class _History:
    """What a walk has come to. A `ValueError` or `IdentityError` of it tells what cannot be."""

    def __init__(self, signatures: Signatures) -> None:
        self.signatures = signatures
        self.last = FIRST
        self.counts: Counter[str] = Counter()
        self.versions: list[int] = []
        """By fragment."""
        self.merged: dict[tuple[int, int, str], int] = {}
        """Version that a contribution went into, by fragment, version it started from, and site."""
        self.end = ""
        """SHA-256 of the weights that the run ended with."""
        self._weights: dict[tuple[int, int], tuple[str, int]] = {}
        """Hash and line, by fragment and version."""

    def take(self, number: int, row: Mapping[str, Any], line: bytes) -> None:
        """The next line."""
        if row["before"] != self.last:
            raise ValueError("it does not follow on the line before: a line is missing, or is new")
        self.last = row["hash"]
        self.signatures.take(row, line)
        self.counts[row["event"]] += 1
        match row["event"]:
            case "contribution":
                self._merge(row["fragment"], row["version"], row["site"])
            case "version":
                self._advance(row["fragment"], row["version"], (row["weights"], number))
            case "resume":
                self._go_back(row["versions"], row["weights"])
            case "checkpoint" if row["versions"] != self.versions:
                raise ValueError(f"{row['versions']} were saved where {self.versions} stood")
            case "done":
                self.end = row["sha256"]

    def _merge(self, fragment: int, version: int, site: str) -> None:
        key = (fragment, version, site)
        if key in self.merged:
            raise ValueError(
                f"{site}'s contribution to version {version} of fragment {fragment} "
                f"was merged before, into version {self.merged[key]}"
            )
        self.merged[key] = self.versions[fragment] + 1

    def _advance(self, fragment: int, version: int, told: tuple[str, int]) -> None:
        if fragment == len(self.versions):
            self.versions.append(-1)
        if version != (next_ := self.versions[fragment] + 1):
            raise ValueError(
                f"it tells of version {version} of fragment {fragment}, expected {next_}"
            )
        self.versions[fragment] = version
        self._weights[fragment, version] = told

    def _go_back(self, versions: list[int], weights: list[str]) -> None:
        self.compare("it resumes", versions, weights)
        self.versions = list(versions)
        told, merged = self._weights.items(), self.merged.items()
        self._weights = {key: line for key, line in told if key[1] <= versions[key[0]]}
        self.merged = {key: into for key, into in merged if into <= versions[key[0]]}

    def compare(self, what: str, versions: list[int], weights: list[str]) -> None:
        """With versions that something stands at, and hashes of their weights."""
        if len(versions) != len(self.versions):
            seen = f"where the run was at {self.versions}" if self.versions else "and it is empty"
            raise ValueError(f"{what} at versions {versions}, {seen}")
        for key, found in zip(enumerate(versions), weights, strict=True):
            told, line = self._weights.get(key, ("", 0))
            if told != found:
                other = f"line {line} tells of {told[:12]}" if told else "no line tells of it"
                raise ValueError(
                    f"{what} at version {key[1]} of fragment {key[0]} with weights {found[:12]}; "
                    f"{other}"
                )
