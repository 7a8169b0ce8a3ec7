"""Plain outer SGD."""

from __future__ import annotations

import torch

from fedwan.outer import sgd


def test_lr_1_is_averaging() -> None:
    base = torch.tensor([1.0, -2.0, 0.5])
    sites = [torch.tensor([2.0, 0.0, 0.5]), torch.tensor([0.0, -1.0, 1.5])]
    delta = sum(base - site for site in sites) / 2
    update, _ = sgd(1.0).update({"w": delta}, {})
    assert torch.equal(base + update["w"], (sites[0] + sites[1]) / 2)


def test_lr_scales_the_update() -> None:
    update, _ = sgd(0.25).update({"w": torch.tensor([4.0])}, {})
    assert update["w"].tolist() == [-1.0]
