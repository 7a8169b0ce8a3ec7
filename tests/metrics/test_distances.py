"""Frechet's distance of samples, and moments that sites hand in."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.linalg import sqrtm
from torch import Tensor

from fedwan.errors import FedwanError, PayloadError
from fedwan.metrics import measure_quality, num_generated
from fedwan.metrics.distances import (
    Moments,
    compare,
    distance_from,
    frechet_between,
    merge_comparisons,
    merge_moments,
    moments,
    pack_comparisons,
    unpack_comparisons,
)
from fedwan.state import State
from fedwan.workloads.base import Batch


def test_it_agrees_with_the_matrix_root_for_covariances_that_do_not_commute() -> None:
    generator = torch.Generator().manual_seed(0)
    samples = torch.randn(2, 50, 8, generator=generator, dtype=torch.float64)
    mix = torch.randn(8, 8, generator=generator, dtype=torch.float64)
    a, b = moments(samples[0]), moments(samples[1] @ mix)
    root = torch.from_numpy(sqrtm((a.covariance @ b.covariance).numpy()).real)
    expected = (a.mean - b.mean).square().sum() + (a.covariance + b.covariance - 2 * root).trace()
    assert distance_from(a)(b) == pytest.approx(float(expected), rel=1e-9)
    with pytest.raises(FedwanError, match="not finite"):
        frechet_between(samples[0] * float("nan"), samples[1])


@given(
    sizes=st.lists(st.integers(1, 40), min_size=1, max_size=9).filter(lambda s: sum(s) > 1),
    offset=st.sampled_from([0.0, 1.0, 1e3, 1e6]),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=100, deadline=None)
def test_merged_moments_are_those_of_all_samples_in_one_place(
    sizes: list[int], offset: float, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    shards = [torch.randn(n, 3, generator=generator, dtype=torch.float64) for n in sizes]
    shards = [x * (1 + i) + 5 * i + offset for i, x in enumerate(shards)]
    merged = merge_moments([moments(x) for x in shards])
    whole = moments(torch.cat(shards))
    rounding = 1e-14 * (1 + offset)
    torch.testing.assert_close(merged.mean, whole.mean, rtol=1e-13, atol=rounding)
    torch.testing.assert_close(merged.covariance, whole.covariance, rtol=1e-12, atol=40 * rounding)


def test_shards_of_too_few_samples_or_of_different_networks_are_refused() -> None:
    for counts in ([1], [0, 5], []):
        with pytest.raises(ValueError, match="take two samples or more"):
            merge_moments([Moments(count, torch.zeros(2), torch.eye(2)) for count in counts])
    with pytest.raises(ValueError, match="one network at every site"):
        merge_moments([moments(torch.zeros(5, features)) for features in (2, 3)])


def features(num: int, seed: int, offset: float = 0.0) -> Tensor:
    x = torch.randn(num, 5, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return x * torch.tensor([0.1, 1.0, 2.0, 30.0, 0.0]) + offset


SITES = [
    [(features(n, 10 * n + d, n), features(2 * n, d, 1.0), features(n, 7 * n, n)) for d in range(2)]
    for n in (20, 35, 11)
]


def test_merged_they_are_those_of_all_data_in_one_place() -> None:
    parts = [[compare(*draw) for draw in site] for site in SITES]
    together = [
        compare(*(torch.cat([site[d][part] for site in SITES]) for part in range(3)))
        for d in range(2)
    ]
    merged, expected = merge_comparisons(parts), merge_comparisons([together])
    assert merged == pytest.approx(expected, rel=1e-9)
    assert merged["fd"] > 0 < merged["fd_floor"]


def test_those_of_one_site_are_the_figures_that_it_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(25, 3, 12, 12, generator=generator) * 2 - 1
    made = torch.rand(num_generated("folder", 25), 3, 12, 12, generator=generator) - 1
    figures = measure_quality("folder", Batch(real, torch.zeros(25, dtype=torch.int64)), made)
    merged = merge_comparisons([unpack_comparisons(figures.pop("moments"))])
    assert merged["fd"] == pytest.approx(figures["fd"], rel=1e-4)
    assert merged["fd_floor"] == pytest.approx(figures["fd_floor"], rel=1e-4)
    assert figures["fd"] > 2 * figures["fd_floor"]


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("means"), "lack 'means'"),
        (lambda t: t.update(means=t["means"][:1]), "of shapes"),
        (lambda t: t["means"].fill_(float("nan")), "not finite"),
        (lambda t: t["counts"].fill_(0), "count no samples"),
        (lambda t: t.update(counts=t["counts"][:0]), "holds 0 moments"),
        (lambda t: t.update(means=torch.tensor(1.0)), "of 0 features"),
        (lambda t: t.update(counts=torch.tensor(1)), "holds 0 moments"),
    ],
)
def test_they_travel_as_tensors_and_what_no_site_would_send_is_refused(
    change: Callable[[State], object], says: str
) -> None:
    parts = [compare(*draw) for draw in SITES[0]]
    tensors = pack_comparisons(parts)
    assert merge_comparisons([unpack_comparisons(tensors)]) == merge_comparisons([parts])
    change(tensors)
    with pytest.raises(PayloadError, match=says):
        unpack_comparisons(tensors)
