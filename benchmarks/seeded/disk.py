"""Disks that fail, under the real writes of `fedwan.files`.

Files are real and small, and what `write_atomically` asks of the operating system passes through
here. At each such effect its process may be killed, and then what was not yet synchronised is lost
or torn; or there is no space left. Once a process has died a bit of its newest checkpoint may flip;
its folder may be gone, or an older checkpoint be put back.
"""

from __future__ import annotations

import errno
import json
import operator
import os
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.seeded.kernel import Process
from fedwan.coordinator.model import CHECKPOINT, PREVIOUS
from fedwan.output.journal import DURABLE, JOURNAL
from fedwan.state import read_tensors_meta

if TYPE_CHECKING:
    from benchmarks.seeded.world import World


ENDING = ".safetensors"
"""Of files that faults come to."""


class Disk:
    """Stands for `os` in `fedwan.files`; the rest of `os` is as it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._pids: dict[Process, int] = {}
        self._renamed: dict[Process, tuple[Path, bytes | None]] = {}
        """The last rename whose folder is not synchronised, and what it replaced."""
        self.full_until: dict[str, float] = {}
        """By name of a process."""
        self.crash_next: set[str] = set()
        """Names of processes that are killed at their next effect."""
        self.rot_next: set[str] = set()
        """Names of processes of whose newest checkpoint a bit flips once they have died."""
        self._rotted: set[str] = set()
        self.loss_next: set[str] = set()
        """Names of processes whose folder is gone once they have died."""
        self.older_next = False
        """Whether the coordinator finds a checkpoint of long ago once it has died."""
        self._copies: list[tuple[Sequence[int], bytes]] = []
        """The coordinator's checkpoints of this run, oldest first, and their versions."""

    def on_death(self, name: str) -> None:
        """A process has died: spoil what it left, as it was to be."""
        self._rot(name)
        folder = self._world.folder / name
        if name in self.loss_next and next(folder.rglob(f"*{ENDING}"), None):
            self.loss_next.discard(name)
            self._world.count("folder lost")
            shutil.rmtree(folder)
            self._world.invariants.forget(is_back=name == "coordinator")
        if name == "coordinator" and self.older_next:
            self._put_back(folder / "checkpoint")

    def go_on(self, held: Sequence[int]) -> None:
        """The coordinator begins at these versions, if any: what came after them is made anew."""
        past = [copy for copy in self._copies if all(map(operator.le, copy[0], held))]
        self._copies = past if held else []

    def _put_back(self, folder: Path) -> None:
        """A checkpoint that was replaced at least two checkpoints ago, the only one now."""
        if len(self._copies) < 3:
            return
        self.older_next = False
        self._world.count("older checkpoint")
        del self._copies[self._world.random.randrange(1, len(self._copies) - 1) :]
        (folder / PREVIOUS).unlink(missing_ok=True)
        (folder / CHECKPOINT).write_bytes(self._copies[-1][1])
        self._world.invariants.forget(is_back=True)

    def _rot(self, name: str) -> None:
        """Flip the bit, if there is an older checkpoint.

        Or in the newest global weights of a site.
        """
        kept = sorted((self._world.folder / name).rglob("[cgs]*.safetensors"))
        if name not in self.rot_next or name in self._rotted or len(kept) < 2:
            return
        self._rotted.add(name)  # once: two checkpoints are kept, and one may be lost
        self._world.count("bit flipped")
        newest = list({path.name.split("-")[0]: path for path in kept}.values())
        path = self._world.random.choice(newest)
        data = bytearray(path.read_bytes())
        at = self._world.random.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def getpid(self) -> int:
        """Of the process that asks; all are one to the machine."""
        return self._pids.setdefault(self._world.kernel.current.process, len(self._pids) + 2)

    def fsync(self, number: int) -> None:
        process = self._world.kernel.current.process
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.is_dir():
            if process in self._renamed:
                self._effect(self._lose_rename)
                del self._renamed[process]
                if (kept := path / CHECKPOINT).exists():
                    versions = read_tensors_meta(kept)["versions"]
                    self._copies.append((versions, kept.read_bytes()))
                self._world.invariants.on_durable(process, path)
            return
        if ENDING not in path.name:
            return
        if self.full_until.get(process.name, 0.0) > self._world.kernel.now:
            self._world.count("disk full")
            raise OSError(errno.ENOSPC, "No space left on device", str(path))
        self._effect(lambda: self._tear(path))
        self._world.kernel.park(0.01)

    def replace(self, source: Path, target: Path) -> None:
        """Rename; a kill before the folder is synchronised may undo it."""
        if not target.name.endswith(ENDING):
            os.replace(source, target)
            return
        process = self._world.kernel.current.process
        self._effect(lambda: self._tear(source))
        old = target.read_bytes() if target.exists() else None
        os.replace(source, target)
        self._renamed[process] = (target, old)

    def _effect(self, spoil: Callable[[], None]) -> None:
        """A moment at which the process may be killed; what is left of its effect then."""
        process = self._world.kernel.current.process
        if process.name in self.crash_next:
            self.crash_next.discard(process.name)
            self._world.count("killed while writing")
            spoil()
            self._world.kernel.kill(process)

    def _lose_rename(self) -> None:
        target, old = self._renamed.pop(self._world.kernel.current.process)
        if self._world.random.random() < 0.5:
            if old is None:
                target.unlink(missing_ok=True)
            else:
                target.write_bytes(old)

    def _tear(self, path: Path) -> None:
        """What a kill leaves in the temporary file, which nobody will clean away."""
        whole = path.read_bytes()
        left = path.with_name(path.name.replace(f".{self.getpid()}.", ".12345."))
        left.write_bytes(whole[: self._world.random.randrange(len(whole) + 1)])


def tear_journal(folder: Path, random: Random) -> None:
    """The coordinator died: of what it wrote after it last synchronised, some bytes are left.

    A start that died before it wrote anything leaves the last line as torn as it was.
    """
    path = folder / JOURNAL
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    size = sum(map(len, lines))
    loose = 0
    while lines and not (lines[-1].endswith(b"\n") and json.loads(lines[-1])["event"] in DURABLE):
        loose += len(lines.pop())
    if loose:
        os.truncate(path, size - random.randrange(loose + 1))
