"""The GAN recipe on data that show dropped modes."""

from __future__ import annotations

import pytest
import torch

from fedwan.config import Config, DataConfig
from fedwan.metrics import NUM_DRAWS
from fedwan.workloads.base import Batch
from sites import gan
from tests.sites.support import Run


@pytest.mark.parametrize(("name", "shape"), [("grid25", (2,)), ("stacked_digits", (3, 8, 8))])
def test_it_trains_on_labels_of_its_own_and_its_modes_are_counted(
    name: str, shape: tuple[int, ...]
) -> None:
    run = Run(gan, Config(sites=4, data=DataConfig(name, split="by_label", batch=8)), site=1)
    losses = run.step(3)
    assert all(torch.isfinite(loss) for loss in losses.values())
    few = Batch(run.held_out.x[:200], run.held_out.y[:200])
    assert run.workload.sample(5, seed=0).shape == (5, *shape)
    quality = run.workload.evaluate(few, seed=0)
    assert 0 <= quality["modes"] < quality["modes_floor"] <= min(NUM_DRAWS * 200, 1000)
