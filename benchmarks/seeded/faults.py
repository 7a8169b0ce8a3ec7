"""Faults of processes, paths and disks, in a seed's order and at its times."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from benchmarks.seeded.kernel import Process

if TYPE_CHECKING:
    from benchmarks.seeded.world import Report, World

__all__ = ["cause_faults"]

MEAN_PAUSE_S = 1.0
"""Between two faults."""
LAST_S = 120.0
"""For which the last faults go on."""


def cause_faults(world: World, report: Report) -> None:
    """As many as a report asks for, one after the other; then calm."""
    for index in range(report.num_faults):
        world.kernel.sleep(world.random.expovariate(1 / MEAN_PAUSE_S))
        if world.is_complete:
            return
        kind = world.random.choice(KINDS)
        if index not in report.skipped:
            kind(world)
    world.kernel.sleep(LAST_S)
    for path in world.paths.values():
        path.slow, path.loss, path.repeats = 1.0, 0.0, 0.0
        path.cut_until = {"up": 0.0, "down": 0.0}
    world.disk.full_until.clear()
    world.disk.crash_next.clear()


def _kill_site(world: World) -> None:
    _kill(world, world.sites[world.random.choice(world.names)])


def _kill_coordinator(world: World) -> None:
    if world.coordinator is not None:
        _kill(world, world.coordinator.process)


def _kill(world: World, process: Process) -> None:
    if not process.is_dead:
        world.count(f"killed {'coordinator' if process.name == 'coordinator' else 'site'}")
        world.kernel.kill(process)


def _kill_while_writing(world: World) -> None:
    world.disk.crash_next.add(world.random.choice(["coordinator", *world.names]))


def _stop(world: World) -> None:
    processes = [*world.sites.values()]
    if world.coordinator is not None:
        processes.append(world.coordinator.process)
    process = world.random.choice(processes)
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
