"""Sites whose weights are in bf16, beside global weights in fp32."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest
import torch
from fedwan.simulate import SimulatedSite, simulate
from tests.runs import INNER, Crash, CrashingWorkload, H, TinyRun, delta_strategy

from fedwan.fragments import whole
from fedwan.site.replica import Replica
from fedwan.state import hash_state
from fedwan.workloads.half import hold_in_half
from fedwan.workloads.moments import keep_squares_in_full
from fedwan.workloads.optim import build_optimizer
from strategies import diloco, eager_diloco, local_sgd, scaffnew, streaming_diloco
from tests.support import TinyWorkload, build_strategy, tiny_shard


def in_half(workload: TinyWorkload) -> TinyWorkload:
    for name, network in workload.networks.items():
        hold_in_half(network)
        config = workload.inner[name]
        workload.optimizers[name] = build_optimizer(config, network.parameters())
        keep_squares_in_full(workload.optimizers[name])
    return workload


def test_a_site_that_took_no_step_contributes_nothing_though_its_weights_are_rounded() -> None:
    replica = Replica(in_half(TinyWorkload(INNER)))
    fragment = whole(replica.layout)[0]
    weights = {n: v + 1e-4 * torch.randn(v.shape) for n, v in replica.base.items()}
    replica.adopt(weights)
    assert any(not torch.equal(replica.live[n].float(), v) for n, v in weights.items())
    room = {name: torch.full_like(value, 9.0) for name, value in weights.items()}
    replica.take_delta(fragment, room)
    assert not any(value.any() for value in (*room.values(), *replica.delta().values()))
    assert replica.global_sha256() == hash_state(weights)


def test_a_delta_is_what_the_steps_changed_to_the_last_bit() -> None:
    replica = Replica(in_half(TinyWorkload(INNER)))
    replica.adopt({n: v + 1e-4 * torch.randn(v.shape) for n, v in replica.base.items()})
    before = {name: value.clone() for name, value in replica.live.items()}
    with torch.no_grad():
        for value in replica.live.values():
            value.mul_(1.25)
    for name, delta in replica.delta().items():
        assert delta.dtype == torch.float32
        assert torch.equal(delta, before[name].float() - replica.live[name].float())
    assert replica.global_sha256() != hash_state(replica.base)


@pytest.mark.parametrize(
    "recipe",
    [diloco, streaming_diloco, eager_diloco, local_sgd, scaffnew],
    ids=lambda recipe: recipe.__name__.rpartition(".")[2],
)
@pytest.mark.parametrize("codec", ["fp32", "int4"])
def test_all_parties_end_on_the_same_bits(tmp_path: Path, recipe: ModuleType, codec: str) -> None:
    strategy = build_strategy(recipe, INNER, sites=2, h=2, up=codec, down=codec)
    sites = {f"s{i}": SimulatedSite(in_half(TinyWorkload(INNER)), tiny_shard(i)) for i in (1, 2)}
    ran = simulate(sites, strategy, tmp_path, num_steps=16, batch=4, inner=INNER)
    assert set(ran.site_sha256.values()) == {hash_state(ran.model.state)}
    state = ran.model.state
    assert all(value.dtype == torch.float32 for value in state.values())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in state.values())


@pytest.mark.parametrize("after_steps", [0, H, 4 * H + 2])
def test_a_site_that_dies_and_comes_back_changes_no_bit(tmp_path: Path, after_steps: int) -> None:
    whole_run = TinyRun(tmp_path / "a", delta_strategy(2))
    result = whole_run.start()
    for name in whole_run.sites:
        whole_run.site(name, in_half(CrashingWorkload(-1)))
    expected = hash_state(result(30.0).state)
    run = TinyRun(tmp_path / "b", delta_strategy(2))
    result = run.start()
    first = run.site("s1", in_half(CrashingWorkload(-1)))
    with pytest.raises(Crash):
        run.site("s2", in_half(CrashingWorkload(after_steps)))(20.0)
    second = run.site("s2", in_half(CrashingWorkload(-1)))
    assert hash_state(result(30.0).state) == expected
    assert first(10.0) == second(10.0) == expected
