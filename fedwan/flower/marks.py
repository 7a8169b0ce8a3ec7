"""The mark that a run's process leaves on disk: who it is, and how it ended.

Flower notices a ServerApp or ClientApp that was killed only when its heartbeats have been missing
for a minute. The service beside it looks at the mark instead: a process that is gone without
having said how it ended was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from fedwan import errors
from fedwan.errors import FedwanError, RunStopped, UserError
from fedwan.flower.processes import is_running, started_s

__all__ = [
    "Mark",
    "Outcome",
    "Signalled",
    "clientapp_mark",
    "end_orphan",
    "ended",
    "read_mark",
    "serverapp_mark",
    "start",
    "write_mark",
]

Outcome = Literal["running", "done", "stopped", "refused", "failed"]
"""`stopped`: the run was, from outside. `refused`: a user's mistake, which trying again would only
repeat."""


_ORPHAN_S = 5.0
_SAME_S = 2.0
"""Start times of one process differ by less: the kernel tells its boot in whole seconds."""


class Signalled(RunStopped):
    """A signal ended this process; the run may go on without it."""


@dataclass(frozen=True)
class Mark:
    """One process of a run."""

    pid: int
    started_s: float
    """When it started, in seconds since boot; with `pid` it names a process for good."""
    run_id: str
    outcome: Outcome
    error: str = ""
    """Class of the error, where it failed or was refused."""
    text: str = ""
    """The error in one line."""

    @property
    def gone(self) -> bool:
        """Whether the process has ended, in whatever way."""
        try:
            return (
                not is_running(self.pid)
                or abs(started_s(psutil.Process(self.pid)) - self.started_s) > _SAME_S
            )
        except psutil.NoSuchProcess:
            return True

    @property
    def silent(self) -> bool:
        """Whether the process was killed, so that nobody was told how it ended."""
        return self.outcome == "running" and self.gone

    def exception(self, log: Path) -> FedwanError:
        """The error it ended with, as an object of its own class.

        Args:
            log: where the traceback of one that is no error of ours can be read.
        """
        if self.error not in errors.__all__:
            return FedwanError(f"{self.error}: {self.text}; the traceback is in {log}")
        error: FedwanError = getattr(errors, self.error)(self.text)
        return error


def serverapp_mark(out: Path) -> Path:
    """Where the ServerApp of a run leaves its mark."""
    return out / "flower" / "serverapp.json"


def clientapp_mark(state: Path) -> Path:
    """Where the ClientApp of a site leaves its mark."""
    return state / "clientapp.json"


def start(path: Path, run_id: str) -> Mark:
    """Mark this process as running."""
    mark = Mark(os.getpid(), started_s(psutil.Process()), run_id, "running")
    write_mark(path, mark)
    return mark


def ended(mark: Mark, error: BaseException | None) -> Mark:
    """The mark of a process that ends, in peace or with an error."""
    if error is None:
        return replace(mark, outcome="done")
    kind = type(error).__name__
    text = " ".join(str(error).split()) or f"{kind} without a word"
    outcome: Outcome = "failed"
    if isinstance(error, UserError):
        outcome = "refused"
    elif isinstance(error, Signalled):
        kind = RunStopped.__name__
    elif isinstance(error, RunStopped):
        outcome = "stopped"
    return replace(mark, outcome=outcome, error=kind, text=text)


def end_orphan(path: Path) -> None:
    """End the process that a mark is of, where its service died before it and it lives on.

    It would end by itself within seconds, but holds its port and files until then. Call it only
    while holding the folder's lock: the service is dead then.
    """
    mark = read_mark(path)
    if mark is None:
        return
    deadline = time.monotonic() + _ORPHAN_S
    while not mark.gone and time.monotonic() < deadline:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(mark.pid, signal.SIGKILL)
        time.sleep(0.05)


def write_mark(path: Path, mark: Mark) -> None:
    """Put a mark in place, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(f".{mark.pid}.tmp")
    draft.write_text(json.dumps(asdict(mark)))
    draft.replace(path)


def read_mark(path: Path) -> Mark | None:
    """The mark at a path; None where there is none, or it cannot be read."""
    try:
        values = json.loads(path.read_text())
        return Mark(**values)
    except (OSError, ValueError, TypeError):
        return None
