"""How samples are seen."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.metrics.classifier import NUM_FEATURES, load_classifier
from fedwan.metrics.features import Features, see, see_through


def test_points_are_their_own_features_and_their_modes_are_counted() -> None:
    for name, modes in (("ring8", 8), ("grid25", 25)):
        source = find_source(name)
        _, held_out = source.load()
        seen = see(source, held_out.x)
        assert torch.equal(seen.features, held_out.x)
        assert seen.figures["modes"] == modes
        assert seen.figures["histogram"] == pytest.approx([1 / modes] * modes)


def test_a_stack_is_seen_channel_by_channel() -> None:
    source, digits = find_source("stacked_digits"), load_classifier("digits")
    x = source.load()[1].x[:50]
    seen = see(source, x)
    assert seen.features.shape == (50, 3 * NUM_FEATURES)
    middle = seen.features[:, NUM_FEATURES : 2 * NUM_FEATURES]
    torch.testing.assert_close(middle, digits.features(x[:, 1:2]))
    assert set(seen.figures) == {"modes", "mode_kl", "good"}


def test_images_of_another_size_ask_for_a_network() -> None:
    large = dataclasses.replace(find_source("digits"), name="large", shape=(3, 32, 32))
    with pytest.raises(ValueError, match=r"large are \(3, 32, 32\).* pass a network of your own"):
        see(large, torch.zeros(4, 3, 32, 32))


def test_a_network_of_ones_own_sees_all_samples_a_few_at_a_time_without_gradients() -> None:
    network = torch.nn.Linear(3, 5)
    sizes: list[int] = []

    def features(x: Tensor, /) -> Tensor:
        sizes.append(len(x))
        out: Tensor = network(x)
        return out

    x = torch.randn(600, 3, generator=torch.Generator().manual_seed(0))
    seen = see_through(features, x)
    torch.testing.assert_close(seen.features, network(x).detach())
    assert not seen.features.requires_grad
    assert max(sizes) <= 256
    assert seen.figures == {}


def test_the_built_in_classifier_and_any_module_are_such_networks() -> None:
    networks: list[Features] = [load_classifier("digits").features, torch.nn.Flatten()]
    for network in networks:
        assert see_through(network, torch.zeros(7, 1, 8, 8)).features.shape[0] == 7


def test_features_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match=r"of shape \(7, 1, 8, 8\); return \(7, features\)"):
        see_through(lambda x: x, torch.zeros(7, 1, 8, 8))


def test_a_stack_of_one_digit_three_times_has_ten_modes() -> None:
    digits, _ = find_source("digits").load()
    found = see(find_source("stacked_digits"), digits.x[:600].repeat(1, 3, 1, 1)).figures
    assert found["modes"] == 10
    assert found["mode_kl"] == pytest.approx(math.log(100), abs=0.02)
    assert found["good"] > 0.9
