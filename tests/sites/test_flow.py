"""The flow recipe."""

from __future__ import annotations

import torch

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.workloads.settings import resolve_page
from sites import flow
from tests.sites.support import Run


def test_it_learns_the_ring_in_seconds() -> None:
    config = Config(
        data=DataConfig("ring8", batch=128),
        model={"width": 64, "depth": 2},
        inner={"velocity": InnerConfig(lr=4e-3)},
    )
    run = Run(flow, config)
    untrained = run.workload.evaluate(run.held_out, seed=0)
    run.step(700)
    trained = run.workload.evaluate(run.held_out, seed=0)
    assert untrained["modes"] == 0
    assert trained["modes"] >= 6
    assert trained["fd"] < untrained["fd"] / 20


def test_samples_come_from_as_many_euler_steps_as_asked() -> None:
    run = Run(flow, Config(data=DataConfig("ring8"), model={"euler_steps": 7}))
    calls: list[float] = []
    run.workload.networks["velocity"].register_forward_pre_hook(
        lambda module, args: calls.append(float(args[1][0]))
    )
    run.workload.sample(3, seed=0)
    assert len(calls) == 7
    assert calls[0] == 1.0


def test_the_demo_network_is_small() -> None:
    (network,) = flow.build(resolved(), torch.device("cpu")).networks.values()
    assert sum(p.numel() for p in network.parameters()) < 600_000


def resolved() -> Config:
    config = Config()
    resolve_page(flow, config)
    return config
