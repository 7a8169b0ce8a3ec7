"""What a run's processes tell each other in files: how it was started, and how each ended.

Both of Flower's processes write their output to a file of the run, leave a status that tells how
they ended, and end when the process that started them is gone. Flower notices one that was killed
only when its heartbeats have been missing for a minute. The service beside it looks at its status
instead: a process that is gone without having said how it ended was killed.
"""

from __future__ import annotations

import contextlib
import faulthandler
import json
import logging
import os
import signal
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Self

import psutil

from fedwan import errors
from fedwan.config import Config, to_json
from fedwan.errors import (
    STOPPED,
    CheckpointError,
    DiskFull,
    FedwanError,
    NotJoined,
    ProcessLost,
    RunStopped,
    SiteDrained,
    UserError,
)
from fedwan.files import on_disk, replace_text
from fedwan.output.journal import JOURNAL
from fedwan.site.assignment import end_with

RUN = "FEDWAN_RUN"
"""Environment variable with a run's folder, which SuperLink hands down to the ServerApp."""

_log = logging.getLogger(__name__)

_START = Path("flower", "start.json")
_ORPHAN_S = 5.0
# Start times of one process differ by less: the kernel tells its boot in whole seconds.
_SAME_S = 2.0


def serverapp_files(out: Path) -> tuple[Path, Path]:
    """Where the ServerApp of a run keeps its log and its status."""
    return out / "logs" / "serverapp.log", out / "flower" / "serverapp.json"


def service_file(out: Path) -> Path:
    """Where a run's service, above its ServerApp, keeps its status."""
    return out / "flower" / "service.json"


def clientapp_files(state: Path) -> tuple[Path, Path]:
    """Where the ClientApp of a site keeps its log and its status."""
    return state / "logs" / "clientapp.log", state / "clientapp.json"


@dataclass(frozen=True)
class Status:
    """One process of a run."""

    pid: int
    started_s: float
    """When it started, in seconds since boot; with `pid` it names a process for good."""
    outcome: str = "running"
    """Or `done`; `stopped`, from outside; `refused`, a user's mistake, which trying again would
    only repeat; `failed`."""
    error: str = ""
    """Class of the error, where it failed or was refused."""
    text: str = ""
    """The error in one line; of a site that goes on, why its script was started again."""
    run: str = ""
    """That a site has joined."""
    start: str = ""
    """Of the coordinator, which let it in."""
    port: int = 0
    """Where a ServerApp listens for sites."""

    @classmethod
    def of(cls, pid: int | None = None) -> Self:
        """The status of a process that runs, this one if not given."""
        process = psutil.Process(pid)
        return cls(process.pid, _started_s(process))

    @classmethod
    def read(cls, path: Path) -> Self | None:
        """The status at a path; None where there is none, or it cannot be read."""
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError):
            return None

    def write(self, path: Path) -> None:
        """Put it in place, whole or not at all; on a full disk into the place of the one before."""
        text = json.dumps(asdict(self))
        try:
            replace_text(path, text)
        except DiskFull:
            if not path.exists():
                raise
            with path.open("r+") as file:  # its block is there, and holds the new one
                file.write(text.ljust(path.stat().st_size))

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
    def is_out(self) -> bool:
        """Whether the run's operator had this site leave."""
        return self.error in ("SiteDrained", "SiteEjected")

    @property
    def is_behind(self) -> bool:
        """Whether the coordinator was started again, and does not know this site yet."""
        return self.error == NotJoined.__name__

    @property
    def is_killed(self) -> bool:
        """Whether the process ended without telling anybody how."""
        return self.outcome == "running" and self.is_gone

    def ended(self, error: BaseException | None) -> Self:
        """The status of the process once it ends, in peace or with an error."""
        if error is None:
            return replace(self, outcome="done", text="")
        kind, outcome = type(error).__name__, "failed"
        if isinstance(error, UserError):
            outcome = "refused"
        elif isinstance(error, RunStopped):
            outcome = "stopped"
        text = " ".join(str(error).split()) or f"{kind} without a word"
        return replace(self, outcome=outcome, error=kind, text=text)

    def exception(self, log: Path) -> FedwanError:
        """The error it ended with, as an object of its own class; `log` holds its traceback."""
        if self.error not in errors.TREE:
            return FedwanError(f"{self.error}: {self.text}; the traceback is in {log}")
        return errors.TREE[self.error](self.text)

    @classmethod
    def end_orphan(cls, path: Path) -> None:
        """End the process of a status file, whose service died before it, if it lives on.

        It would end by itself within seconds, but holds its port and files until then. Call it only
        while holding the folder's lock: the service is dead then.
        """
        status, deadline = cls.read(path), time.monotonic() + _ORPHAN_S
        while status and not status.is_gone and time.monotonic() < deadline:
            with contextlib.suppress(psutil.Error):
                psutil.Process(status.pid).kill()
            time.sleep(0.05)
        path.unlink(missing_ok=True)


def _started_s(process: psutil.Process) -> float:
    """In seconds since boot: a clock that is set does not change it."""
    return float(process.create_time() - psutil.boot_time())


@dataclass(frozen=True)
class Start:
    """One start of a run: what its ServerApp is told, in a file of the run's folder."""

    config: str
    """The run's configuration, as JSON."""
    run_id: str
    """Of the run; a resumed run keeps it, so that sites still at work rejoin."""
    identity: str
    """The coordinator's identity folder."""
    resume: bool
    goes_back: bool = False
    """Whether the version to go on from was chosen."""
    port: int = 0
    """Where the ServerApp before this one listened, and sites still dial; 0: as is configured."""

    @classmethod
    def begin(
        cls, config: Config, identity: Path, *, resume: bool, goes_back: bool = False
    ) -> Self:
        """Write down a new start; a CheckpointError if there is no run to go on with."""
        out = Path(config.out)
        run_id = cls._run_of(out) if resume else uuid.uuid4().hex
        start = cls(to_json(config), run_id, str(identity.absolute()), resume, goes_back)
        replace_text(out / _START, json.dumps(asdict(start)))
        return start

    @classmethod
    def again(cls, out: Path, port: int) -> None:
        """Have the next ServerApp go on from the last checkpoint, at this port."""
        start = replace(cls.read(out), resume=True, goes_back=False, port=port)
        replace_text(out / _START, json.dumps(asdict(start)))

    @classmethod
    def _run_of(cls, out: Path) -> str:
        """The run that goes on, as its last start has it, or the journal where that is lost."""
        try:
            return cls.read(out).run_id
        except CheckpointError:
            lost = (OSError, ValueError, KeyError, TypeError)
            with contextlib.suppress(*lost), (out / JOURNAL).open() as lines:
                return str(json.loads(next(lines, ""))["run"])
            raise

    @classmethod
    def read(cls, out: Path) -> Self:
        """The last start; a CheckpointError if there is none in this folder."""
        path = out / _START
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{out} holds no run to go on with ({path.name}: {type(error).__name__}); "
                "start it without --resume, or give the folder of the run"
            ) from error


@contextlib.contextmanager
def reported(
    log: Path, status_path: Path, service: Path | None = None
) -> Iterator[Callable[..., None]]:
    """This process's log file and status, its answer to signals, and its end with its parent.

    `service` is the status of the service above. Gives what tells the run that a site has joined,
    why its script was started again, which start of the coordinator let it in, and a port.
    """
    _write_output_to(log)
    end_with(os.getppid())
    status = Status.of()
    status.write(status_path)

    def tell(run: str = "", text: str = "", start: str = "", port: int = 0) -> None:
        nonlocal status
        if (told := replace(status, run=run, text=text, start=start, port=port)) != status:
            status = told
            with contextlib.suppress(OSError, DiskFull):  # training goes on
                status.write(status_path)

    failure, asked = None, threading.Event()
    try:
        with on_disk(log.parent.parent), _signals_as_errors(service, asked):
            yield tell
    except BaseException as error:
        failure = error
        is_bug = isinstance(error, Exception) and not isinstance(error, FedwanError)
        is_asked = asked.is_set() or isinstance(error, SiteDrained) or STOPPED in str(error)
        is_asked |= status.ended(error).is_behind
        level = logging.WARNING if isinstance(error, RunStopped) else logging.ERROR
        text = f"ended by {error!r}" if is_bug else error
        _log.log(logging.INFO if is_asked else level, "%s", text, exc_info=is_bug)
        raise
    finally:
        status.ended(failure).write(status_path)


@contextlib.contextmanager
def _signals_as_errors(service: Path | None, asked: threading.Event) -> Iterator[None]:
    """Raise the first SIGTERM or SIGINT as an error while the block runs, and ignore the others.

    Those after the block, too: what is left is to answer and to end. Flower's own handler leaves
    without an answer, after which its SuperNode waits for ever. Signals come in pairs, ours and
    then Flower's: the second must not cut short what the first began. `asked` is set if all above
    are there, so that it was no accident.
    """
    numbers, parent = (signal.SIGTERM, signal.SIGINT), os.getppid()
    came = threading.Event()

    def handle(number: int, frame: FrameType | None) -> None:
        if came.is_set():
            return
        came.set()
        above = Status.read(service) if service else None
        if above is not None and above.is_gone:
            raise FedwanError(f"the coordinator's service (process {above.pid}) was killed")
        if number == signal.SIGINT and os.getppid() != parent:  # Flower's own look for it
            raise FedwanError(f"Flower's process {parent}, which had started it, is gone")
        asked.set()
        if number == signal.SIGINT:  # which it sends to its own process, where a token has lapsed
            raise ProcessLost(
                "ended by SIGINT, from outside or by Flower, as after a pause of a minute or more"
            )
        raise FedwanError(f"ended by {signal.Signals(number).name}")

    for number in numbers:
        signal.signal(number, handle)
    try:
        yield
    finally:
        came.set()


def _write_output_to(log: Path) -> None:
    """Send this process's output and logging to a file, C libraries' and crashes' included."""
    log.parent.mkdir(parents=True, exist_ok=True)
    target = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)
    for stream in (1, 2):
        os.dup2(target, stream)
    os.close(target)
    faulthandler.enable()
    # It warns of each attempt to reach another process; who waits for it tells that once.
    logging.getLogger("flwr").setLevel(logging.ERROR)
    handler = logging.StreamHandler(sys.__stderr__)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logger = logging.getLogger("fedwan")
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
