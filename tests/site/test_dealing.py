"""Processes of a site share moments and gradients out; each is started for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from fedwan.site.dealing import deal
from fedwan.site.follower import shared
from fedwan.site.recalibrate import recalibrate
from fedwan.site.sharing import SharedWorkload, alone
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fedwan.app import load_run, load_workload
from fedwan.errors import ConfigError, FedwanError
from fedwan.rng import NamedGenerators
from fedwan.site import dealing, follower
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state, read_tensors
from fedwan.workloads.base import Batch, keep_local
from fedwan.workloads.optim import step_optimizers
from tests.sites.test_distill import teach
from tests.teams import CLIPPED, CPU, FLOW, GAN, PIX2PIX, asked, run, site

PIECES = ("gradients",)
MUON = ("name=muon", "state=average")


# Who owns what -----------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 10**6), max_size=40), st.integers(1, 9))
def test_no_process_owns_more_than_its_share_and_one_tensor(sizes: list[int], num: int) -> None:
    named = {str(index): size for index, size in enumerate(sizes)}
    owners = deal(named, num)
    assert owners.keys() == named.keys() and set(owners.values()) <= set(range(num))
    loads = [sum(named[n] for n, rank in owners.items() if rank == r) for r in range(num)]
    assert max(loads) <= sum(sizes) / num + max(sizes, default=0)
    assert owners == deal(named, num)


@pytest.mark.parametrize("partition", PIECES)
def test_sharing_out_without_others_is_refused(partition: str) -> None:
    with pytest.raises(ConfigError, match=f"site.partition = '{partition}' needs site.processes=2"):
        asked(partition, "site.processes=1")


def test_words_that_are_none_of_them_and_what_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match="site.partition = 'optimiser' is none of"):
        asked("optimiser")
    with pytest.raises(ConfigError, match="no effect with strategy 'parameter_server'"):
        load_run(
            None, ["strategy=parameter_server", "site.processes=2", "site.partition=gradients"]
        )
    for partition in ("weights", "tensor_parallel"):
        with pytest.raises(ConfigError, match="'muon' needs whole matrices"):
            asked(partition, *FLOW, "inner.velocity.name=muon")
    with pytest.raises(ConfigError, match="does not go with strategy 'sync'"):
        asked("none", *FLOW, "strategy=sync", "h=1", "inner.velocity.name=muon")
    with pytest.raises(ConfigError, match="no effect: generator of workload 'pix2pix' has no matr"):
        asked("none", *PIX2PIX, "inner.generator.name=muon")
    words = ["workload=lightning", "model.module=tests.lightning.modules:Net"]
    with pytest.raises(
        ConfigError, match="site.partition = 'gradients' has no effect with workload"
    ):
        load_run(None, [*words, "site.processes=2", "site.partition=gradients"])


# Steps -------------------------------------------------------------------------------------------


def test_gradients_in_pieces_lead_to_the_bits_of_one_process_that_averages_them() -> None:
    config = asked("gradients", *FLOW, "inner.velocity.clip_norm=0.5")
    one = load_workload("flow").build(config, CPU)
    batches = [Batch(torch.randn(8, 1, 8, 8), torch.arange(8)) for _ in range(3)]
    rng, again = NamedGenerators(0, "s1"), NamedGenerators(0, "s1")
    with shared(load_workload("flow").build(config, CPU), config, CPU) as leader:
        for batch in batches:
            leader.step(batch, rng, keep_local)
        assert isinstance(leader, SharedWorkload)
        moments = {name: leader.holding.take(name) for name in leader.holding.moments()}
        held = leader.networks["velocity"].state_dict()
    network = one.networks["velocity"]
    for batch in batches:
        draw = int(torch.randint(1 << 62, (), generator=again["team"]))
        parts = []
        for rank, generators in enumerate((again, NamedGenerators(draw, "process 1"))):
            network.zero_grad()
            one._backward(Batch(*(t.chunk(2)[rank] for t in batch)), generators)
            parts.append([p.grad for p in network.parameters()])
        for param, mine, other in zip(network.parameters(), *parts, strict=True):
            param.grad = (mine + other) / 2
        step_optimizers(config.inner, one.networks, one.optimizers)
    assert hash_state(network.state_dict()) == hash_state(held)
    assert hash_state(moments) == hash_state(Replica(one).optimizer_state())


CASES = {
    "flow": (*FLOW, "inner.velocity.name=sgd", "inner.velocity.beta1=0.9"),
    "muon": (*FLOW, "inner.velocity.name=muon", "site.precision=bf16-true"),
    "gan": (*GAN, "model.n_critic=2", *CLIPPED),
    "pix2pix": (*PIX2PIX, "data.batch=4", "site.recompute=true", *CLIPPED),
    "bf16": (*FLOW, "site.precision=bf16-mixed"),
    "accumulate": (*GAN, "site.accumulate=2", *CLIPPED),
    "weights in bf16": (*FLOW, "site.precision=bf16-true", "inner.velocity.clip_norm=0.5"),
    "16-mixed": (*FLOW, "site.precision=16-mixed", "inner.velocity.clip_norm=0.5"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_what_is_shared_out_leads_where_whole_optimisers_do(case: str) -> None:
    ends: dict[str, tuple[str, str]] = {}
    weights: dict[str, State] = {}
    for partition in ("none", *PIECES):
        with site(asked(partition, *CASES[case])) as taken:
            for scale in taken.leader.kept.values():
                scale.clamp_(max=2**8)  # nothing overflows
            taken.step(3)
            ends[partition] = taken.sha256()
            weights[partition] = {n: v.clone() for n, v in taken.replica.live.items()}
    assert ends["gradients"] == ends["none"]
    if case != "accumulate":
        assert ends["gradients"] == ends["none"]
    else:  # averaged part by part, not after their sum: another order of the same terms
        torch.testing.assert_close(weights["gradients"], weights["none"], rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_a_student_and_its_target_follow_what_is_shared_out(tmp_path: Path) -> None:
    teacher = teach(tmp_path, network="mlp", width=16, depth=2, euler_steps=6)
    words = ("workload=distill", f"model.teacher={teacher}", "data.batch=8")
    ends = {}
    for partition in ("none", *PIECES):
        with site(asked(partition, *words)) as taken:
            taken.step(3)
            ends[partition] = (*taken.sha256(), hash_state(taken.replica.local))
    assert ends["gradients"] == ends["none"]


@pytest.mark.slow
def test_a_step_that_overflows_at_one_process_is_repeated_by_all() -> None:
    with site(asked("gradients", *FLOW, "site.precision=16-mixed")) as taken:
        taken.leader.kept["scale"].fill_(2.0**40)  # far too large for fp16
        taken.step(2)
        assert 2.0**-10 <= float(taken.leader.kept["scale"]) < 2.0**20
        assert all(bool(value.isfinite().all()) for value in taken.replica.live.values())


@pytest.mark.slow
def test_bytes_of_moments_and_gradients_halve() -> None:
    held = {}
    for partition in PIECES:
        with site(asked(partition, *FLOW)) as taken:
            taken.step(2)
            held[partition] = taken.num_bytes()
            (whole,) = {row.weights for row in held[partition]}
    for row in held["gradients"]:
        assert row.gradients == whole and row.moments == pytest.approx(whole, rel=0.05)
    for row in held["gradients"]:
        assert row.gradients == pytest.approx(whole / 2, rel=0.05)
        assert row.moments == pytest.approx(whole, rel=0.05)
    assert sum(row.gradients for row in held["gradients"]) == whole


@pytest.mark.slow
def test_gradients_are_dropped_while_a_backward_pass_makes_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    peaks: list[int] = []
    note = dealing.GradientPieces._note

    def measured(self: dealing.GradientPieces, name: str, param: Tensor) -> None:
        made = [p.grad.numel() for p in self._params.values() if p.grad is not None]
        peaks.append(sum(made) + sum(kept.numel() for kept in self._kept.values()))
        note(self, name, param)

    monkeypatch.setattr(dealing.GradientPieces, "_note", measured)
    with site(asked("gradients", *FLOW, "model.depth=16", "model.width=64")) as taken:
        taken.step(1)
        num_values = sum(p.numel() for p in taken.leader.networks["velocity"].parameters())
    assert 0.5 * num_values < max(peaks) < 0.7 * num_values  # its half, and a bucket


# What the engine does with them ------------------------------------------------------------------


RUNS = {
    "diloco, moments averaged": ("strategy=diloco", "inner.generator.state=average"),
    "diloco, moments reset": ("strategy=diloco", "inner.generator.state=reset"),
    "muon's moments averaged": (
        "strategy=diloco",
        *(f"inner.{n}.{w}" for n in ("generator", "discriminator") for w in MUON),
    ),
    "streaming": ("strategy=streaming_diloco", "stream.tau=2", "checkpoint.every=1"),
    "sync": ("strategy=sync", "h=1"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_a_run_ends_on_the_same_bits_however_a_site_shares_out(tmp_path: Path, case: str) -> None:
    ends = {}
    for partition in ("none", *PIECES):
        ends[partition] = run(tmp_path / partition, asked(partition, *GAN, *CLIPPED, *RUNS[case]))
    for ran in ends.values():
        assert ran.sites == {ends["none"].sha256} == {ran.sha256}


@pytest.mark.slow
@pytest.mark.parametrize("partition", PIECES)
def test_a_checkpoint_is_that_of_one_process_and_successors_go_on_from_it(
    tmp_path: Path, partition: str
) -> None:
    words = (*GAN, "site.precision=16-mixed")
    work = Ledger({}, {}, Work(2, 16), (0,))
    ends = {}
    for kind in ("none", partition):
        with site(asked(kind, *words)) as taken:
            taken.leader.kept["scale"].fill_(2.0**8)
            keeper = SiteCheckpoints(tmp_path / kind, *taken[1:], is_beside=True)
            taken.step(2)
            keeper.save(1, 0, work)
            keeper.close()
            taken.step(2)
            ends[kind] = taken.sha256()
    files = [next((tmp_path / kind).glob("*.safetensors")) for kind in ("none", partition)]
    (one, _), (other, _) = (read_tensors(file) for file in files)
    assert hash_state(one) == hash_state(other) and ends[partition] == ends["none"]
    with site(asked(partition, *words)) as successor:
        successor.step(1)
        SiteCheckpoints(tmp_path / partition, *successor[1:]).load(1, with_model=True)
        successor.step(2)
        assert successor.sha256() == ends[partition]


@pytest.mark.slow
def test_statistics_are_taken_anew_by_the_leader_alone() -> None:
    with site(asked("gradients", *PIX2PIX, "data.batch=4")) as taken:
        taken.step(1)
        before = taken.moments()
        with alone(taken.leader) as part:
            recalibrate(part, [next(taken.stream)], NamedGenerators(1, "s1"))
        assert hash_state(taken.moments()) == hash_state(before)
        taken.step(1)  # and the others take part again


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_site_in_one_line_whatever_is_asked(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    start = follower._start
    monkeypatch.setattr(follower, "_start", lambda *a: started.append(start(*a)) or started[-1])
    with (
        pytest.raises(FedwanError, match="process 1 of this site ended with code -9"),
        site(asked("gradients", *FLOW)) as taken,
    ):
        taken.step(1)
        started[0].kill()
        started[0].wait()
        taken.moments()


@pytest.mark.slow
def test_the_doctor_is_told_of_networks_that_the_leader_has_whole() -> None:
    config = asked("gradients", *FLOW)
    for partition in ("none", "gradients", "weights"):
        with site(asked(partition, *FLOW)) as taken, torch.no_grad():
            pair = next(taken.stream), next(taken.stream)
            told = taken.leader.examine(*pair, 0)
        alone = load_workload("flow").build(config, CPU)
        expected = alone.examine(*pair, 0) if partition != "weights" else {}
        assert told == expected
