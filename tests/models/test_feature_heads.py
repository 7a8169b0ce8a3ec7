"""Heads on a frozen network's features."""

from __future__ import annotations

import pytest
import torch

from fedwan.models.dit import DiffusionTransformer
from fedwan.models.feature_heads import FeatureHeads
from fedwan.models.velocity import VelocityNetwork


def test_each_block_has_a_head_and_each_token_a_logit() -> None:
    heads = FeatureHeads(width=6, blocks=3, hidden=4)
    assert heads([torch.randn(5, 6)] * 3).shape == (5, 3)
    assert heads([torch.randn(5, 7, 6)] * 3).shape == (5, 3, 7)
    with pytest.raises(ValueError):
        heads([torch.randn(5, 6)] * 2)


def test_the_scale_of_a_feature_does_not_matter() -> None:
    heads, features = FeatureHeads(6, 1, 4), torch.randn(5, 6)
    torch.testing.assert_close(heads([features]), heads([100 * features]), rtol=1e-3, atol=1e-4)


def test_velocity_networks_tell_what_each_block_makes_of_a_sample() -> None:
    x, sigma, labels = torch.randn(2, 1, 8, 8), torch.tensor([0.0, 0.7]), torch.tensor([3, 10])
    perceptron = VelocityNetwork((1, 8, 8), 16, 3)
    assert [f.shape for f in perceptron.features(x, sigma)] == [(2, 16)] * 3
    transformer = DiffusionTransformer((1, 8, 8), 10, 4, 16, 2, 2)
    assert [f.shape for f in transformer.features(x, sigma, labels)] == [(2, 4, 16)] * 2
