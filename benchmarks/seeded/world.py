"""One federation in one process: real coordinator, real sites, seeded faults, invariants.

Every site and the coordinator is a `Process` that its supervisor starts again when it dies, as
systemd would. The weights of updates are compared with those of the run that nothing disturbed, for
as long as a scenario's have to be the same; what else must hold is asserted where it can break
first.
"""

from __future__ import annotations

import logging
import random
import tempfile
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any
from unittest import mock

from benchmarks.seeded import script
from benchmarks.seeded.disk import Disk, tear_journal
from benchmarks.seeded.faults import DAY_S, cause_faults
from benchmarks.seeded.invariants import Invariants, Versions
from benchmarks.seeded.kernel import Kernel, Killed, Process, Standstill
from benchmarks.seeded.network import HEARTBEAT_S, SeededLink
from benchmarks.seeded.network import Path as NetworkPath
from benchmarks.seeded.scenarios import DRAWN, TURNS, configure, draw
from benchmarks.seeded.threads import TIME, installed
from fedwan import app, files
from fedwan.config import MASKED, dump, site_names
from fedwan.coordinator import federation
from fedwan.coordinator.model import CHECKPOINT
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.servicer import Servicer
from fedwan.errors import (
    FedwanError,
    LinkLost,
    RunStopped,
    SessionLost,
    SiteDrained,
    SiteEjected,
    UserError,
)
from fedwan.link.pki import federation as make_identities
from fedwan.link.tls import Identity
from fedwan.memory import Tidier
from fedwan.output.journal import verify
from fedwan.output.records import Recorder
from fedwan.protocol.registry import DECIDED
from fedwan.site import meter, site, stub
from fedwan.site.assignment import ORPHAN_GRACE_S
from fedwan.site.site import Membership, Site
from fedwan.state import hash_state

CALM_S = 6 * 3600.0
"""Virtual time for a run to end once the faults have stopped."""
SILENCE_S = 20.0
STEP_S = 0.5
SLOWER = 20
"""A third of the seeds has steps that take as much longer: faults meet sites between exchanges."""
STRAGGLES = 4
"""One site takes as many times as long, in half of the seeds, and is not level at the end."""
FAULTS = 50
"""At least, of one seed."""
LATE_S = 30.0
"""A third of the seeds has a site that joins so much later, at most."""
MEMORY = Path("/dev/shm")


BadBatches = tuple[tuple[str, int], ...]
"""Sites, and places in their data at which gradients are no numbers: what they send is refused."""
MOST_BAD = 2
"""Sites with one; after three refusals in a row a run ends."""
BAD_KINDS = 3
"""Of a scenario's seeds with them, each by other sites and steps, with an undisturbed run each."""
BAD_BATCHES = "bad_batches"
"""To leave them out."""


@dataclass
class Report:
    seed: int
    scenario: str
    violations: list[str] = field(default_factory=list)
    faults: Counter[str] = field(default_factory=Counter)
    virtual_s: float = 0.0
    trace: list[str] = field(default_factory=list)
    num_faults: int = 0
    """That the seed causes at least."""
    without: Collection[str] = ()
    """Kinds of faults that are left out."""
    sha: dict[Versions, str] = field(default_factory=dict)
    """Of the global weights, by versions."""
    num_updates: int = 0
    num_compared: int = 0
    """Of them, with the undisturbed run's."""


ENDS = Killed | SessionLost | LinkLost | RunStopped | OSError | SiteDrained | SiteEjected
"""What may end a site's process."""


class _Coordinator:
    """A process of it; there is no hub before it has read its checkpoint."""

    def __init__(self) -> None:
        self.process = Process("coordinator")
        self.hub: Servicer | None = None
        self.run: CoordinatedRun
        self.recorder: Recorder | None = None


class World:
    def __init__(
        self,
        report: Report,
        undisturbed: Mapping[Versions, str],
        folder: Path,
        bad_batches: BadBatches,
    ) -> None:
        self.report = report
        seed, scenario = report.seed, report.scenario
        self.kernel = Kernel(seed, CALM_S)
        self.random = random.Random(f"{seed} {scenario}")
        self._tears = random.Random(f"{seed} {scenario} journal")
        self.config = configure(scenario)
        is_slow = not random.Random(f"{seed} steps").randrange(3)
        self.step_s = STEP_S * (SLOWER if is_slow else 1)
        self.folder = folder
        self.names = site_names(self.config)
        straggler = random.Random(f"{seed} {scenario} straggler")
        self.straggler = straggler.choice([*self.names, "", "", ""])
        """The site that takes longer; empty for none."""
        is_masked = self.config.codec.up in MASKED
        self._identities = _identities(*self.names) if is_masked else {}
        self.disk = Disk(self)
        self.coordinator = _Coordinator()
        self.run_id = "run"
        """Another one where a coordinator finds no checkpoint, and the run begins anew."""
        self.paths = {name: NetworkPath(self) for name in self.names}
        self.sites = {name: _dead(name) for name in self.names}
        self._seconds: list[Process] = []
        """Of sites whose first one lives."""
        self.bad_batches = bad_batches
        self.num_first = len(self.names)
        """Sites that the run begins with."""
        clocks = random.Random(f"{seed} {scenario} clocks")
        for name in ("coordinator", *self.names) if report.num_faults else ():
            self.kernel.clocks[name] = (clocks.uniform(-DAY_S, DAY_S), 0.0, 0.0)
        self.is_complete = False
        self.num_expected = len(undisturbed) or 1
        self.joined: dict[str, str] = {}
        """By site, the start of the coordinator that it joined last."""
        self._ended: dict[str, str] = {}
        self._decided: dict[str, str] = {}
        """What the operator decided last, by site: an event's name."""
        self.invariants = Invariants(self, undisturbed)

    # What is noted -------------------------------------------------------------------------

    def count(self, fault: str) -> None:
        self.report.faults[fault] += 1
        self.note(f"FAULT {fault}")

    def note(self, text: str) -> None:
        text = text.replace(str(self.folder), "RUN")  # else no two traces of a seed are alike
        self.report.trace.append(f"{self.kernel.now:10.3f} {text}")

    def violated(self, text: str) -> None:
        self.report.violations.append(text)
        self.note(f"VIOLATION {text}")

    # Processes -----------------------------------------------------------------------------

    def run(self) -> Report:
        with installed(self.kernel), self._patched():
            keep = partial(self.kernel.spawn, Process("supervisor"))
            keep(self._keep_coordinator)
            late = random.Random(f"{self.report.seed} late")
            latest = late.choice([*self.names, *[""] * 2 * len(self.names)])
            for name in self.names:
                body = partial(self._keep_site, name)
                is_late = name == latest and self.report.num_faults
                keep(body, f"supervisor of {name}", LATE_S * late.random() if is_late else 0.0)
            if self.report.num_faults:
                keep(partial(cause_faults, self, self.report), "faults")
            try:
                self.kernel.run()
            except Standstill as error:
                self.violated(str(error))
        for error in self.kernel.failures:
            self.violated(f"{type(error).__name__}: {error}")
        self.invariants.check_variates()
        mine = self._ended.get("coordinator", "nothing")
        for name, ended in self._ended.items():
            if ended != mine:
                self.violated(f"{name} ended with {ended[:12]}, not {mine[:12]}")
        self.report.virtual_s = self.kernel.now
        return self.report

    @contextmanager
    def _patched(self) -> Iterator[None]:
        """The disk below, virtual clocks in default arguments, and what would only take time."""
        with ExitStack() as stack:
            for place, name, value in (
                (files, "os", self.disk),
                (files, "_free_bytes", lambda folder: 0),  # the machine's own is told otherwise
                (meter.Meter.__init__, "__defaults__", (TIME.monotonic,)),
                (Tidier, "tidy", lambda self: False),
                (app, "app_folders", _app_folders),
                (stub, "LISTEN_S", 2.0),
                (site, "HEARTBEAT_S", HEARTBEAT_S),
                (federation, "TICK_S", 2.0),
            ):
                stack.enter_context(mock.patch.object(place, name, value))
            logging.disable(logging.CRITICAL)
            stack.callback(logging.disable, logging.NOTSET)
            yield

    def _live(self, process: Process, main: Callable[[], str]) -> str | BaseException:
        """Run a process to its end; what it returned, the error that ended it, or `Killed`."""
        outcome: str | BaseException = Killed()

        def body() -> None:
            nonlocal outcome
            try:
                outcome = main()
            except BaseException as error:
                outcome = Killed() if process.is_dead else error

        self.kernel.join(self.kernel.spawn(process, body))
        self.kernel.kill(process)
        self.kernel.park(0.0)
        if not isinstance(outcome, str):
            self.invariants.has_died = True
            if process in self._seconds:
                self._seconds.remove(process)
            alive = (self.sites.get(process.name, process), *self._seconds)
            if all(other.is_dead for other in alive if other.name == process.name):
                self.disk.on_death(process.name)
        self.note(f"{process.name} ended: {outcome!r}")
        return outcome

    def _keep_coordinator(self) -> None:
        while True:
            self.coordinator = present = _Coordinator()
            outcome = self._live(present.process, partial(self._coordinate, present))
            if present.recorder is not None:  # its calls have ended, too
                present.recorder.close()
            if isinstance(outcome, str):
                self.is_complete = True
                self._ended["coordinator"] = outcome
                return
            if not self._may_end(outcome):
                self.violated(f"coordinator: {type(outcome).__name__}: {outcome}")
                self.is_complete = True
                return
            self.kernel.park(1.0 + 10.0 * self.random.random())

    def _may_end(self, outcome: BaseException) -> bool:
        """Whether a coordinator may end like this; an operator starts it again."""
        is_refused = isinstance(outcome, UserError) and "in a row were refused" in str(outcome)
        # Under `sync` who dies after a refusal meets the same batch again.
        if is_refused and self.bad_batches and self.config.strategy == "sync":
            return self.invariants.has_died
        return isinstance(outcome, Killed | RunStopped | OSError)

    def _coordinate(self, present: _Coordinator) -> str:
        def record(row: dict[str, Any]) -> None:
            if "text" in row:
                self.note(f"{row['event']}: {row['text']}")
            recorder.write(row)
            if row.get("event") in DECIDED.values():
                self._decided[row["site"]] = row["event"]
                self.invariants.has_decided = True

        folder = self.folder / "coordinator"
        tear_journal(folder, self._tears)  # before the run reads from it what was decided
        checkpoint = folder / "checkpoint" / CHECKPOINT
        is_new = not checkpoint.exists()
        if is_new and self.kernel.now:
            self.run_id = f"run of {self.kernel.now:g} s"
        run = CoordinatedRun(
            self.config, self.run_id, folder, record, lambda *_: None, silence_s=SILENCE_S
        )
        if run.hub.masking:
            run.hub.masking.identity = self._identities["coordinator"]
        (version, held), complaint = ((0, []), "") if is_new else run.resume()
        if is_new:
            self._decided.clear()  # nothing is left of the run
        for name, entry in run.hub.registry.sites.items():
            decided = self._decided.get(name, "in").replace("admitted", "in")
            if entry.standing != decided:
                self.violated(f"{name} was {decided}, and is {entry.standing}")
        dump(self.config, folder / "config.yaml")
        present.recorder = recorder = Recorder(folder, None if is_new else (version, held))
        recorder.write(run.opening())
        self.note(complaint or f"coordinator begins at version {version}")
        self.invariants.begin(run, version, held)
        self.disk.go_on(held)
        present.hub, present.run = run.hub, run
        model = run.train()
        try:
            found = verify(folder)
        except FedwanError as error:
            self.violated(f"journal: {error}")
        else:
            if found["versions"] != model.versions or found["checkpoint"] != model.versions:
                self.violated(f"journal: {found} of a run at {model.versions}")
        return hash_state(model.state)

    def _train(self, name: str, folder: str, process: Process) -> str | BaseException:
        """A process of a site, from its beginning to its end; see `_live`."""

        def pause(site: Site) -> None:
            self.invariants.on_step(site)
            slower = STRAGGLES if name == self.straggler else 1
            self.kernel.park(slower * self.step_s * (0.5 + self.random.random()))

        member = Membership(
            self.config,
            self.run_id,
            name,
            self.folder / folder / self.run_id,
            partial(SeededLink, self, name, process),
            identity=self._identities.get(name),
        )
        bad_places = [place for of, place in self.bad_batches if of == name]
        main = partial(script.train, member, self.names.index(name), pause, bad_places)
        outcome = self._live(process, main)
        hub = self.coordinator.hub
        if isinstance(outcome, str):
            self._ended[name] = outcome
        elif (
            type(outcome) is RunStopped
            and hub is not None
            and hub.is_complete
            and hub.registry.sites[name].standing != "ejected"  # who may hear of the end first
        ):
            self.violated(f"{name}: {outcome}, though the run is complete")
        elif not isinstance(outcome, ENDS) and member.run_id == self.run_id:
            self.violated(f"{name}: {type(outcome).__name__}: {outcome}")
        return outcome

    def join_twice(self, name: str, folder: str) -> None:
        """Start a second process of a site in a folder; nobody starts it again.

        In a folder that another one has, it does not live longer than an orphan does.
        """
        self.invariants.has_died = True  # one of the two will
        self._seconds.append(process := Process(name))
        train = partial(self._train, name, folder, process)
        self.kernel.spawn(Process("supervisor"), train, f"second of {name}")
        if folder == name:
            end = partial(self._end_orphan, process)
            self.kernel.spawn(Process("supervisor"), end, f"end of the second of {name}")

    def _end_orphan(self, process: Process) -> None:
        self.kernel.park(ORPHAN_GRACE_S)
        self.kernel.kill(process)

    def add_site(self) -> None:
        """The operator stops the run, and has it go on with one site more."""
        self.config = configure(self.report.scenario, more_sites=1)
        self.names = site_names(self.config)
        self.invariants.forget()
        name = self.names[-1]
        self.paths[name], self.sites[name] = NetworkPath(self), _dead(name)
        for process in (self.coordinator.process, *self.sites.values(), *self._seconds):
            self.kernel.kill(process)
        keep = partial(self._keep_site, name)
        self.kernel.spawn(Process("supervisor"), keep, f"supervisor of {name}")

    def _keep_site(self, name: str) -> None:
        while not self.is_complete:
            self.sites[name] = process = Process(name)
            self._ended.pop(name, None)  # the coordinator may have lost what it ended with
            outcome = self._train(name, name, process)
            if isinstance(outcome, str):
                while not self.is_complete and not self._has_ticket(name):
                    self.kernel.park(5.0)
            elif isinstance(outcome, SiteDrained | SiteEjected):
                while not self.is_complete and self._decided.get(name, "admitted") != "admitted":
                    self.kernel.park(5.0)  # its service is not started before
            elif isinstance(outcome, ENDS):
                self.kernel.park(1.0 + 5.0 * self.random.random() * self.paths[name].slow)
            elif self.report.violations:
                return
            else:
                self.kernel.park(1.0)  # a ticket of the run that has begun anew takes its place

    def _has_ticket(self, name: str) -> bool:
        """Whether a coordinator has started that its last process had not joined."""
        hub = self.coordinator.hub
        return hub is not None and hub.start_id != self.joined[name]


def _dead(name: str) -> Process:
    """Until the first one of a site begins."""
    process = Process(name)
    process.is_dead = True
    return process


_app_folders = cache(app.app_folders)


@cache
def _identities(*names: str) -> Mapping[str, Identity]:
    """By party; read once, since nobody's certificate ends while a run lasts."""
    with tempfile.TemporaryDirectory() as folder:
        make_identities(Path(folder), (), names)
        found = {name: Identity.load(Path(folder) / name) for name in names}
        return found | {"coordinator": Identity.load(Path(folder) / "coordinator", "coordinator")}


def bad_batches_of(kind: int, scenario: str) -> BadBatches:
    """Of few kinds; none from `BAD_KINDS` on."""
    drawn, config = random.Random(f"{kind} {scenario} bad batches"), configure(scenario)
    names = site_names(config)
    num = drawn.randint(1, min(MOST_BAD, len(names))) if kind < BAD_KINDS else 0
    return tuple((name, drawn.randrange(config.steps)) for name in drawn.sample(names, num))


@cache
def _undisturbed(scenario: str, bad_batches: BadBatches) -> Report:
    return _simulate(Report(0, scenario), {}, bad_batches)


def _simulate(
    report: Report, undisturbed: Mapping[Versions, str], bad_batches: BadBatches
) -> Report:
    memory = MEMORY if MEMORY.exists() else None
    with tempfile.TemporaryDirectory(prefix="seeded-", dir=memory) as folder:
        return World(report, undisturbed, Path(folder), bad_batches).run()


def prepare(scenario: str) -> None:
    """Have the runs that nothing disturbs, which seeds are compared with."""
    for kind in range(BAD_KINDS + 1):
        _undisturbed(scenario, bad_batches_of(kind, scenario))


def simulate_seed(
    seed: int, scenario: str = "", faults: int = FAULTS, without: Collection[str] = ()
) -> Report:
    """One run with the faults of one seed, less some kinds; seeds take turns over scenarios."""
    scenario = scenario or TURNS[seed % len(TURNS)]
    scenario = draw(seed) if scenario == DRAWN else scenario
    report = Report(seed, scenario, num_faults=faults, without=without)
    kind = random.Random(f"{seed} bad batches").randrange(4 * BAD_KINDS)  # a quarter has some
    bad_batches = () if BAD_BATCHES in without else bad_batches_of(kind, scenario)
    undisturbed = _undisturbed(scenario, bad_batches)
    report.violations += undisturbed.violations
    return _simulate(report, undisturbed.sha, bad_batches)
