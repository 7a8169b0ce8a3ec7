"""Faults of processes, paths and disks, in a seed's order and at its times.

The disk is under the real writes of `fedwan.files`: files are real and small, and what
`write_atomically` asks of the operating system passes through here. At each such effect its process
may be killed, and then what was not yet synchronised is lost or torn; or there is no space left.
"""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.seeded.kernel import Process
from fedwan.coordinator import members
from fedwan.errors import UserError
from fedwan.output.journal import DURABLE, JOURNAL

if TYPE_CHECKING:
    from benchmarks.seeded.world import Report, World


ENDING = ".safetensors"
"""Of files that faults come to."""


class Disk:
    """Stands for `os` in `fedwan.files`; the rest of `os` is as it is."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._renamed: dict[str, tuple[Path, bytes | None]] = {}
        """By process: the last rename whose folder is not synchronised, and what it replaced."""
        self.full_until: dict[str, float] = {}
        """By name of a process."""
        self.crash_next: set[str] = set()
        """Names of processes that are killed at their next effect."""
        self.rot_next: set[str] = set()
        """Names of processes of whose newest checkpoint a bit flips once they have died."""
        self._rotted: set[str] = set()

    def rot(self, name: str) -> None:
        """A process has died: flip the bit, if there is an older checkpoint.

        Or in the newest global weights of a site.
        """
        kept = sorted((self._world.folder / name).rglob("[cgs]*.safetensors"))
        if name not in self.rot_next or name in self._rotted or len(kept) < 2:
            return
        self._rotted.add(name)  # once: two checkpoints are kept, and one may be lost
        self._world.count("bit flipped")
        newest = list({path.name[0]: path for path in kept}.values())
        path = self._world.random.choice(newest)
        data = bytearray(path.read_bytes())
        at = self._world.random.randrange(8 * len(data))
        data[at // 8] ^= 1 << at % 8
        path.write_bytes(data)

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def fsync(self, number: int) -> None:
        process = self._world.kernel.current.process
        path = Path(os.readlink(f"/proc/self/fd/{number}"))
        if path.is_dir():
            if process.name in self._renamed:
                self._effect(self._lose_rename)
                del self._renamed[process.name]
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
        self._renamed[process.name] = (target, old)

    def _effect(self, spoil: Callable[[], None]) -> None:
        """A moment at which the process may be killed; what is left of its effect then."""
        process = self._world.kernel.current.process
        if process.name in self.crash_next:
            self.crash_next.discard(process.name)
            self._world.count("killed while writing")
            spoil()
            self._world.kernel.kill(process)

    def _lose_rename(self) -> None:
        target, old = self._renamed.pop(self._world.kernel.current.process.name)
        if self._world.random.random() < 0.5:
            if old is None:
                target.unlink(missing_ok=True)
            else:
                target.write_bytes(old)

    def _tear(self, path: Path) -> None:
        """What a kill leaves in the temporary file, which nobody will clean away."""
        whole = path.read_bytes()
        left = path.with_name(path.name.replace(str(os.getpid()), "12345"))
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


MEAN_PAUSE_S = 1.0
"""Between two faults."""
LAST_S = 120.0
"""For which the last faults go on."""


def cause_faults(world: World, report: Report) -> None:
    """One after the other until there are as many as a report asks for; then calm."""
    # A third of the seeds have an operator, too.
    kinds = KINDS if report.seed // 8 % 3 else (*KINDS, *[_decide] * 2)
    while report.faults.total() < report.num_faults:
        world.kernel.park(world.random.expovariate(1 / MEAN_PAUSE_S))
        if world.is_complete:
            return
        world.random.choice(kinds)(world)
    world.kernel.park(LAST_S)
    for path in world.paths.values():
        path.mend()
    world.disk.full_until.clear()
    world.disk.crash_next.clear()


def _kill_site(world: World) -> None:
    _kill(world, world.sites[world.random.choice(world.names)], "site")


def _kill_coordinator(world: World) -> None:
    _kill(world, world.coordinator.process, "coordinator")


def _kill(world: World, process: Process, role: str) -> None:
    if not process.is_dead:
        world.count(f"killed {role}")
        world.kernel.kill(process)


def _kill_while_writing(world: World) -> None:
    world.disk.crash_next.add(world.random.choice(["coordinator", *world.names]))


def _stop(world: World) -> None:
    process = world.random.choice([*world.sites.values(), world.coordinator.process])
    if not process.is_dead:
        world.count("stopped")
        world.kernel.stop(process, world.random.choice((1.0, 10.0, 90.0)) * world.random.random())


def _cut(world: World) -> None:
    path = world.paths[world.random.choice(world.names)]
    seconds = world.random.choice((2.0, 15.0, 120.0)) * world.random.random()
    for way in world.random.choice((["up"], ["down"], ["up", "down"])):
        world.count(f"cut {way}")
        path.cut_until[way] = world.kernel.now + seconds


def _slow_down(world: World) -> None:
    world.count("slow")
    world.paths[world.random.choice(world.names)].slow = world.random.choice((1.0, 20.0, 200.0))


def _lose(world: World) -> None:
    path = world.paths[world.random.choice(world.names)]
    path.loss = world.random.choice((0.0, 0.05, 0.3))
    path.repeats = world.random.choice((0.0, 0.3))


def _fill_disk(world: World) -> None:
    name = world.random.choice(["coordinator", *world.names])
    world.disk.full_until[name] = world.kernel.now + 20.0 * world.random.random()


def _decide(world: World) -> None:
    """The operator has a site leave, or takes it back."""
    present, site = world.coordinator, world.random.choice(world.names)
    verb = world.random.choice(("drain", "drain", "eject", "admit"))
    if present.hub is None or present.process.is_dead:
        return

    def ask() -> None:
        try:
            members.answer(present.run, {"ask": verb, "site": site})
            world.count(f"{verb} of a site")
        except UserError as error:
            world.note(str(error))

    world.kernel.spawn(present.process, ask, "control")


def _rot(world: World) -> None:
    world.disk.rot_next.add(world.random.choice(["coordinator", *world.names]))


KINDS: tuple[Callable[[World], None], ...] = (
    _kill_site,
    _kill_coordinator,
    _kill_while_writing,
    _stop,
    _cut,
    _slow_down,
    _lose,
    _fill_disk,
    _rot,
)
