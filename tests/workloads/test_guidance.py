"""Labels that are dropped, labels to sample, and guidance by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.workloads.flow import balanced_labels, drop_labels, guide

NULL = 10


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def test_about_the_asked_share_of_labels_is_dropped_and_the_rest_stays() -> None:
    labels = torch.arange(20_000) % NULL
    before = labels.clone()
    dropped = drop_labels(labels, 0.1, NULL, generator())
    assert torch.equal(labels, before)
    assert dropped.dtype == torch.int64
    gone = dropped == NULL
    assert float(gone.double().mean()) == pytest.approx(0.1, abs=0.01)
    assert torch.equal(dropped[~gone], labels[~gone])


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_none_or_all_labels_can_be_dropped(share: float) -> None:
    labels = torch.arange(NULL)
    dropped = drop_labels(labels, share, NULL, generator())
    assert torch.equal(dropped, torch.full_like(labels, NULL) if share else labels)


@pytest.mark.parametrize("num", [0, 1, 7, 10, 25, 1200])
def test_labels_to_sample_are_balanced_from_the_start(num: int) -> None:
    labels = balanced_labels(num, 10, generator())
    assert labels.shape == (num,) and labels.dtype == torch.int64
    for end in range(10, num + 1, 10):
        assert torch.equal(torch.bincount(labels[:end]), torch.full((10,), end // 10))
    counts = torch.bincount(labels, minlength=10)
    assert int(counts.max() - counts.min()) <= 1


def test_labels_to_sample_depend_on_the_seed_alone() -> None:
    first, again, other = (balanced_labels(30, 10, generator(seed)) for seed in (1, 1, 2))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


class Velocity:
    """Its value tells all that it was asked: (x + sigma) * (label + 1)."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, x: Tensor, sigma: Tensor, labels: Tensor) -> Tensor:
        self.sizes.append(len(x))
        return (x + sigma[:, None]) * (labels[:, None] + 1)


X, SIGMA, LABELS = torch.randn(4, 2, generator=generator()), torch.rand(4), torch.arange(4)


def test_guidance_of_one_is_the_labels_own_velocity_at_no_cost() -> None:
    velocity = Velocity()
    guided = guide(velocity, LABELS, NULL, 1.0)(X, SIGMA)
    assert velocity.sizes == [4]
    assert torch.equal(guided, velocity(X, SIGMA, LABELS))


@pytest.mark.parametrize("guidance", [0.0, 0.5, 2.0, 7.5])
def test_guidance_goes_from_the_null_class_to_the_label_and_beyond(guidance: float) -> None:
    velocity = Velocity()
    with_label = velocity(X, SIGMA, LABELS)
    without = velocity(X, SIGMA, torch.full_like(LABELS, NULL))
    guided = guide(velocity, LABELS, NULL, guidance)(X, SIGMA)
    torch.testing.assert_close(guided, without + guidance * (with_label - without))
