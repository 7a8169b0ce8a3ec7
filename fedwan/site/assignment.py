"""What a site's service hands to the training script that it starts, and what it gets back.

A file in the site's folder, named by one environment variable, as torchrun hands ranks over. The
script's processes read it in `fedwan.join`. They leave word of how they ended in a second file: a
process that was killed leaves none.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import socket
import sys
import tempfile
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from fedwan import errors
from fedwan.errors import FedwanError, UserError, place_of
from fedwan.files import disk_full, on_disk, replace_text

VARIABLE = "FEDWAN_ASSIGNMENT"
"""Environment variable with the path of the file."""

ORPHAN_GRACE_S = 5.0
LONGEST_TEXT = 2000
"""Characters of an error that are handed on."""
MEMORY = Path("/dev/shm")  # noqa: S108 - folders of unforeseeable names, for this user alone

_OUTCOME, _JOINED = "outcome.json", "joined"
"""Beside the assignment: how the script ended; that it has read it, and then what let it in."""
_DRAFT = "outcome.tmp"
"""Of one process at a time."""
_PEER_LOST = ("gloo/transport", "ncclRemoteError")
"""In what torch says of a collective whose other process has died."""


@dataclass(frozen=True)
class Assignment:
    """One start of one site in one run."""

    address: str
    """`host:port` of the coordinator's data plane."""
    run_id: str
    config: str
    """The run's configuration, as JSON."""
    site: str
    """Its name, the common name of its certificate."""
    identity: str
    """Folder with `ca.crt`, `identity.crt` and `identity.key`."""
    dir: str
    """Folder of the site's state: checkpoints, logs."""
    data_path: str
    """Folder of the site's data, in place of the run's `data.path`; empty takes that."""
    show_samples: bool
    """Whether samples made of the site's own inputs may leave it; for no run to say."""
    parent: int
    """Process that started the script, and with which it ends on the same machine."""
    machine: str
    """Where that process is."""
    error: str = ""
    """How the script's start before this one ended."""

    @property
    def checkpoints(self) -> Path:
        """Folder of the site's checkpoints of this run."""
        return Path(self.dir) / "checkpoints" / self.run_id

    def write(self, path: Path) -> None:
        """Put it in place, and drop what an earlier start left."""
        drop_meeting(path)
        folder = meeting_folder(path)
        folder.parent.mkdir(parents=True, exist_ok=True)
        if os.access(MEMORY, os.W_OK | os.X_OK):
            folder.symlink_to(tempfile.mkdtemp(prefix="fedwan-", dir=MEMORY))
        else:
            folder.mkdir()
        for word in (_OUTCOME, _DRAFT, _JOINED):
            path.with_name(word).unlink(missing_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def given(cls) -> Assignment | None:
        """That of this process; None where nobody started it for a run."""
        text = os.environ.get(VARIABLE, "")
        if not text:
            return None
        try:
            assignment = cls(**json.loads(Path(text).read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise UserError(
                f"{VARIABLE} = {text!r} is no assignment ({error}); unset it to train alone, or "
                "start the script with `fedwan launch` or a site's `command`; where a site has "
                "several machines, its `dir` is one folder that all of them share"
            ) from None
        path = Path(text)
        with on_disk(path.parent):
            path.with_name(_JOINED).touch()
        return assignment


@dataclass(frozen=True)
class Outcome:
    """How a script ended that has said so."""

    error: str
    """Class of the error; empty if there was none."""
    text: str
    step: int
    """Of the run, where it stood."""

    @property
    def is_own(self) -> bool:
        """Whether it is an error of fedwan's tree, not the script's."""
        return self.error in errors.TREE

    def exception(self) -> FedwanError:
        """An error of fedwan's tree, as an object of its own class."""
        return errors.TREE[self.error](self.text)

    def keep(self, path: Path) -> None:
        """Put it beside an assignment, in place of what the script has left."""
        replace_text(path.with_name(_OUTCOME), json.dumps(asdict(self)))

    @property
    def failure(self) -> str:
        """An error of the script's, in a line."""
        return f"the training script failed at step {self.step}: {self.error}: {self.text}"

    @classmethod
    def is_left(cls) -> bool:
        """Whether a process of this script has left word."""
        text = os.environ.get(VARIABLE, "")
        return bool(text) and Path(text).with_name(_OUTCOME).exists()

    @classmethod
    def leave(cls, error: BaseException | None, step: int) -> None:
        """Leave word for the service, if there is one; the first process that does is heard."""
        text = os.environ.get(VARIABLE, "")
        has_failed = isinstance(error, Exception) or (isinstance(error, SystemExit) and error.code)
        is_of_peer = isinstance(error, RuntimeError) and any(t in str(error) for t in _PEER_LOST)
        if not text or is_of_peer or (error is not None and not has_failed):
            return  # a signal, or another process's end: how that came about is told by others
        error = disk_full(error) or error
        path = Path(text).with_name(_OUTCOME)
        said = " ".join(str(error or "").split())[:LONGEST_TEXT]
        if error is not None and not isinstance(error, FedwanError):
            said += place_of(error)
        word = cls("" if error is None else type(error).__name__, said, step)
        draft = path.with_name(_DRAFT)
        with contextlib.suppress(OSError):  # another is first, or the disk is full
            file = draft.open("x")
            try:
                with file:
                    file.write(json.dumps(asdict(word)))
                if not path.exists():
                    draft.replace(path)
            finally:
                draft.unlink(missing_ok=True)


def meeting_folder(path: Path) -> Path:
    """Where a recipe's processes, and torchrun, find one another, beside their assignment.

    By files, because torch's stores on TCP listen on all interfaces, let in everybody, and
    torchrun unpickles what is in its own. A link to a folder in memory, where there can be one: a
    record that a full disk tears has torchrun wait for ever.
    """
    return path.with_name("meeting")


def drop_meeting(path: Path) -> None:
    """Remove that folder, and the link to it."""
    folder = meeting_folder(path)
    shutil.rmtree(folder.resolve(), ignore_errors=True)
    folder.unlink(missing_ok=True)


def tell_welcome(start: str) -> None:
    """Leave word for the service, if there is one, which start of the coordinator let it in."""
    if text := os.environ.get(VARIABLE, ""):
        with contextlib.suppress(OSError):  # the disk is full
            replace_text(Path(text).with_name(_JOINED), start)


def welcomed_by(path: Path) -> str:
    """The word that a script has left beside its assignment; empty if none."""
    with contextlib.suppress(OSError):
        return path.with_name(_JOINED).read_text()
    return ""


def read_outcome(path: Path) -> tuple[Outcome | None, bool]:
    """The outcome that a script left beside its assignment, and whether it ever joined."""
    try:
        outcome = Outcome(**json.loads(path.with_name(_OUTCOME).read_text()))
    except (OSError, ValueError, TypeError):
        outcome = None
    return outcome, path.with_name(_JOINED).exists()


def newest_version(checkpoints: Path) -> int:
    """Of the files `site-VERSION.safetensors`; -1 if there is none."""
    return max((int(path.name[5:13]) for path in checkpoints.glob("site-????????.*")), default=-1)


def machine() -> str:
    """This machine since its last start, and within it, as in a container, these process ids."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')}"
    except OSError:  # not Linux
        return socket.gethostname()


def end_with(parent: int) -> None:
    """End this process soon after the one that started the script, whatever it is doing then."""

    def watch() -> None:
        while psutil.pid_exists(parent):
            time.sleep(0.5)
        time.sleep(ORPHAN_GRACE_S)
        print("fedwan: the process above is gone, so this one ends", file=sys.stderr)
        os._exit(1)

    threading.Thread(target=watch, name="parent", daemon=True).start()
