"""What a run's processes tell each other in files: how it was started, and how each ended.

Flower notices a ServerApp or ClientApp that was killed only when its heartbeats have been missing
for a minute. The service beside it looks at its status instead: a process that is gone without
having said how it ended was killed.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import time
import uuid
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal, Self

import psutil

from fedwan import errors
from fedwan.errors import CheckpointError, FedwanError, RunStopped, UserError

__all__ = [
    "Outcome",
    "Signalled",
    "Start",
    "Status",
    "clientapp_log",
    "clientapp_status",
    "serverapp_log",
    "serverapp_status",
]

Outcome = Literal["running", "done", "stopped", "refused", "failed"]
"""`stopped`: the run was, from outside. `refused`: a user's mistake, which trying again would only
repeat."""

_ORPHAN_S = 5.0
_SAME_S = 2.0
"""Start times of one process differ by less: the kernel tells its boot in whole seconds."""


def serverapp_log(out: Path) -> Path:
    """Log of a run's ServerApp."""
    return out / "logs" / "serverapp.log"


def clientapp_log(state: Path) -> Path:
    """Log of a site's ClientApp."""
    return state / "logs" / "clientapp.log"


def serverapp_status(out: Path) -> Path:
    """Where the ServerApp of a run keeps its status."""
    return out / "flower" / "serverapp.json"


def clientapp_status(state: Path) -> Path:
    """Where the ClientApp of a site keeps its status."""
    return state / "clientapp.json"


class Signalled(RunStopped):
    """A signal ended this process; the run may go on without it."""


@dataclass(frozen=True)
class Status:
    """One process of a run."""

    pid: int
    started_s: float
    """When it started, in seconds since boot; with `pid` it names a process for good."""
    run_id: str
    outcome: Outcome = "running"
    error: str = ""
    """Class of the error, where it failed or was refused."""
    text: str = ""
    """The error in one line."""

    @classmethod
    def of(cls, run_id: str, pid: int | None = None) -> Self:
        """The status of a process that runs, this one if not given."""
        process = psutil.Process(pid)
        return cls(process.pid, _started_s(process), run_id)

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The status at a path; None where there is none, or it cannot be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Put it in place, whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = path.with_suffix(f".{self.pid}.tmp")
        draft.write_text(json.dumps(asdict(self)))
        draft.replace(path)

    @property
    def is_gone(self) -> bool:
        """Whether the process has ended, in whatever way, reaped or not."""
        try:
            process = psutil.Process(self.pid)
            if abs(_started_s(process) - self.started_s) > _SAME_S:
                return True
            # Its files and ports are its own until the last of its threads has ended.
            is_dead = process.status() in (psutil.STATUS_ZOMBIE, psutil.STATUS_DEAD)
            return is_dead and process.num_threads() <= 1
        except psutil.NoSuchProcess:
            return True

    @property
    def is_killed(self) -> bool:
        """Whether the process ended without telling anybody how."""
        return self.outcome == "running" and self.is_gone

    def ended(self, error: BaseException | None) -> Self:
        """The status of the process once it ends, in peace or with an error."""
        if error is None:
            return replace(self, outcome="done")
        kind = type(error).__name__
        text = " ".join(str(error).split()) or f"{kind} without a word"
        outcome: Outcome = "failed"
        if isinstance(error, UserError):
            outcome = "refused"
        elif isinstance(error, Signalled):
            kind = RunStopped.__name__
        elif isinstance(error, RunStopped):
            outcome = "stopped"
        return replace(self, outcome=outcome, error=kind, text=text)

    def exception(self, log: Path) -> FedwanError:
        """The error it ended with, as an object of its own class; `log` holds its traceback."""
        if self.error not in errors.__all__:
            return FedwanError(f"{self.error}: {self.text}; the traceback is in {log}")
        error: FedwanError = getattr(errors, self.error)(self.text)
        return error

    def end_orphan(self) -> None:
        """End the process, whose service died before it, if it lives on.

        It would end by itself within seconds, but holds its port and files until then. Call it only
        while holding the folder's lock: the service is dead then.
        """
        deadline = time.monotonic() + _ORPHAN_S
        while not self.is_gone and time.monotonic() < deadline:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(self.pid, signal.SIGKILL)
            time.sleep(0.05)


def _started_s(process: psutil.Process) -> float:
    """In seconds since boot: a clock that is set does not change it."""
    return float(process.create_time() - psutil.boot_time())


@dataclass(frozen=True)
class Start:
    """One start of a run: what its ServerApp is told beside the configuration.

    A file in the run's folder: it stays on the coordinator's machine, while Flower's run config
    travels to every site.
    """

    run_id: str
    """Of the run; a resumed run keeps it, so that sites still at work rejoin."""
    identity: str
    """The coordinator's identity folder."""
    resume: bool
    """Whether to go on from the last checkpoint."""

    @classmethod
    def begin(cls, out: Path, identity: Path, *, resume: bool) -> Self:
        """Write down a new start.

        Raises:
            CheckpointError: there is no run to go on with.
        """
        run_id = cls.read(out).run_id if resume else uuid.uuid4().hex
        start = cls(run_id, str(identity.absolute()), resume)
        path = _start_path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(start)))
        return start

    @classmethod
    def read(cls, out: Path) -> Self:
        """The last start.

        Raises:
            CheckpointError: there is none in this folder.
        """
        path = _start_path(out)
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{out} holds no run to go on with ({path.name}: {type(error).__name__}); "
                "start it without --resume, or give the folder of the run"
            ) from error


def _start_path(out: Path) -> Path:
    return out / "flower" / "start.json"
