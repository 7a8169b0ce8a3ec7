"""Faults of processes, paths, disks and clocks, in a seed's order and at its times."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from benchmarks.seeded.kernel import Process
from benchmarks.seeded.scenarios import find
from fedwan.config import MASKED
from fedwan.coordinator import members
from fedwan.errors import UserError

if TYPE_CHECKING:
    from benchmarks.seeded.world import Report, World


MEAN_PAUSE_S = 1.0
"""Between two faults of a burst."""
HURRY = 10
"""For each fault that is due, how many times as fast the next one comes."""
EARLY = 0.7
"""All are due after this share of the updates."""
LOOK_S = 0.1
"""Until it is seen how many are due."""
BURST = (4, 9)
"""Faults, at least and at most."""
QUIET_S = 120.0
"""After a burst, at most, until there is another update: else faults meet nothing but starts."""
MENDED = 0.7
"""Share of the paths on which nothing is lost any more after a burst."""
LAST_S = 120.0
"""For which the last faults go on."""
DAY_S = 86400.0


def cause_faults(world: World, report: Report) -> None:
    """One burst after the other until there are as many as a report asks for; then calm."""
    kinds = kinds_of(world, report.seed)
    left = world.random.randint(*BURST)

    def lag() -> float:
        """Faults that are due by now, since the run may be over before the last."""
        due = report.num_faults * (world.report.num_updates + 1) / (EARLY * world.num_expected)
        return max(0.0, due - report.faults.total())

    while report.faults.total() < report.num_faults:
        if not left and not lag():
            _await_update(world)
            left = world.random.randint(*BURST)
        left = max(0, left - 1)
        pause = world.random.expovariate(1.0 / MEAN_PAUSE_S)
        while pause > 0:
            speed = 1 + HURRY * lag()
            world.kernel.park(min(LOOK_S, pause / speed))
            pause -= LOOK_S * speed
        if world.is_complete:
            return
        kind = world.random.choice(kinds)
        if kind.__name__ not in report.without:
            kind(world)
    world.kernel.park(LAST_S)
    for path in world.paths.values():
        path.mend()
    world.disk.full_until.clear()
    world.disk.crash_next.clear()
    world.disk.loss_next.clear()
    world.disk.older_next = False


def _await_update(world: World) -> None:
    for path in world.paths.values():
        if world.random.random() < MENDED:
            path.mend()
    until, present = world.kernel.now + QUIET_S, world.report.num_updates
    while (
        world.report.num_updates == present and world.kernel.now < until and not world.is_complete
    ):
        world.kernel.park(0.1)


def kinds_of(world: World, seed: int) -> Sequence[Kind]:
    """A third of the seeds has an operator, too; half lose what nobody makes again, in one way.

    Where bits are the undisturbed run's until a death, nobody dies in half of the seeds.
    """
    # Not by the seed's digits, which a scenario's seeds share.
    drawn = random.Random(f"{seed} kinds")
    if find(world.report.scenario).same_bits == "until a death" and drawn.randrange(2):
        return HARMLESS
    kinds = KINDS if drawn.randrange(3) else (*KINDS, *[decide] * 2)
    is_masked = world.config.codec.up in MASKED  # whose keys are in a folder, and of all sites
    return kinds if drawn.randrange(2) or is_masked else (*kinds, drawn.choice(LOSSES))


def kill_site(world: World) -> None:
    _kill(world, world.sites[world.random.choice(world.names)])


def kill_coordinator(world: World) -> None:
    _kill(world, world.coordinator.process)


def _kill(world: World, process: Process) -> None:
    if not process.is_dead:
        world.count("killed coordinator" if process.name == "coordinator" else "killed site")
        world.kernel.kill(process)


def kill_while_writing(world: World) -> None:
    world.disk.crash_next.add(world.random.choice(["coordinator", *world.names]))


def stop(world: World) -> None:
    process = world.random.choice([*world.sites.values(), world.coordinator.process])
    if not process.is_dead:
        world.count("stopped")
        world.kernel.stop(process, world.random.choice((1.0, 10.0, 90.0)) * world.random.random())


def cut(world: World) -> None:
    path = world.paths[world.random.choice(world.names)]
    seconds = world.random.choice((2.0, 15.0, 120.0)) * world.random.random()
    for way in world.random.choice((["up"], ["down"], ["up", "down"])):
        world.count(f"cut {way}")
        path.cut_until[way] = world.kernel.now + seconds


def slow_down(world: World) -> None:
    slow = world.random.choice((1.0, 20.0, 200.0))
    world.paths[world.random.choice(world.names)].slow = slow
    if slow > 1.0:  # else it is as fast as ever
        world.count("slow")


def lose(world: World) -> None:
    path = world.paths[world.random.choice(world.names)]
    path.loss = world.random.choice((0.0, 0.05, 0.3))
    path.repeats = world.random.choice((0.0, 0.3))


def fill_disk(world: World) -> None:
    name = world.random.choice(["coordinator", *world.names])
    world.disk.full_until[name] = world.kernel.now + 20.0 * world.random.random()


def decide(world: World) -> None:
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


def rot(world: World) -> None:
    world.disk.rot_next.add(world.random.choice(["coordinator", *world.names]))


def lose_folder(world: World) -> None:
    """A party comes back without its folder; after the coordinator's loss the run begins anew."""
    name = world.random.choice(["coordinator", *world.names])
    world.disk.loss_next.add(name)
    _kill(world, world.sites.get(name, world.coordinator.process))


def put_back(world: World) -> None:
    """The coordinator comes back with a checkpoint of long ago."""
    world.disk.older_next = True
    _kill(world, world.coordinator.process)


def join_twice(world: World) -> None:
    """A second process of a site joins while the first one, of a service that died, lives."""
    name = world.random.choice(world.names)
    if not world.sites[name].is_dead:
        world.count("two of one site")
        world.join_twice(name, name)


def join_elsewhere(world: World) -> None:
    """A second machine joins with a site's identity, and a copy of its folder.

    Of none that meets bad batches: each of both would be refused for them.
    """
    name = world.random.choice(world.names)
    is_bad = any(site == name for site, _ in world.bad_batches)
    if not is_bad and not world.sites[name].is_dead and (world.folder / name).exists():
        world.count("two machines of one site")
        world.invariants.forget()
        other = f"{name} elsewhere {world.report.faults.total()}"
        shutil.copytree(world.folder / name, world.folder / other, dirs_exist_ok=True)
        world.join_twice(name, other)


def set_clock(world: World) -> None:
    """A machine's clock is set, or begins to drift."""
    world.count("clock set")
    ahead_s = world.random.choice((60.0, 3600.0, DAY_S)) * world.random.uniform(-1, 1)
    drift = world.random.choice((0.0, 0.0, 0.001, -0.001, 0.1, -0.1))
    name = world.random.choice(["coordinator", *world.names])
    world.kernel.clocks[name] = (ahead_s, world.kernel.now, drift)


def add_site(world: World) -> None:
    """The run is stopped, and goes on with one site more; once."""
    if len(world.names) == world.num_first and not world.coordinator.process.is_dead:
        world.count("site added")
        world.add_site()


Kind = Callable[["World"], None]
KINDS: tuple[Kind, ...] = (
    kill_site,
    kill_coordinator,
    kill_while_writing,
    stop,
    cut,
    slow_down,
    lose,
    fill_disk,
    rot,
    join_twice,
    set_clock,
)
HARMLESS: tuple[Kind, ...] = (stop, cut, slow_down, lose, set_clock)
"""By which nobody dies."""
LOSSES: tuple[Kind, ...] = (lose_folder, put_back, add_site, join_elsewhere)
"""After which weights may be others than the undisturbed run's, but the same for all parties."""
