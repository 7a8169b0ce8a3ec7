"""The contract of `fedwan.workloads.base`, which every recipe passes."""

from __future__ import annotations

import copy
import dataclasses
import json
from types import ModuleType
from typing import Any, NamedTuple

import pytest
import torch

from fedwan.config import Config, DataConfig
from fedwan.errors import ConfigError
from fedwan.state import hash_state
from fedwan.workloads.base import Batch
from fedwan.workloads.settings import resolve_page
from sites import diffusers_unet, distill, flow, gan, pix2pix
from tests.sites.support import DIT, MLP, Run, equal, weights

MODELS: dict[str, tuple[ModuleType, str, dict[str, Any]]] = {
    "gan": (gan, "digits", {"width": 8}),
    "gan-ring": (gan, "ring8", {}),
    "flow": (flow, "digits", MLP),
    "flow-ring": (flow, "ring8", MLP),
    "dit": (flow, "digits", DIT),
    "pix2pix": (pix2pix, "photo_edges", {"width": 4}),
    "unet": (diffusers_unet, "digits", {"width": 8, "sampling_steps": 4}),
    "distill": (distill, "ring8", {"teacher": "mlp_teacher"}),
    "distill-dit": (distill, "digits", {"teacher": "dit_teacher"}),
}
SLOW = {"unet", "distill-dit"}


class Case(NamedTuple):
    """A recipe as it is tried."""

    recipe: ModuleType
    data: str
    model: dict[str, Any]

    def config(self, seed: int = 0, **model: Any) -> Config:
        data = DataConfig(self.data, batch=8)
        name = self.recipe.__name__.removeprefix("sites.")
        return Config(name, seed=seed, sites=2, data=data, model=self.model | model)

    def run(self, seed: int = 0, site: int = 0) -> Run:
        return Run(self.recipe, self.config(seed), site)


@pytest.fixture(
    params=[pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in MODELS]
)
def case(request: pytest.FixtureRequest) -> Case:
    recipe, data, model = MODELS[request.param]
    if recipe is distill:
        model = {"teacher": str(request.getfixturevalue(model["teacher"]))}
    return Case(recipe, data, model)


def test_sites_start_alike_steps_move_every_network_and_resume_bit_for_bit(case: Case) -> None:
    torch_draws = torch.random.get_rng_state()
    run = case.run()
    before = weights(run)
    losses = run.step(4)  # what lies behind a layer that starts at zero moves one step later
    stayed = [a for a, b in zip(before, weights(run), strict=True) if torch.equal(a, b)]
    # A hinge pulls both ways alike at the bias of a judge's last layer.
    assert all(case.recipe is distill and value.dim() == 1 for value in stayed)
    assert set(case.recipe.NETWORKS) <= set(losses)
    assert all(v.shape == () and v.isfinite() and not v.requires_grad for v in losses.values())
    state = run.state()
    run.step(2)
    resumed = case.run()
    assert equal(weights(resumed), before) and not equal(weights(case.run(seed=1)), before)
    resumed.step()  # nothing is left of it
    resumed.load_state(state)
    resumed.step(2)
    assert equal(weights(case.run(site=1)), before)
    assert hash_state(resumed.pieces()) == hash_state(run.pieces())
    torch.testing.assert_close(resumed.rng.state_dict(), run.rng.state_dict(), rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), torch_draws)


def test_gradients_are_reduced_once_complete_and_what_is_left_of_them_is_taken(case: Case) -> None:
    run = case.run()
    before = weights(run)
    found: list[list[torch.Tensor]] = []

    def keep_and_erase() -> None:
        assert equal(weights(run), before)
        networks = [run.workload.networks[name] for name in case.recipe.NETWORKS]
        params = [param for network in networks for param in network.parameters()]
        found.append([p.grad.clone() for p in params if p.grad is not None])
        assert len(found[-1]) == len(params)
        for param in params:
            param.grad = torch.zeros_like(param)

    batch, state = next(run.stream), run.rng.state_dict()
    kept = copy.deepcopy(batch)
    for _ in range(2):  # gradients do not add up over steps, and the batch stays as it was
        run.rng.load_state_dict(state)
        run.workload.step(batch, run.rng, keep_and_erase)
    assert len(found) == 2 and equal(weights(run), before)
    if case.recipe is not distill:  # whose target follows the student
        assert equal(*found)
    assert torch.equal(batch.x, kept.x) and not batch.x.requires_grad and batch.x.grad is None


def test_samples_and_quality_depend_on_the_seed_alone_and_change_nothing(case: Case) -> None:
    run = case.run()
    run.step(2)
    before, drawn, torch_draws = run.state(), run.rng.state_dict(), torch.random.get_rng_state()
    first, again, other = (run.workload.sample(6, seed) for seed in (1, 1, 2))
    made = run.held_out.x[:, 1:] if case.recipe is pix2pix else run.held_out.x
    assert first.shape == (6, *made.shape[1:]) and not first.requires_grad
    assert torch.equal(first, again)
    assert torch.equal(first, other) is (case.recipe is pix2pix)  # of inputs, without a draw
    assert case.data == "ring8" or float(first.abs().max()) <= 1
    figures = [run.workload.evaluate(run.held_out, seed=0) for _ in range(2)]
    assert json.dumps(figures[0]) == json.dumps(figures[1])
    assert figures[0]["fd"] > 3 * figures[0]["fd_floor"] > 0
    if hasattr(run.workload, "examine"):
        held_out = Batch(run.held_out.x[:8], run.held_out.y[:8])
        train = next(case.run().stream)
        looks = [run.workload.examine(train, held_out, 5) for _ in range(2)]
        assert looks[0] == looks[1] and all(look.shape == () for look in looks[0].values())
        assert {name.partition("/")[2] for name in looks[0]} <= set(case.recipe.NETWORKS)
    assert hash_state(run.pieces()) == hash_state(before[0])
    torch.testing.assert_close(run.rng.state_dict(), drawn, rtol=0, atol=0)
    assert torch.equal(torch.random.get_rng_state(), torch_draws)


@pytest.mark.parametrize(
    ("kind", "network"), [("gan", "generator"), ("dit", "velocity"), ("unet", "denoiser")]
)
def test_quality_is_measured_on_samples_of_the_classes_that_are_held_out(
    kind: str, network: str
) -> None:
    case = Case(*MODELS[kind])
    told = {"conditional": True} if case.recipe is gan else {}
    run = Run(case.recipe, case.config(**told))
    rows = torch.cat([(run.held_out.y == y).nonzero()[:num, 0] for y, num in ((3, 18), (8, 2))])
    asked = []

    def keep(_: Any, args: tuple[Any, ...], named: dict[str, Any]) -> None:
        asked.append(named.get("class_labels", args[-1]))

    run.workload.networks[network].register_forward_pre_hook(keep, with_kwargs=True)
    run.workload.evaluate(Batch(run.held_out.x[rows], run.held_out.y[rows]), seed=0)
    counts = torch.bincount(asked[0], minlength=10)
    assert (int(counts[3]), int(counts[8]), len(asked[0])) == (54, 6, 60)


def test_what_is_left_open_is_filled_in_once(case: Case) -> None:
    once = case.config()
    once.data.batch = 0
    resolve_page(case.recipe, once)
    twice = copy.deepcopy(once)
    resolve_page(case.recipe, twice)
    assert once == twice
    assert set(once.inner) == set(case.recipe.NETWORKS) and once.data.batch > 0
    # Whole rounds for every usual H.
    assert all(once.steps % h == 0 for h in (1, 10, 20, 50, 100))
    with pytest.raises(ConfigError, match="unknown"):
        resolve_page(case.recipe, case.config(unknown=1))


# How sites compute -------------------------------------------------------------------------------


@pytest.fixture(params=["gan", "dit", "pix2pix", pytest.param("unet", marks=pytest.mark.slow)])
def computing(request: pytest.FixtureRequest) -> Case:
    return Case(*MODELS[request.param])


def with_site(case: Case, **site: Any) -> Config:
    config = case.config()
    config.site = dataclasses.replace(config.site, **site)
    return config


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_step_in_half_precision_is_a_little_off(computing: Case, precision: str) -> None:
    if computing.recipe is pix2pix:  # what is dropped would not be the same
        computing = computing._replace(model={**computing.model, "dropout": 0.0})
    full, half = (
        Run(computing.recipe, with_site(computing, precision=kind)).step(3)
        for kind in ("32-true", precision)
    )
    for name, loss in full.items():
        assert half[name].dtype == torch.float32 and float(half[name]) != float(loss)
        assert float(half[name]) == pytest.approx(float(loss), rel=0.1, abs=0.1)


def test_recomputed_blocks_change_no_bit(computing: Case) -> None:
    if computing.recipe is gan:
        pytest.skip("has none")
    runs = [Run(computing.recipe, with_site(computing, recompute=r)) for r in (False, True)]
    for run in runs:
        run.step(2)
    assert hash_state(runs[0].pieces()) == hash_state(runs[1].pieces())
