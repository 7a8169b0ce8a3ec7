"""A site's life: it dies, comes back, is told to stop, is asked about quality."""

from __future__ import annotations

import math
import time
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import pytest
import torch
from tests.runs import (
    INNER,
    Crash,
    CrashingWorkload,
    GatedWorkload,
    H,
    SameStart,
    TinyRun,
    delta_strategy,
    gradient_strategy,
    tiny_workload,
)
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.errors import FedwanError, JoinRefused, RunStopped, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.loopback import LoopbackLink
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, Work
from fedwan.state import hash_state
from fedwan.workloads.base import Batch, Reduce
from tests.planes import eventually
from tests.support import TinyWorkload, WrappedLink


def undisturbed(
    folder: Path, strategy: Any, workload: Any = tiny_workload, inner: Any = None
) -> str:
    run = TinyRun(folder, strategy, inner=inner)
    result = run.start()
    sites = [run.site(name, workload()) for name in run.sites]
    model = result(30.0)
    sha256 = hash_state(model.state)
    assert [site(10.0) for site in sites] == [sha256, sha256]
    return sha256


@pytest.mark.parametrize("after_steps", [0, 1, H, H + 1, 4 * H + 2])
def test_a_site_that_dies_and_comes_back_changes_no_bit(tmp_path: Path, after_steps: int) -> None:
    expected = undisturbed(tmp_path / "a", delta_strategy(2))
    run = TinyRun(tmp_path / "b", delta_strategy(2))
    result = run.start()
    first = run.site("s1")
    with pytest.raises(Crash):
        run.site("s2", CrashingWorkload(after_steps))(20.0)
    second = run.site("s2")
    assert hash_state(result(30.0).state) == expected
    assert first(10.0) == second(10.0) == expected
    assert run.rounds.totals.rejoins == 1


@pytest.mark.parametrize("after_steps", [H, 4 * H + 2])
@pytest.mark.parametrize("state", ["reset", "average"])
def test_a_site_that_dies_changes_no_bit_whatever_becomes_of_its_moments(
    tmp_path: Path, state: str, after_steps: int
) -> None:
    inner = {"net": replace(INNER["net"], state=state)}
    expected = undisturbed(tmp_path / "a", delta_strategy(2), inner=inner)
    assert expected != undisturbed(tmp_path / "kept", delta_strategy(2))
    run = TinyRun(tmp_path / "b", delta_strategy(2), inner=inner)
    result = run.start()
    first = run.site("s1")
    with pytest.raises(Crash):
        run.site("s2", CrashingWorkload(after_steps))(20.0)
    second = run.site("s2")
    assert hash_state(result(30.0).state) == expected
    assert first(10.0) == second(10.0) == expected


@pytest.mark.parametrize("after_steps", [0, H, H + 1, 4 * H + 2])
def test_control_variates_survive_a_crash_to_the_bit(tmp_path: Path, after_steps: int) -> None:
    strategy = delta_strategy(2)._replace(corrects=True)
    expected = undisturbed(tmp_path / "a", strategy)
    assert expected != undisturbed(tmp_path / "none", delta_strategy(2))
    run = TinyRun(tmp_path / "b", strategy)
    result = run.start()
    first = run.site("s1")
    with pytest.raises(Crash):
        run.site("s2", CrashingWorkload(after_steps))(20.0)
    second = run.site("s2")
    assert hash_state(result(30.0).state) == expected
    assert first(10.0) == second(10.0) == expected


def test_in_synchronous_training_a_site_that_dies_and_comes_back_changes_no_bit(
    tmp_path: Path,
) -> None:
    """Where checkpoints are of every version, so that the data stream stands where it stood."""
    expected = undisturbed(tmp_path / "a", gradient_strategy(2))
    run = TinyRun(tmp_path / "b", gradient_strategy(2))
    result = run.start()
    first = run.site("s1")
    with pytest.raises(Crash):
        run.site("s2", CrashingWorkload(3))(20.0)
    second = run.site("s2")
    assert hash_state(result(30.0).state) == expected
    assert first(10.0) == second(10.0) == expected


def test_sites_and_coordinator_that_all_die_go_on_to_the_same_bits(tmp_path: Path) -> None:
    expected = undisturbed(tmp_path / "a", delta_strategy(2))
    run = TinyRun(tmp_path / "b", delta_strategy(2), checkpoint_every=2)
    run.start()
    crashed = [run.site(name, CrashingWorkload(3 * H + 1)) for name in run.sites]
    for site in crashed:
        with pytest.raises(Crash):
            site(20.0)
    run.await_version(3)
    again = TinyRun(tmp_path / "b", delta_strategy(2), checkpoint_every=2)
    again.resume()
    result = again.start()
    sites = [again.site(name) for name in again.sites]
    assert hash_state(result(30.0).state) == expected
    assert [site(10.0) for site in sites] == [expected, expected]
    run.desk.finish("the first coordinator is dead")


class Spectral(nn.Module):
    """Batch norm, dropout and spectral norm: everything that evaluation could disturb."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.utils.parametrizations.spectral_norm(nn.Linear(2, 6))
        self.norm = nn.BatchNorm1d(6)
        self.drop = nn.Dropout(0.3)
        self.again = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.again(self.drop(self.norm(self.first(x)).tanh()))
        return out


class SpectralWorkload(TinyWorkload):
    """Draws from every generator there is, and draws more when it is evaluated."""

    def __init__(self, after_steps: int = -1) -> None:
        super().__init__(INNER)
        with torch.random.fork_rng():
            torch.manual_seed(1)
            self.networks = {"net": Spectral()}
        self.optimizers = {"net": torch.optim.Adam(self.networks["net"].parameters(), lr=1e-2)}
        self.left = after_steps
        self.modes: list[bool] = []

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        if self.left == 0:
            raise Crash
        self.left -= 1
        self.modes += [m.training for m in self.networks["net"].modules()]
        noise = 0.01 * torch.randn(batch.x.shape, generator=rng["noise"])
        return self.step_on(batch.x + noise, reduce)

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        torch.rand(100)
        self.networks["net"].train()  # a careless workload
        return super().evaluate(real, seed)


def train_one_site(folder: Path, eval_every: int) -> tuple[str, SpectralWorkload, TinyRun]:
    # One site: threads of several would share torch's global generator.
    run = TinyRun(folder, delta_strategy(1), sites=("s1",), eval_every=eval_every)
    workload = SpectralWorkload()
    result = run.start()
    site = run.site("s1", workload)
    sha256 = hash_state(result(30.0).state)
    assert site(10.0) == sha256
    return sha256, workload, run


def test_evaluation_leaves_training_as_it_was_bit_for_bit(tmp_path: Path) -> None:
    rare, workload, _ = train_one_site(tmp_path / "a", 0)
    often, _, run = train_one_site(tmp_path / "b", 1)
    assert often == rare
    assert all(workload.modes)
    qualities = [row["version"] for row in run.rows if row["kind"] == "quality"]
    assert qualities[0] == 0 and qualities[-1] == run.num_versions and len(qualities) > 2
    assert run.samples == qualities


def test_spectral_norm_s_vectors_survive_a_crash_too(tmp_path: Path) -> None:
    expected, _, _ = train_one_site(tmp_path / "a", 0)
    run = TinyRun(tmp_path / "b", delta_strategy(1), sites=("s1",))
    result = run.start()
    with pytest.raises(Crash):
        run.site("s1", SpectralWorkload(2 * H + 1))(20.0)
    site = run.site("s1", SpectralWorkload())
    assert hash_state(result(30.0).state) == site(10.0) == expected


def test_time_spent_on_quality_is_neither_computing_nor_waiting(tmp_path: Path) -> None:
    class Slow(TinyWorkload):
        def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
            time.sleep(0.3)
            return super().evaluate(real, seed)

    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",), eval_every=1, num_versions=4)
    result = run.start()
    run.site("s1", Slow(INNER, norm=True))(20.0)
    result(10.0)
    assert run.rounds.totals.compute_s + run.rounds.totals.wait_s < 0.3 * len(run.samples)


class BrokenWorkload(SameStart):
    """Every step ends in NaN."""

    def step(self, *args: Any) -> Any:
        losses = super().step(*args)
        with torch.no_grad():
            next(self.networks["net"].parameters()).fill_(math.nan)
        return losses


def test_three_refusals_in_a_row_end_the_site_with_the_reason(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",))
    run.start()
    with pytest.raises(FedwanError, match="3 contributions in a row were refused: tensor .* not f"):
        run.site("s1", BrokenWorkload())(20.0)
    assert run.desk.rejected == 3 and len(run.events("rejected")) == 3
    model = run.rounds.model
    assert model is not None and min(model.versions) == 0
    assert all(bool(v.isfinite().all()) for v in model.state.values())
    run.desk.finish("test over")


def test_a_version_whose_contribution_was_refused_is_saved_anew(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",))
    link = LoopbackLink(run.desk, "s1")
    loop = run.loop("s1", tiny_workload(), link)
    ledger = Ledger({}, {}, Work(H, H), (0,))
    path = tmp_path / "s1" / "site-00000001.safetensors"
    loop.save(1, 0, ledger)
    loop.discard(1)
    assert not path.exists()
    loop.save(1, 0, ledger)
    assert path.exists()
    link.close()


def test_stop_before_the_end_is_run_stopped_with_the_coordinator_s_reason(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2))
    result = run.start()
    site = run.site("s1")
    eventually(lambda: run.rounds.model is not None)
    run.desk.finish("the operator stopped it")
    with pytest.raises(RunStopped, match="the operator stopped it"):
        site(10.0)
    with pytest.raises(RunStopped, match="the operator stopped it"):
        result(10.0)
    assert run.events("leave") == ["s1 left: the operator stopped it"]
    assert (tmp_path / "checkpoint" / "coordinator.safetensors").exists()


def test_a_session_that_is_replaced_ends_as_session_lost(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2))
    run.start()
    workload = GatedWorkload()
    workload.allow(H)
    old = run.site("s1", workload)
    # Two in one process must not write the same checkpoint at once: the old one waits by then.
    eventually(lambda: bool(run.desk.intake._ready) and len(workload.batches) == H)
    time.sleep(0.1)
    new = run.site("s1")
    with pytest.raises(SessionLost, match="another process of s1|this session of s1 was replaced"):
        old(10.0)
    run.desk.finish("test over")
    with pytest.raises(RunStopped):
        new(10.0)


def test_a_site_whose_weights_differ_is_refused_before_its_first_step(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2))
    run.start()
    first = run.site("s1")
    eventually(lambda: run.rounds.model is not None)
    workload = TinyWorkload(INNER, norm=True, seed=1)
    with pytest.raises(JoinRefused, match="initial weights hash to"):
        run.site("s2", workload)(10.0)
    assert workload.batches == []
    run.desk.finish("test over")
    with pytest.raises(RunStopped):
        first(10.0)


def test_a_site_that_was_left_behind_adopts_the_global_weights_and_goes_on(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2, quorum=1, patience_s=0.4), num_versions=5)
    result = run.start()
    quick, slow = GatedWorkload(), GatedWorkload()
    sites = [run.site("s1", quick), run.site("s2", slow)]
    slow.allow(H - 1)
    quick.allow(2 * H)
    run.await_version(2)  # without s2, whose contribution to version 0 is stale now
    slow.allow(1)
    eventually(lambda: len(slow.batches) == H)
    slow.allow(3 * H)
    quick.allow(3 * H)
    sha256 = hash_state(result(30.0).state)
    assert [site(10.0) for site in sites] == [sha256, sha256]
    merged = [row["version"] for row in run.rows if row["kind"] == "round" and row["site"] == "s2"]
    assert merged and min(merged) > 2
    assert len(slow.batches) < 5 * H  # it skipped what the others had done without it


def test_a_straggler_s_contribution_that_comes_too_late_is_stale_not_merged(
    tmp_path: Path,
) -> None:
    class Recording(WrappedLink):
        receipts: SimpleQueue[int] = SimpleQueue()

        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            receipt = self._inner.upload(header, payload)
            if header.kind == wire.UploadHeader.CONTRIBUTION:
                self.receipts.put(receipt.status)
            return receipt

    run = TinyRun(tmp_path, delta_strategy(2, quorum=1, patience_s=0.3), num_versions=3)
    result = run.start()
    slow = GatedWorkload()
    first = run.site("s1")
    second = run.site("s2", slow, Recording)
    run.await_version(2)
    slow.allow(3 * H)
    sha256 = hash_state(result(30.0).state)
    assert first(10.0) == sha256
    assert Recording.receipts.get(timeout=10) == wire.Receipt.STALE
    try:
        assert second(10.0) == sha256
    except RunStopped as error:  # the run was over before it could catch up
        assert "complete" in str(error)


def test_gradients_that_come_in_parts_are_a_clear_error(tmp_path: Path) -> None:
    class InParts(TinyWorkload):
        def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
            reduce(["first"])
            return {}

    run = TinyRun(tmp_path, gradient_strategy(1), sites=("s1",))
    run.start()
    inner = InnerConfig(name="adam", lr=1e-2)
    with pytest.raises(FedwanError, match=r"reduces \['first'\] on their own"):
        run.site("s1", InParts({"net": inner}, norm=True))(10.0)
    run.desk.finish("test over")
