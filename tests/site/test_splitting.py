"""Weights in pieces; each process is started for real."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedwan.app import load_run
from fedwan.errors import ConfigError, FedwanError
from fedwan.site import follower
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.state import State, hash_state, read_tensors
from tests.teams import CLIPPED, FLOW, GAN, PIX2PIX, asked, run, site

SMALL = (*PIX2PIX, "data.batch=4")
DIT = (*FLOW, "model.network=dit")


def asked_of(*words: str) -> None:
    load_run(None, ["site.processes=2", "site.partition=weights", *words])


def test_a_recipe_that_needs_whole_weights_is_refused() -> None:
    with pytest.raises(ConfigError, match="'weights' does not go with workload 'distill'"):
        asked_of("workload=distill", "model.teacher=/nowhere")


def test_settings_that_weights_in_pieces_do_not_bear_are_refused() -> None:
    with pytest.raises(ConfigError, match="model.spectral_norm = True needs site.partition=grad"):
        asked_of("workload=gan", "model.spectral_norm=true")


CASES = {
    "mlp": (*FLOW, "inner.velocity.name=sgd", "inner.velocity.beta1=0.9"),
    "dit, bf16": (*DIT, "site.precision=bf16-mixed"),
    "dit, weights in bf16": (*DIT, "site.precision=bf16-true"),
    "two networks": SMALL,
    "second derivatives": (*GAN, "model.n_critic=2", "model.gamma_fake=0.1"),
    "second derivatives, accumulate": (*GAN, "site.accumulate=2"),
    "recompute": (*SMALL, "site.recompute=true"),
    "accumulate": (*FLOW, "site.accumulate=2"),
    "16-mixed": (*FLOW, "site.precision=16-mixed"),
    "clipped": (*SMALL, *CLIPPED),
}
ROUNDED = ("accumulate", "clipped", "second derivatives, accumulate")
"""Sums in another order: of parts, of squares."""


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_weights_in_pieces_lead_where_whole_ones_do(case: str) -> None:
    ends: dict[str, str] = {}
    weights: dict[str, State] = {}
    samples: dict[str, torch.Tensor] = {}
    for shard in ("none", "weights"):
        with site(asked(shard, *CASES[case])) as taken:
            for scale in taken.leader.kept.values():
                scale.clamp_(max=2**8)  # nothing overflows
            taken.step(3)
            weights[shard] = {n: taken.replica.take(n).clone() for n in taken.replica.live}
            ends[shard] = hash_state(weights[shard]) + hash_state(taken.moments())
            samples[shard] = taken.leader.sample(2, 0)
    torch.testing.assert_close(weights["weights"], weights["none"], rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(samples["weights"], samples["none"], rtol=1e-3, atol=1e-4)
    if case not in ROUNDED:
        assert ends["weights"] == ends["none"]


@pytest.mark.slow
def test_each_process_holds_half_of_everything() -> None:
    with site(asked("weights", *FLOW)) as taken:
        taken.step(2)
        whole = sum(v.numel() * 4 for n, v in taken.replica.live.items())
        held = taken.num_bytes()
    for row in held:
        assert row.weights == pytest.approx(whole / 2, rel=0.02)
        assert row.gradients == row.weights and row.moments == pytest.approx(whole, rel=0.02)
    assert sum(row.weights for row in held) == whole


@pytest.mark.slow
def test_other_weights_are_shown_to_all_processes_and_leave_no_trace() -> None:
    with site(asked("weights", *FLOW)) as taken:
        taken.step(1)
        before = taken.sha256()
        zeros = {name: torch.zeros_like(value) for name, value in taken.replica.base.items()}
        real = next(taken.stream)
        with taken.replica.showing(zeros), torch.no_grad():
            shown = taken.replica.global_sha256()
            taken.leader.evaluate(real, 0)
        assert shown == hash_state(zeros) and taken.sha256() == before
        taken.step(1)


RUNS = {
    "diloco, moments averaged": (*FLOW, "strategy=diloco", "inner.velocity.state=average"),
    "local_sgd, topk2": (*FLOW, "strategy=local_sgd", "codec.up=topk2"),
    "streaming": (*FLOW, "strategy=streaming_diloco", "stream.tau=2", "checkpoint.every=1"),
    "eager": (*FLOW, "strategy=eager_diloco", "stream.tau=1"),
    "sync": (*FLOW, "strategy=sync", "h=1"),
    "second derivatives": (*GAN, "strategy=diloco"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RUNS)
def test_a_run_ends_on_the_same_bits_with_weights_in_pieces(tmp_path: Path, case: str) -> None:
    ends = {}
    for shard in ("none", "weights"):
        ends[shard] = run(tmp_path / shard, asked(shard, *RUNS[case]))
    for ran in ends.values():
        assert ran.sites == {ran.sha256}
    torch.testing.assert_close(ends["weights"].weights, ends["none"].weights, rtol=1e-4, atol=1e-6)
    assert ends["weights"].sha256 == ends["none"].sha256


@pytest.mark.slow
def test_a_checkpoint_is_that_of_one_process_and_successors_go_on_from_it(tmp_path: Path) -> None:
    work = Ledger({}, {}, Work(2, 16), (0,))
    ends = {}
    for kind in ("none", "weights"):
        with site(asked(kind, *SMALL)) as taken:
            keeper = SiteCheckpoints(tmp_path / kind, *taken[1:], is_beside=True)
            taken.step(2)
            keeper.save(1, 0, work)
            keeper.close()
            taken.step(2)
            ends[kind] = taken.sha256()
    files = [next((tmp_path / kind).glob("*.safetensors")) for kind in ("none", "weights")]
    (one, _), (other, _) = (read_tensors(file) for file in files)
    assert hash_state(one) == hash_state(other) and ends["weights"] == ends["none"]
    with site(asked("weights", *SMALL)) as successor:
        successor.step(1)
        SiteCheckpoints(tmp_path / "weights", *successor[1:]).load(1, with_model=True)
        successor.step(2)
        assert successor.sha256() == ends["weights"]


@pytest.mark.slow
def test_a_process_that_is_killed_ends_its_site_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    started = []
    start = follower._start
    monkeypatch.setattr(follower, "_start", lambda *a: started.append(start(*a)) or started[-1])
    with (
        pytest.raises(FedwanError, match="process 1 of this site ended with code -9"),
        site(asked("weights", *FLOW)) as taken,
    ):
        taken.step(1)
        started[0].kill()
        started[0].wait()
        taken.replica.global_sha256()
