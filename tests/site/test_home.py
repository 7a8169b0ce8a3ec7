"""What stays at a site: tensors of its own, and frozen parameters."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from fedwan.simulate import Absence, SimulatedRun, SimulatedSite, simulate
from tests.runs import BATCH, INNER, Crash, CrashingWorkload, H, SameStart, TinyRun, delta_strategy
from torch import Tensor

from fedwan.codecs import fp32
from fedwan.codecs.payload import Source
from fedwan.config import InnerConfig
from fedwan.errors import JoinRefused, UserError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.rng import NamedGenerators
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state, state_of
from fedwan.workloads.base import Reduce, keep_local
from strategies import async_diloco, diloco, local_sgd, scaffnew, streaming_diloco, sync
from tests.support import TinyWorkload, WrappedLink, build_strategy, same_bits, tiny_shard

EXCLUDE = {"net": ["norm.*", "again.bias"]}
NAMES = {
    f"net/norm.{n}"
    for n in ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
} | {"net/again.bias"}
FROZEN = {"net/first.weight", "net/first.bias"}


def own(workload: TinyWorkload) -> State:
    state = state_of(workload.networks)
    return {name: state[name].clone() for name in sorted(NAMES)}


def shared(workload: TinyWorkload) -> State:
    return {n: v.clone() for n, v in state_of(workload.networks).items() if n not in NAMES}


class Partly(SameStart):
    """The first layer is a frozen backbone."""

    def __init__(self, shift: float = 0.0) -> None:
        super().__init__()
        first = self.networks["net"].first
        first.requires_grad_(False)  # type: ignore[operator, union-attr]
        first.weight.add_(shift)  # type: ignore[operator, union-attr]


class Ran:
    """A simulated run of two sites, and the workloads that they ended with."""

    def __init__(
        self,
        folder: Path,
        recipe: ModuleType = diloco,
        make: Callable[[], TinyWorkload] = SameStart,
        h: int = 2,
        **more: object,
    ) -> None:
        self.workloads = {"s1": make(), "s2": make()}

        def rebuild(name: str) -> TinyWorkload:
            self.workloads[name] = make()
            return self.workloads[name]

        sites = {
            name: SimulatedSite(workload, tiny_shard(i + 1), lambda name=name: rebuild(name))  # type: ignore[misc]
            for i, (name, workload) in enumerate(self.workloads.items())
        }
        strategy = build_strategy(recipe, INNER, sites=2, h=h)
        self.run: SimulatedRun = simulate(  # type: ignore[arg-type]
            sites, strategy, folder, num_steps=8 * h, batch=BATCH, **more
        )

    @property
    def own(self) -> tuple[State, State]:
        first, second = (own(workload) for workload in self.workloads.values())
        return first, second


# Excluded ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [diloco, local_sgd, scaffnew, streaming_diloco, async_diloco])
def test_sites_end_with_values_of_their_own_and_with_the_others_alike(
    tmp_path: Path, recipe: ModuleType
) -> None:
    ran = Ran(tmp_path, recipe, exclude=EXCLUDE)
    one, other = ran.workloads.values()
    assert same_bits(shared(one), shared(other)) and same_bits(shared(one), ran.run.model.state)
    assert set(ran.run.site_sha256.values()) == {hash_state(ran.run.model.state)}
    assert not NAMES & (ran.run.model.state.keys() | ran.run.model.ema.keys())
    start = own(SameStart())
    for name in NAMES - {"net/norm.num_batches_tracked"}:
        first, second = (values[name] for values in ran.own)
        assert not torch.equal(first, second), name
        assert not torch.equal(first, start[name]) and not torch.equal(second, start[name]), name


class Watching(WrappedLink):
    """Notes how many bytes each upload has."""

    def __init__(self, inner: object, seen: list[int]) -> None:
        super().__init__(inner)  # type: ignore[arg-type]
        self.seen = seen

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        self.seen.append(payload.num_bytes)
        return self._inner.upload(header, payload)


@pytest.mark.parametrize("make", [SameStart, Partly])
def test_payloads_have_no_byte_of_what_stays_home(
    tmp_path: Path, make: Callable[[], TinyWorkload]
) -> None:
    seen: list[int] = []
    exclude = EXCLUDE if make is SameStart else {}
    Ran(tmp_path, make=make, exclude=exclude, wrap=lambda _, link: Watching(link, seen))
    layout = Replica(SameStart()).layout
    stays = NAMES if make is SameStart else FROZEN
    travels = {name: spec for name, spec in layout.items() if name not in stays}
    assert set(seen) == {fp32().payload_bytes(travels)}


def stepped(exclude: dict[str, list[str]] | None, state: str = "keep") -> Replica:
    inner = {"net": InnerConfig(lr=1e-2, state=state)}
    workload = SameStart()
    replica = Replica(workload, inner, exclude)
    rng = NamedGenerators(0, "s1")
    stream = tiny_shard(1).loader(BATCH, rng["data"])
    for _ in range(3):
        workload.step(next(stream), rng, keep_local)
    return replica


def test_landings_and_starting_over_leave_what_is_the_site_s_own() -> None:
    replica = stepped(EXCLUDE)
    (fragment,) = whole(replica.layout)
    before = {name: replica.local[name].clone() for name in NAMES}
    assert not NAMES & (replica.layout.keys() | replica.live.keys() | replica.base.keys())
    zeros = {name: torch.zeros_like(value) for name, value in replica.base.items()}
    with replica.showing(zeros):
        assert same_bits({name: replica.local[name] for name in NAMES}, before)
        replica.workload.networks["net"].train()(torch.ones(4, 2))  # moves running statistics
        assert not same_bits({name: replica.local[name] for name in NAMES}, before)
    replica.land(fragment, 0.0)
    replica.adopt(zeros)
    replica.reset()
    assert same_bits({name: replica.local[name] for name in NAMES}, before)
    assert all(not value.any() for value in replica.live.values())


@pytest.mark.parametrize("state", ["average", "reset"])
def test_moments_of_what_is_the_site_s_own_are_its_own(state: str) -> None:
    replica = stepped(EXCLUDE, state)
    mine = {n for n in replica.optimizer_state() if n.partition("|")[2] in NAMES}
    assert mine and not any(n.partition("|")[0] in NAMES for n in replica.layout)
    before = {name: replica.optimizer_state()[name].clone() for name in mine}
    replica.adopt({name: torch.zeros_like(value) for name, value in replica.base.items()})
    after = replica.optimizer_state()
    assert same_bits({name: after[name] for name in mine}, before)


@pytest.mark.parametrize("recipe", [diloco, streaming_diloco])
def test_a_site_that_dies_returns_to_values_of_its_own(tmp_path: Path, recipe: ModuleType) -> None:
    start = own(SameStart())
    absences = {"s2": Absence(0.4, 0.6)}
    ran = Ran(tmp_path / "a", recipe, exclude=EXCLUDE, absences=absences, checkpoint_every=1)
    assert ran.run.totals.rejoins == 1
    whole_run = Ran(tmp_path / "b", recipe, exclude=EXCLUDE)
    count = "net/norm.num_batches_tracked"
    assert not same_bits(ran.own[0], ran.own[1])
    for mine, undisturbed in zip(ran.own, whole_run.own, strict=True):
        if recipe is diloco:  # which waits, and repeats what was lost
            assert same_bits(mine, undisturbed)
        # Not as a site that began anew on its return: its own statistics saw what went before.
        assert mine[count] - start[count] > 0.6 * 16


def test_sites_that_die_and_a_coordinator_that_resumes_change_no_bit(tmp_path: Path) -> None:
    def ended(run: TinyRun, workloads: dict[str, TinyWorkload]) -> dict[str, str]:
        result = run.start()
        sites = [run.site(name, workload) for name, workload in workloads.items()]
        model = result(30.0)
        assert {site(10.0) for site in sites} == {hash_state(model.state)}
        return {name: hash_state(own(workload)) for name, workload in workloads.items()} | {
            "model": hash_state(model.state)
        }

    undisturbed = TinyRun(tmp_path / "a", delta_strategy(2), exclude=EXCLUDE)
    expected = ended(undisturbed, {"s1": SameStart(), "s2": SameStart()})
    assert len(set(expected.values())) == 3

    first = TinyRun(tmp_path / "b", delta_strategy(2), exclude=EXCLUDE)
    first.start()
    sites = [first.site(name, CrashingWorkload(3 * H + 1)) for name in first.sites]
    for site in sites:
        with pytest.raises(Crash):
            site(20.0)
    first.await_version(3)
    again = TinyRun(tmp_path / "b", delta_strategy(2), exclude=EXCLUDE)
    again.resume()
    assert ended(again, {"s1": SameStart(), "s2": SameStart()}) == expected
    first.desk.finish("the first coordinator is dead")


def test_sites_that_exclude_something_else_are_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), exclude=EXCLUDE)
    result = run.start()
    site = run.site("s1")
    run.await_version(0)
    run.exclude = {"net": ["norm.*"]}
    with pytest.raises(JoinRefused, match="s2's model has other tensors than the run's"):
        run.site("s2")(10.0)
    run.exclude = EXCLUDE
    second = run.site("s2")
    assert hash_state(result(30.0).state) == site(10.0) == second(10.0)


# Frozen ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recipe", [diloco, streaming_diloco, sync])
def test_frozen_parameters_do_not_travel_and_all_sites_end_alike(
    tmp_path: Path, recipe: ModuleType
) -> None:
    ran = Ran(tmp_path, recipe, Partly, h=1 if recipe is sync else 2)
    assert not FROZEN & ran.run.model.state.keys()
    assert set(ran.run.site_sha256.values()) == {hash_state(ran.run.model.state)}
    start, *ends = (state_of(w.networks) for w in (Partly(), *ran.workloads.values()))
    for name, value in start.items():
        assert torch.equal(ends[0][name], ends[1][name])
        assert torch.equal(ends[0][name], value) is (name in FROZEN), name


def test_frozen_parameters_are_hashed_with_frozen_networks() -> None:
    replica, other = Replica(Partly()), Replica(Partly(0.5))
    assert replica.initial_sha256 == other.initial_sha256
    assert replica.frozen_sha256 != other.frozen_sha256
    state = state_of(Partly().networks)
    assert replica.frozen_sha256 == hash_state({name: state[name] for name in FROZEN})
    assert not FROZEN & replica.local.keys(), "nor are they kept in checkpoints"
    assert Replica(SameStart()).frozen_sha256 == hash_state({})


def test_a_site_whose_frozen_parameters_differ_is_refused(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2))
    result = run.start()
    site = run.site("s1", Partly())
    run.await_version(0)
    with pytest.raises(JoinRefused, match="s2's frozen networks hash to"):
        run.site("s2", Partly(0.5))(10.0)
    second = run.site("s2", Partly())
    assert hash_state(result(30.0).state) == site(10.0) == second(10.0)


class Unfreezing(Partly):
    """Thaws its backbone in the second round."""

    def step_on(self, x: Tensor, reduce: Reduce) -> dict[str, Tensor]:
        if len(self.batches) > H + 1:
            self.networks["net"].requires_grad_(True)
        return super().step_on(x, reduce)


def test_what_was_frozen_and_is_trained_later_ends_the_site_in_one_line(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",))
    run.start()
    with pytest.raises(UserError, match="'net/first.* was frozen when training began") as raised:
        run.site("s1", Unfreezing())(20.0)
    assert "\n" not in str(raised.value)
    run.desk.finish("test over")


class Toggling(SameStart):
    """Needs no gradient of its first layer for a while, as a GAN's networks take turns."""

    def step_on(self, x: Tensor, reduce: Reduce) -> dict[str, Tensor]:
        self.networks["net"].requires_grad_(False)
        self.networks["net"].first(x)  # type: ignore[operator, union-attr]
        self.networks["net"].requires_grad_(True)
        return super().step_on(x, reduce)


def test_what_needs_no_gradient_for_a_while_travels_all_the_same(tmp_path: Path) -> None:
    plain, toggling = Ran(tmp_path / "a"), Ran(tmp_path / "b", make=Toggling)
    assert same_bits(plain.run.model.state, toggling.run.model.state)
