"""What every strategy must do: resolve, refuse, build, train, and bear a site that goes away."""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.app import load_strategy, strategy_names
from fedwan.codecs import plain
from fedwan.config import Config, InnerConfig, OuterConfig
from fedwan.errors import ConfigError
from fedwan.recipes import resolve_strategy
from fedwan.simulation import Absence
from fedwan.state import State, state_of
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind
from tests.support import ADAM, TinyWorkload, run_tiny, same_bits, spec, tiny_config
from tests.support import GAN as TINY_GAN

GRADIENTS = {"parameter_server", "sync"}
ON_ARRIVAL = {"async_diloco", "parameter_server"}
STREAMS = {"eager_diloco", "streaming_diloco"}
GAN: dict[str, NetworkKind] = {"discriminator": "adversarial", "generator": "adversarial"}
FLOW: dict[str, NetworkKind] = {"velocity": "regression"}

every_strategy = pytest.mark.parametrize("name", strategy_names())
every_workload = pytest.mark.parametrize("networks", [GAN, FLOW], ids=["gan", "flow"])


def make_config(name: str, networks: dict[str, NetworkKind], sites: int = 2) -> Config:
    inner = {network: InnerConfig() for network in networks}
    return Config(strategy=name, sites=sites, steps=200, inner=inner)


def resolved(name: str, networks: dict[str, NetworkKind], sites: int = 2) -> Config:
    config = make_config(name, networks, sites)
    resolve_strategy(load_strategy(name), config, networks)
    return config


# Recipes -----------------------------------------------------------------------------------------


@every_strategy
@every_workload
def test_it_builds_for_every_workload(name: str, networks: dict[str, NetworkKind]) -> None:
    config = resolved(name, networks, sites=3)
    twice = copy.deepcopy(config)
    resolve_strategy(load_strategy(name), twice, networks)
    assert config == twice
    config.codec.up, config.codec.down = "bf16", "fp32"
    config.round.quorum, config.round.patience_s = 2, 9.0
    strategy: Strategy = load_strategy(name).build(config)
    assert (strategy.h, strategy.up.name, strategy.down.name) == (config.h, "bf16", "fp32")
    assert strategy.contributes == ("gradient" if name in GRADIENTS else "delta")
    assert strategy.policy[:3] == (3, 2, 9.0)
    assert (strategy.policy.arrivals_from is None) == (name not in ON_ARRIVAL)
    layout = {f"{network}/w": spec((2,)) for network in networks}
    model = {tensor: torch.zeros(2) for tensor in layout}
    step = strategy.server_step(model, layout)
    step.commit(plain(step.propose({tensor: torch.ones(2) for tensor in layout})))
    assert all(bool((value < 0).all()) for value in model.values())


@pytest.mark.parametrize(
    ("sites", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (5, 0.6), (8, 0.8), (16, 0.8)]
)
def test_a_flows_outer_lr_grows_with_the_number_of_sites_and_a_gans_does_not(
    sites: int, lr: float
) -> None:
    gentle = OuterConfig(0.5, 0.5)
    assert resolved("diloco", FLOW, sites).outer == {"velocity": OuterConfig(lr, 0.9)}
    assert resolved("diloco", GAN, sites).outer == {"discriminator": gentle, "generator": gentle}


# Training ----------------------------------------------------------------------------------------


@every_strategy
def test_every_site_ends_on_the_coordinators_bits(name: str, tmp_path: Path) -> None:
    h = 1 if name in GRADIENTS else 4
    sections = {"stream": {"fragments": 2, "tau": 1}} if name in STREAMS else {}
    coded = {"up": "int8", "down": "topk2" if name == "streaming_diloco" else "bf16"}
    config = tiny_config(name, TINY_GAN, h=h, steps=2 * h, codec=coded, **sections)
    ran = run_tiny(tmp_path, config, norm=True)
    assert len(ran.hashes) == 1
    assert ran.result.totals.contributions >= 4
    assert all(bool(value.isfinite().all()) for value in ran.state.values())


@every_strategy
def test_an_average_over_every_step_travels_coded_or_is_refused(name: str, tmp_path: Path) -> None:
    """The weights and what is learnt of them are the same with and without it."""
    h, stream = (1 if name in GRADIENTS else 4), {"stream": {"fragments": 2, "tau": 1}}
    sections = {"codec": {"up": "int4", "down": "int4"}, **(stream if name in STREAMS else {})}

    def run(state: str) -> Any:
        inner = dict.fromkeys(TINY_GAN, replace(ADAM, state=state))
        config = tiny_config(name, inner, h=h, steps=10 * h, **sections)
        return run_tiny(tmp_path / state, config, norm=True)

    if name in {*GRADIENTS, *ON_ARRIVAL, "experts", "eager_diloco"}:
        with pytest.raises(ConfigError, match=r"inner\.discriminator\.state = 'ema'"):
            run("ema")
        return
    plain, ran = run("keep"), run("ema")
    assert len(ran.hashes) == 1
    assert same_bits(plain.state, {n: v for n, v in ran.state.items() if "|" not in n})
    norms = [[row["norms"] for row in each.rounds("s1")] for each in (plain, ran)]
    assert norms[0] == norms[1]
    begun = state_of(TinyWorkload(TINY_GAN, norm=True).networks)
    for tensor, average in ran.result.model.ema.items():
        if tensor.endswith("weight"):  # of the last tenth above all
            apart = [torch.dist(average, other[tensor]) for other in (ran.state, begun)]
            assert apart[0] < apart[1], tensor


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco"])
def test_outer_lr_1_without_momentum_averages_a_network_beside_one_with_momentum(
    name: str, tmp_path: Path
) -> None:
    def trained(name: str, **sections: Any) -> State:
        config = tiny_config(name, TINY_GAN, h=4, steps=16, **sections)
        return run_tiny(tmp_path / name, config).state

    stream = {"stream": {"fragments": 1, "tau": 0}} if name in STREAMS else {}
    averaged = trained("local_sgd")
    ran = trained(name, outer={"discriminator": {"lr": 1.0, "momentum": 0.0}}, **stream)
    for tensor, value in averaged.items():
        assert torch.equal(value, ran[tensor]) == tensor.startswith("discriminator/")


ABSENCES = [
    *((name, 2, {}) for name in strategy_names() if name not in ("sync", "sparse_loco")),
    *((name, 3, {}) for name in ("sync", "sparse_loco", "diloco", "async_diloco", "eager_diloco")),
    ("diloco", 2, {"round": {"least_steps": 1}}),
    ("streaming_diloco", 2, {"network": {"discriminator": {"h": 2}}}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "quorum", "more"), ABSENCES)
def test_a_run_bears_a_site_that_dies_at_a_third_and_returns_at_two_thirds(
    name: str,
    quorum: int,
    more: dict[str, Any],
    tmp_path: Path,
) -> None:
    h = 1 if name in GRADIENTS else 6
    rounds: dict[str, Any] = {"quorum": quorum, "patience_s": 30.0}
    sections = {"stream": {"fragments": 2}} if name in STREAMS else {}
    sections |= more | {"round": rounds | more.get("round", {})}
    inner = dict.fromkeys(TINY_GAN, TINY_GAN["discriminator"])
    sections |= {"kind": "regression", "checkpoint": {"every": 1}}
    config = tiny_config(name, inner, sites=3, h=h, steps=20 * h, **sections)
    ran = run_tiny(tmp_path, config, absences={"s2": Absence(1 / 3, 2 / 3)})
    assert len(ran.hashes) == 1
    assert ran.rounds("s2")[-1]["step"] >= 0.9 * config.steps or h == 1, "it came back"
    assert ran.result.totals.rejoins == 1


@pytest.mark.parametrize("state", ["keep", "ema"])
@pytest.mark.parametrize("at", [1 / 2, 5 / 8])
def test_a_site_that_dies_forgets_nothing_that_any_of_its_networks_owes_or_averages(
    state: str, at: float, tmp_path: Path
) -> None:
    inner = dict.fromkeys(TINY_GAN, replace(TINY_GAN["discriminator"], state=state))
    sections: dict[str, Any] = {"codec": {"up": "int2"}, "checkpoint": {"every": 1}}
    sections |= {"kind": "regression", "network": {"discriminator": {"h": 2}}}
    config = tiny_config("diloco", inner, h=4, steps=16, **sections)
    whole = run_tiny(tmp_path / "a", config)
    again = run_tiny(tmp_path / "b", config, absences={"s2": Absence(at, at)})
    assert again.result.totals.rejoins == 1
    assert same_bits(whole.state, again.state)
    assert same_bits(whole.result.model.ema, again.result.model.ema)
