"""Dense layers that processes compute together; each process is started for real."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from pathlib import Path

import pytest
import torch
from fedwan.site.common import same_draws
from torch import Tensor

from fedwan.app import load_run, load_workload
from fedwan.config import Config
from fedwan.data import open_shard
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state
from fedwan.workloads.base import keep_local
from tests.teams import CPU, FLOW, asked, run, site

DIT = (*FLOW, "model.network=dit")


def asked_of(*words: str) -> None:
    load_run(None, ["site.processes=2", "site.partition=tensor_parallel", *words])


def test_what_cannot_be_computed_together_is_refused() -> None:
    with pytest.raises(ConfigError, match="'tensor_parallel' does not go with workload 'gan'"):
        asked_of("workload=gan")
    with pytest.raises(
        ConfigError, match="heads = 3 cannot be .*=2; set model.heads=4 m.*width=12"
    ):
        asked_of("workload=flow", "model.network=dit", "model.width=12", "model.heads=3")
    with pytest.raises(ConfigError, match="width = 17 cannot be shared .* set model.width=18"):
        asked_of("workload=flow", "model.width=17")
    with pytest.raises(ConfigError, match="'tensor_parallel' does not go with strategy"):
        asked_of("workload=flow", "strategy=scaffnew")


CASES = {
    "mlp, one sample": (*FLOW, "data.batch=1"),
    "dit, four processes": (*DIT, "site.processes=4", "inner.velocity.clip_norm=0.05"),
    "dit, weights in bf16": (*DIT, "site.precision=bf16-true"),
    "dit, overflow, recompute": (*DIT, "site.precision=16-mixed", "site.recompute=true"),
    "dit, accumulate": (*DIT, "site.accumulate=2"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_processes_together_lead_where_one_does(case: str) -> None:
    config = asked("tensor_parallel", *CASES[case])
    with site(config) as taken:
        _stir(taken.replica, taken.leader.kept)
        taken.step(2)
        weights = {name: taken.replica.take(name).clone() for name in taken.replica.live}
        moments = taken.moments()
        norm = taken.leader.holding.gradient_norm("velocity")
        scale = dict(taken.leader.kept)
    expected = _alone(config, 2)
    # Parts of a product in bf16 or fp16 are rounded before they are added up.
    bound = 1e-5 if config.site.precision == "32-true" else 0.02
    for name, value in expected.optimizer_state().items():
        assert _distance(moments[name], value) < bound, name
    # All in one: keys' biases have no gradient but rounding, which Adam makes steps of.
    pairs = [(weights[name].flatten(), expected.take(name).flatten()) for name in expected.live]
    ours, theirs = (torch.cat(part) for part in zip(*pairs, strict=True))
    assert _distance(ours, theirs) < max(bound, 1e-3)
    assert _distance(norm, expected.holding.gradient_norm("velocity")) < bound
    assert scale == dict(expected.kept)


def _stir(replica: Replica, kept: Mapping[str, Tensor]) -> None:
    """Have weights of which none is zero, so that all gradients count, and a scale too large."""
    generator = torch.Generator().manual_seed(1)
    for name in replica.live:
        value = replica.take(name)
        noise = 0.1 * torch.randn(value.shape, generator=generator)
        replica.put(name, value + noise.to(value.dtype))
    for name, tensor in kept.items():
        if name == "scale":
            tensor.fill_(2.0**30)


def _distance(value: Tensor | None, expected: Tensor | None) -> float:
    """Relative, of whole tensors."""
    assert value is not None and expected is not None
    return float((value - expected).norm() / expected.norm().clamp(min=1e-12))


def _alone(config: Config, num: int) -> Replica:
    """A site of one process, stirred, after the same batches and draws."""
    plain = copy.deepcopy(config)
    plain.site.processes, plain.site.partition = 1, "none"
    workload = load_workload(config.workload).build(plain, CPU)
    replica = Replica(workload, config.inner)
    _stir(replica, replica.kept)
    rng = NamedGenerators(0, "s1")
    stream = open_shard(config.data, 0, 2, 0).loader(config.data.batch, rng["data"], CPU)
    for _ in range(num):
        draw = int(torch.randint(1 << 62, (), generator=rng["team"]))
        workload.step(next(stream), same_draws(draw), keep_local)
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
    expected = _alone(config, 0)
    stirred = {name: value.clone() for name, value in expected.live.items()}
    with site(config) as taken:
        taken.step(1)
        before = taken.sha256()
        real = next(taken.stream)
        # Parameters that are whole at each process are among them.
        with taken.replica.showing(stirred), torch.no_grad():
            shown = taken.leader.sample(3, 0)
            taken.leader.evaluate(real, 0)
        assert taken.sha256() == before
        after = taken.leader.sample(3, 0)
        taken.step(1)
    torch.testing.assert_close(shown, expected.workload.sample(3, 0))
    assert shown.abs().max() > 0.01 and not torch.allclose(after, shown)


@pytest.mark.slow
def test_all_processes_take_over_how_often_others_have_stepped() -> None:
    words = (*DIT, "strategy=async_diloco", "inner.velocity.state=average")
    ends = {}
    for partition in ("none", "weights", "tensor_parallel"):
        with site(asked(partition, *words)) as taken:
            taken.step(1)
            ahead = {n: v + 19 if n.endswith("|step") else v for n, v in taken.replica.base.items()}
            taken.replica.adopt(ahead)
            taken.step(1)
            ends[partition] = taken.sha256()
        # Under tensor_parallel a site would not end: what all have alike would differ.
    assert ends["weights"] == ends["none"]


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
