"""Random features."""

from __future__ import annotations

import torch

from fedwan.metrics import random_features
from fedwan.metrics.random_features import NUM_FEATURES, see_images


def test_images_of_any_size_have_as_many_features() -> None:
    for size in (16, 32, 50):
        assert see_images(torch.rand(3, 3, size, size)).shape == (3, NUM_FEATURES)


def test_one_image_does_not_depend_on_the_others() -> None:
    images = torch.rand(70, 3, 16, 16)
    torch.testing.assert_close(see_images(images)[65:66], see_images(images[65:66]))


def test_the_network_is_always_the_same_and_leaves_the_global_generator_alone() -> None:
    images = torch.rand(2, 3, 16, 16)
    seen = see_images(images)
    random_features._layers.cache_clear()
    before = torch.random.get_rng_state()
    assert torch.equal(see_images(images), seen)
    assert torch.equal(torch.random.get_rng_state(), before)


def test_no_feature_is_dead() -> None:
    assert (see_images(torch.rand(50, 3, 32, 32) * 2 - 1).std(dim=0) > 0).all()
