"""What every strategy recipe must do: resolve, refuse, build."""

from __future__ import annotations

import copy
from pathlib import Path
from types import ModuleType

import pytest
import torch

from fedwan.app import load_run
from fedwan.codecs import plain
from fedwan.config import Config, InnerConfig, OuterConfig
from fedwan.errors import ConfigError
from fedwan.overlap import Overlap
from fedwan.recipes import resolve_strategy
from fedwan.state import State
from fedwan.strategy import Strategy
from fedwan.workloads.base import NetworkKind
from strategies import (
    async_diloco,
    diloco,
    eager_diloco,
    local_sgd,
    parameter_server,
    scaffnew,
    sparse_loco,
    streaming_diloco,
    sync,
)
from tests.support import spec
from tests.test_simulate import GAN as TINY
from tests.test_simulate import run

RECIPES = {
    "async_diloco": async_diloco,
    "diloco": diloco,
    "eager_diloco": eager_diloco,
    "local_sgd": local_sgd,
    "parameter_server": parameter_server,
    "scaffnew": scaffnew,
    "sparse_loco": sparse_loco,
    "streaming_diloco": streaming_diloco,
    "sync": sync,
}
GRADIENTS = {"parameter_server", "sync"}
ON_ARRIVAL = {"async_diloco", "parameter_server"}
GAN: dict[str, NetworkKind] = {"discriminator": "adversarial", "generator": "adversarial"}
FLOW: dict[str, NetworkKind] = {"velocity": "regression"}

every_recipe = pytest.mark.parametrize("name", RECIPES)


def make_config(name: str, networks: dict[str, NetworkKind], sites: int = 2) -> Config:
    inner = {network: InnerConfig() for network in networks}
    return Config(strategy=name, sites=sites, steps=200, inner=inner)


def resolved(name: str, networks: dict[str, NetworkKind], sites: int = 2) -> Config:
    config = make_config(name, networks, sites)
    resolve_strategy(RECIPES[name], config, networks)
    return config


@every_recipe
@pytest.mark.parametrize("networks", [GAN, FLOW], ids=["gan", "flow"])
def test_resolving_twice_changes_nothing(name: str, networks: dict[str, NetworkKind]) -> None:
    once = resolved(name, networks)
    twice = copy.deepcopy(once)
    resolve_strategy(RECIPES[name], twice, networks)
    assert once == twice


@every_recipe
@pytest.mark.parametrize("networks", [GAN, FLOW], ids=["gan", "flow"])
def test_it_builds_for_every_workload(name: str, networks: dict[str, NetworkKind]) -> None:
    config = resolved(name, networks, sites=3)
    config.codec.up, config.codec.down = "bf16", "fp32"
    strategy: Strategy = RECIPES[name].build(config)
    assert (strategy.h, strategy.up.name, strategy.down.name) == (config.h, "bf16", "fp32")
    assert strategy.policy.num_sites == 3
    layout = {f"{network}/w": spec((2,)) for network in networks}
    model = {tensor: torch.zeros(2) for tensor in layout}
    step = strategy.server_step(model, layout)
    step.commit(plain(step.propose({tensor: torch.ones(2) for tensor in layout})))
    assert all(bool((value < 0).all()) for value in model.values())


@every_recipe
def test_a_quorum_reaches_the_policy(name: str) -> None:
    config = resolved(name, FLOW, sites=4)
    config.round.quorum, config.round.patience_s = 3, 9.0
    policy = RECIPES[name].build(config).policy
    assert policy[:3] == (4, 3, 9.0)
    assert (policy.arrivals_from is None) == (name not in ON_ARRIVAL)


@every_recipe
def test_steps_that_no_round_would_merge_are_refused(name: str) -> None:
    config = make_config(name, FLOW)
    config.steps, config.h = 201, 1 if name in GRADIENTS else 20
    recipe: ModuleType = RECIPES[name]
    if name in GRADIENTS:
        resolve_strategy(recipe, config, FLOW)
        return
    with pytest.raises(ConfigError, match="steps=201 is no multiple of h=20"):
        resolve_strategy(recipe, config, FLOW)


def test_sync_exchanges_gradients_and_the_others_deltas() -> None:
    kinds = {n: r.build(resolved(n, FLOW)).contributes for n, r in RECIPES.items()}
    assert kinds == {name: "gradient" if name in GRADIENTS else "delta" for name in RECIPES}


@pytest.mark.parametrize(
    ("sites", "lr"), [(1, 0.4), (2, 0.6), (3, 0.6), (4, 0.6), (5, 0.6), (8, 0.8), (16, 0.8)]
)
def test_a_flows_outer_lr_grows_with_the_number_of_sites(sites: int, lr: float) -> None:
    assert resolved("diloco", FLOW, sites).outer == {"velocity": OuterConfig(lr, 0.9)}


@pytest.mark.parametrize("sites", [1, 4, 16])
def test_a_gans_networks_bear_little_momentum(sites: int) -> None:
    gentle = OuterConfig(0.5, 0.5)
    assert resolved("diloco", GAN, sites).outer == {"discriminator": gentle, "generator": gentle}


def test_diloco_keeps_what_the_user_named() -> None:
    config = make_config("diloco", GAN)
    config.outer["generator"] = OuterConfig(0.3, 0.2)
    resolve_strategy(diloco, config, GAN)
    assert config.outer["generator"] == OuterConfig(0.3, 0.2)


def step_twice(name: str, config: Config) -> State:
    layout = {"velocity/w": spec((1,))}
    model = {"velocity/w": torch.zeros(1)}
    step = RECIPES[name].build(config).server_step(model, layout)
    for _ in "12":
        step.commit(plain(step.propose({"velocity/w": torch.ones(1)})))
    return model


def test_local_sgd_is_plain_averaging() -> None:
    assert step_twice("local_sgd", resolved("local_sgd", FLOW))["velocity/w"].tolist() == [-2.0]


def test_diloco_is_nesterov_with_its_own_settings() -> None:
    config = make_config("diloco", FLOW)
    config.outer["velocity"] = OuterConfig(0.5, 0.5)
    resolve_strategy(diloco, config, FLOW)
    # b = 1, 1.5; steps -0.5 (1 + 0.5 b)
    assert step_twice("diloco", config)["velocity/w"].tolist() == [-0.75 - 0.875]


def test_eager_updates_know_their_own_part_of_the_outer_step() -> None:
    config = make_config("eager_diloco", FLOW, sites=4)
    config.outer["velocity"] = OuterConfig(0.6, 0.9)
    resolve_strategy(eager_diloco, config, FLOW)
    overlap = eager_diloco.build(config).overlap
    assert overlap.tau == 5
    assert overlap.eager["velocity"] == pytest.approx((0.6 * 1.9 / 4, 0.9))


def test_eager_updates_need_steps_in_between() -> None:
    config = make_config("eager_diloco", FLOW)
    config.stream.tau = 0
    with pytest.raises(ConfigError, match="stream.tau = 0 does not go with"):
        resolve_strategy(eager_diloco, config, FLOW)


def test_a_stream_without_overlap_waits_for_every_fragment() -> None:
    config = make_config("streaming_diloco", FLOW)
    config.stream.tau = 0
    resolve_strategy(streaming_diloco, config, FLOW)
    assert streaming_diloco.build(config).overlap == Overlap()


@pytest.mark.parametrize("strategy", ["local_sgd", "diloco", "sparse_loco", "streaming_diloco"])
def test_a_discriminator_may_travel_more_often(strategy: str) -> None:
    config = load_run(None, [f"strategy={strategy}", "network.discriminator.h=5"])
    assert (config.h, config.network["discriminator"].h) == (20, 5)


def test_a_network_that_is_not_there_has_no_h() -> None:
    with pytest.raises(ConfigError, match=r"network.critic: workload 'gan' trains"):
        load_run(None, ["network.critic.h=5"])


@pytest.mark.parametrize("name", ["diloco", "streaming_diloco"])
def test_outer_lr_1_without_momentum_averages_a_network_beside_one_with_momentum(
    name: str, tmp_path: Path
) -> None:
    def trained(name: str, outer: dict[str, OuterConfig]) -> State:
        config = Config(strategy=name, sites=2, steps=32, h=4, inner=dict(TINY), outer=outer)
        if name == "streaming_diloco":
            config.stream.fragments, config.stream.tau = 1, 0
        resolve_strategy(RECIPES[name], config, GAN)
        return run(tmp_path / name, RECIPES[name].build(config), TINY, steps=32).state

    averaged = trained("local_sgd", {})
    ran = trained(name, {"discriminator": OuterConfig(1.0, 0.0)})
    for tensor, value in averaged.items():
        assert torch.equal(value, ran[tensor]) == tensor.startswith("discriminator/")
