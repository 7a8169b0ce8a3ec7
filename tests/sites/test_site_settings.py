"""How sites compute: every recipe follows `site.*`, and runs with it end as others do."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch

from fedwan.config import Config, DataConfig, SiteConfig
from fedwan.errors import ConfigError
from fedwan.workloads.settings import resolve_page
from sites import flow, gan, pix2pix
from tests.sites.support import Run, equal, weights

SMALL: dict[ModuleType, tuple[str, dict[str, Any]]] = {
    gan: ("digits", {"width": 8}),
    flow: ("digits", {"width": 16, "depth": 2, "network": "dit"}),
    pix2pix: ("photo_edges", {"width": 4, "depth": 3, "dropout": 0.0}),
}
RECIPES = pytest.mark.parametrize("recipe", list(SMALL), ids=["gan", "flow", "pix2pix"])


def config(recipe: ModuleType, site: SiteConfig, **more: Any) -> Config:
    name, model = SMALL[recipe]
    return Config(sites=2, data=DataConfig(name, batch=8), model=dict(model), site=site, **more)


@RECIPES
@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
def test_a_step_in_half_precision_is_a_little_off_and_weights_stay_in_full(
    recipe: ModuleType, precision: str
) -> None:
    full, half = (Run(recipe, config(recipe, SiteConfig(p))) for p in ("32-true", precision))
    losses, rough = full.step(3), half.step(3)
    for name, loss in losses.items():
        assert rough[name].dtype == torch.float32
        assert float(rough[name]) == pytest.approx(float(loss), rel=0.1, abs=0.1)
        assert float(rough[name]) != float(loss)
    assert all(weight.dtype == torch.float32 for weight in weights(half))


@RECIPES
def test_a_step_in_parts_draws_and_learns_like_several(recipe: ModuleType) -> None:
    run = Run(recipe, config(recipe, SiteConfig(accumulate=4)))
    before = weights(run)
    losses = run.step(5)
    assert all(torch.isfinite(loss) for loss in losses.values())
    assert not any(torch.equal(a, b) for a, b in zip(before, weights(run), strict=True))


@pytest.mark.parametrize("recipe", [flow, pix2pix], ids=["flow", "pix2pix"])
def test_recomputed_blocks_change_no_bit(recipe: ModuleType) -> None:
    plain, again = (Run(recipe, config(recipe, SiteConfig(recompute=r))) for r in (False, True))
    for run in (plain, again):
        run.step(2)
    assert equal(weights(again), weights(plain))
    for a, b in zip(
        plain.workload.networks.values(), again.workload.networks.values(), strict=True
    ):
        assert all(torch.equal(x, y) for x, y in zip(a.buffers(), b.buffers(), strict=True))


@RECIPES
def test_parts_that_would_differ_in_size_are_refused(recipe: ModuleType) -> None:
    with pytest.raises(ConfigError, match="site.accumulate=3 does not divide .*data.batch=9"):
        resolve_page(recipe, config(recipe, SiteConfig(accumulate=3)))


def test_the_critics_own_steps_are_in_parts_too() -> None:
    asked = config(gan, SiteConfig(accumulate=4))
    asked.data.batch = 12
    asked.model["n_critic"] = 2
    with pytest.raises(ConfigError, match="does not divide the 6 samples of a step.*batch=16"):
        resolve_page(gan, asked)
