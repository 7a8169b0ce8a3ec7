"""The contract of `fedwan.workloads.base`, which every recipe passes."""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Sequence
from types import ModuleType

import pytest
import torch

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.errors import ConfigError
from fedwan.rng import NamedGenerators
from fedwan.workloads.settings import resolve_page
from sites import flow, gan
from tests.sites.support import CPU, Run, equal, weights
from tests.workloads import line

RECIPES = pytest.mark.parametrize("recipe", [gan, flow, line], ids=["gan", "flow", "line"])
DATA = pytest.mark.parametrize("name", ["digits", "ring8"])


def config(name: str = "digits", seed: int = 0) -> Config:
    return Config(seed=seed, sites=2, data=DataConfig(name, batch=8))


@RECIPES
@DATA
def test_a_step_moves_every_network_and_returns_finite_scalars(
    recipe: ModuleType, name: str
) -> None:
    run = Run(recipe, config(name))
    before = weights(run)
    losses = run.step(5)  # what lies behind a layer that starts at zero moves one step later
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))
    assert set(recipe.NETWORKS) <= set(losses)
    for loss in losses.values():
        assert loss.shape == ()
        assert torch.isfinite(loss)
        assert not loss.requires_grad


@RECIPES
@DATA
def test_a_run_resumes_from_its_state_bit_for_bit(recipe: ModuleType, name: str) -> None:
    run = Run(recipe, config(name))
    run.step(3)
    state = run.state()
    run.step(4)
    resumed = Run(recipe, config(name))
    resumed.load_state(state)
    resumed.step(4)
    assert equal(weights(resumed), weights(run))
    torch.testing.assert_close(resumed.rng.state_dict(), run.rng.state_dict(), rtol=0, atol=0)


@RECIPES
def test_sites_start_from_the_same_weights_and_seeds_from_others(recipe: ModuleType) -> None:
    first, second = Run(recipe, config(), site=0), Run(recipe, config(), site=1)
    assert equal(weights(first), weights(second))
    assert not equal(weights(first), weights(Run(recipe, config(seed=1))))


@RECIPES
def test_every_draw_comes_from_the_named_generators(recipe: ModuleType) -> None:
    before = torch.random.get_rng_state()
    run = Run(recipe, config())
    run.step(2)
    run.workload.sample(2, seed=0)
    run.workload.evaluate(run.held_out, seed=0)
    assert torch.equal(torch.random.get_rng_state(), before)


@RECIPES
def test_gradients_are_reduced_once_complete_for_all_networks_before_any_step(
    recipe: ModuleType,
) -> None:
    run = Run(recipe, config())
    before = weights(run)
    calls: list[tuple[str, ...]] = []

    def reduce(names: Sequence[str]) -> None:
        calls.append(tuple(names))
        assert equal(weights(run), before)
        for module in run.workload.networks.values():
            assert all(p.grad is not None for p in module.parameters())

    run.step(reduce=reduce)
    assert [sorted(names) for names in calls] == [sorted(recipe.NETWORKS)]


@RECIPES
def test_what_reduce_leaves_in_the_gradients_is_what_the_optimisers_take(
    recipe: ModuleType,
) -> None:
    run = Run(recipe, config())
    before = weights(run)

    def erase(names: Sequence[str]) -> None:
        for name in names:
            for param in run.workload.networks[name].parameters():
                param.grad = torch.zeros_like(param)

    run.step(reduce=erase)
    assert equal(weights(run), before)


@RECIPES
def test_gradients_do_not_add_up_over_steps(recipe: ModuleType) -> None:
    run = Run(recipe, config())
    batch, state = next(run.stream), run.rng.state_dict()

    def gradients() -> list[torch.Tensor]:
        found: list[torch.Tensor] = []

        def keep_and_erase(names: Sequence[str]) -> None:
            for name in names:
                for param in run.workload.networks[name].parameters():
                    assert param.grad is not None
                    found.append(param.grad.clone())
                    param.grad.zero_()

        run.rng.load_state_dict(state)
        run.workload.step(batch, run.rng, keep_and_erase)
        return found

    assert equal(gradients(), gradients())


@RECIPES
def test_a_step_leaves_the_batch_as_it_was(recipe: ModuleType) -> None:
    run = Run(recipe, config())
    batch = next(run.stream)
    before = copy.deepcopy(batch)
    run.workload.step(batch, NamedGenerators(0, "s1"), lambda names: None)
    assert torch.equal(batch.x, before.x)
    assert not batch.x.requires_grad
    assert batch.x.grad is None


@RECIPES
@DATA
def test_samples_look_like_data_and_depend_on_the_seed_alone(recipe: ModuleType, name: str) -> None:
    run = Run(recipe, config(name))
    run.step(2)
    state = run.state()["rng"]
    first, again, other = (run.workload.sample(6, seed) for seed in (1, 1, 2))
    assert first.shape == (6, *run.held_out.x.shape[1:])
    assert torch.equal(first, again)
    assert not torch.equal(first, other)
    assert not first.requires_grad
    assert name != "digits" or float(first.abs().max()) <= 1
    torch.testing.assert_close(run.rng.state_dict(), state, rtol=0, atol=0)


@RECIPES
@DATA
def test_quality_is_ready_for_json_and_repeatable(recipe: ModuleType, name: str) -> None:
    run = Run(recipe, config(name))
    first, again = (run.workload.evaluate(run.held_out, seed=0) for _ in range(2))
    assert json.dumps(first) == json.dumps(again)
    assert first["fd"] > 3 * first["fd_floor"] > 0


@RECIPES
def test_resolving_twice_changes_nothing(recipe: ModuleType) -> None:
    once = Config(model=dataclasses.asdict(recipe.Model()))
    resolve_page(recipe, once)
    twice = copy.deepcopy(once)
    resolve_page(recipe, twice)
    assert once == twice
    assert set(once.inner) == set(recipe.NETWORKS)
    assert once.data.batch > 0
    # Whole rounds for every usual H.
    assert all(once.steps % h == 0 for h in (1, 10, 20, 50, 100))


@RECIPES
def test_what_the_user_chose_stays(recipe: ModuleType) -> None:
    chosen = {name: InnerConfig("sgd", lr=0.1) for name in recipe.NETWORKS}
    asked = Config(steps=60, data=DataConfig(batch=5), inner=copy.deepcopy(chosen))
    resolve_page(recipe, asked)
    assert (asked.steps, asked.data.batch, asked.inner) == (60, 5, chosen)
    recipe.build(asked, CPU)


@RECIPES
def test_settings_that_cannot_work_are_refused_before_anything_is_built(
    recipe: ModuleType,
) -> None:
    wrong = [
        Config(data=DataConfig("digit")),
        Config(data=DataConfig(split="by_labels")),
        Config(model={"width": 0}),
    ]
    for asked in wrong:
        with pytest.raises(ConfigError) as caught:
            resolve_page(recipe, asked)
        assert "\n" not in str(caught.value)
