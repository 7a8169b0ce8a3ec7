"""Dense layers that processes compute together; each process is started for real."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch

from fedwan.app import load_run, load_workload
from fedwan.config import Config
from fedwan.data import open_shard
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.common import same_draws
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state
from fedwan.workloads.base import keep_local
from tests.teams import CPU, FLOW, asked, run, site

DIT = (*FLOW, "model.network=dit")


def asked_of(*words: str) -> None:
    load_run(None, ["site.processes=2", "site.partition=tensor_parallel", *words])


def test_what_cannot_be_computed_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tensor_parallel' is more than the steps of .* 'gan'"):
        asked_of("workload=gan")
    with pytest.raises(ConfigError, match="heads = 3 cannot be shared .* set model.heads=4"):
        asked_of("workload=flow", "model.network=dit", "model.width=12", "model.heads=3")
    with pytest.raises(ConfigError, match="width = 17 cannot be shared .* set model.width=16"):
        asked_of("workload=flow", "model.width=17")
    with pytest.raises(ConfigError, match="site.compile = True is not followed with .*tensor_par"):
        asked_of("workload=flow", "site.compile=true")
    with pytest.raises(ConfigError, match="site.partition=tensor_parallel keeps weights in pieces"):
        asked_of("workload=flow", "strategy=scaffnew")


CASES = {
    "mlp": FLOW,
    "dit, weights in bf16": (*DIT, "site.precision=bf16-true"),
    "dit, 16-mixed, recompute": (*DIT, "site.precision=16-mixed", "site.recompute=true"),
    "dit, clipped, accumulate": (*DIT, "inner.velocity.clip_norm=0.05", "site.accumulate=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_processes_together_lead_where_one_does(case: str) -> None:
    config = asked("tensor_parallel", *CASES[case])
    with site(config) as taken:
        for scale in taken.leader.kept.values():
            scale.clamp_(max=2**8)  # nothing overflows
        taken.step(3)
        weights = {name: taken.replica.take(name).clone() for name in taken.replica.live}
        moments = taken.moments()
        norm = taken.leader.holding.gradient_norm("velocity")
    expected = _alone(config, 3)
    # Halves of a product in bf16 or fp16 are rounded before they are added up.
    is_half = config.site.precision != "32-true"
    bounds = {"rtol": 0.05, "atol": 5e-3} if is_half else {"rtol": 1e-4, "atol": 1e-5}
    live = {name: expected.take(name) for name in expected.live}
    torch.testing.assert_close(weights, live, **bounds)
    torch.testing.assert_close(moments, dict(expected.optimizer_state()), **bounds)
    torch.testing.assert_close(norm, expected.holding.gradient_norm("velocity"), **bounds)
    assert any(not torch.equal(weights[name], expected.base[name]) for name in weights)


def _alone(config: Config, num: int) -> Replica:
    """A site of one process, after the same batches and draws."""
    plain = copy.deepcopy(config)
    plain.site.processes, plain.site.partition = 1, "none"
    workload = load_workload(config.workload).build(plain, CPU)
    for scale in getattr(workload, "kept", {}).values():
        scale.clamp_(max=2**8)
    replica = Replica(workload, config.inner)
    rng = NamedGenerators(0, "s1")
    stream = open_shard(config.data, 0, 2, 0).batches(config.data.batch, rng["data"], CPU)
    for _ in range(num):
        draw = int(torch.randint(1 << 62, (), generator=rng["team"]))
        workload.step(stream.next_batch(), same_draws(draw), keep_local)
    stream.close()
    return replica


@pytest.mark.slow
def test_each_process_holds_half_of_the_blocks() -> None:
    with site(asked("tensor_parallel", *DIT)) as taken:
        taken.step(2)
        whole = taken.replica.live
        held = taken.num_bytes()
    blocks = 4 * sum(v.numel() for n, v in whole.items() if "blocks" in n)
    # Biases of layers cut by their inputs are added to whole sums.
    biases = 4 * sum(
        v.numel() for n, v in whole.items() if n.endswith(("merge.bias", "second.bias"))
    )
    expected = 4 * sum(v.numel() for v in whole.values()) - (blocks - biases) / 2
    for row in held:
        assert row.weights == row.gradients == expected
        assert row.moments == pytest.approx(2 * expected, rel=0.01)


@pytest.mark.slow
def test_other_weights_are_shown_to_all_processes_and_leave_no_trace() -> None:
    config = asked("tensor_parallel", *DIT)
    with site(config) as taken:
        taken.step(2)
        before = taken.sha256()
        expected = _alone(config, 0)
        real = taken.stream.next_batch()
        # Those that a run begins with, parameters that are whole at each process among them.
        with taken.replica.showing(taken.replica.base), torch.no_grad():
            shown = taken.leader.sample(3, 0)
            taken.leader.evaluate(real, 0)
        assert taken.sha256() == before
        torch.testing.assert_close(shown, expected.workload.sample(3, 0))
        assert not torch.allclose(taken.leader.sample(3, 0), shown)
        taken.step(1)


@pytest.mark.slow
@pytest.mark.parametrize(
    "words",
    [
        ("strategy=streaming_diloco", "stream.tau=2", "inner.velocity.state=average"),
        ("strategy=sync", "h=1"),
    ],
    ids=lambda words: words[0],
)
def test_a_run_ends_on_the_same_weights_at_all_sites(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    ran = run(tmp_path, asked("tensor_parallel", *DIT, *words))
    assert ran.sites == {ran.sha256}


@pytest.mark.slow
def test_a_successor_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    config = asked("tensor_parallel", *DIT)
    with site(config) as taken:
        keeper = SiteCheckpoints(tmp_path, *taken[1:], is_beside=True)
        taken.step(2)
        keeper.save(1, 0, Ledger({}, {}, Work(2, 16), (0,)))
        keeper.close()
        taken.step(2)
        end: State = {name: taken.replica.take(name).clone() for name in taken.replica.live}
        digests = taken.sha256()
    with site(config) as successor:
        successor.step(1)
        SiteCheckpoints(tmp_path, *successor[1:]).load(1, with_model=True)
        successor.step(2)
        assert successor.sha256() == digests
    assert hash_state(end) == digests[0]
