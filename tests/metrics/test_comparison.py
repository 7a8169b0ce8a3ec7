"""Distances of several sites' data, from moments alone."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.errors import PayloadError
from fedwan.metrics.comparison import (
    Comparison,
    compare,
    merge_comparisons,
    pack_comparisons,
    unpack_comparisons,
)
from fedwan.metrics.quality import NUM_DRAWS, measure_quality
from fedwan.workloads.base import Batch


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


def test_sites_that_each_lack_what_the_others_have_are_well_served_by_all_of_it() -> None:
    """Which the mean of the sites' own distances would not tell."""
    low, high = features(400, 1, -10.0), features(400, 2, 10.0)
    made = torch.cat([features(200, 3, -10.0), features(200, 4, 10.0)])
    sites = [[compare(x[:200], made, x[200:])] for x in (low, high)]
    alone = [merge_comparisons([site])["fd"] for site in sites]
    assert merge_comparisons(sites)["fd"] < 0.01 * min(alone)


def test_those_of_one_site_are_the_figures_that_it_measured() -> None:
    generator = torch.Generator().manual_seed(0)
    real = torch.rand(25, 3, 12, 12, generator=generator) * 2 - 1
    made = torch.rand(NUM_DRAWS * 25, 3, 12, 12, generator=generator) - 1
    figures = measure_quality("folder", Batch(real, torch.zeros(25, dtype=torch.int64)), made)
    merged = merge_comparisons([unpack_comparisons(figures.pop("moments"))])
    assert merged["fd"] == pytest.approx(figures["fd"], rel=1e-4)
    assert merged["fd_floor"] == pytest.approx(figures["fd_floor"], rel=1e-4)
    assert figures["fd"] > 2 * figures["fd_floor"]


def test_they_travel_as_tensors() -> None:
    parts = [compare(*draw) for draw in SITES[0]]
    again = unpack_comparisons(pack_comparisons(parts))
    assert merge_comparisons([again]) == merge_comparisons([parts])
    assert isinstance(again[0], Comparison)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (lambda t: t.pop("means"), "lack 'means'"),
        (lambda t: t.update(means=t["means"][:1]), "of shapes"),
        (lambda t: t.update(covariances=t["covariances"][..., :2]), "of shapes"),
        (lambda t: t["means"].fill_(float("nan")), "not finite"),
        (lambda t: t["counts"].fill_(0), "count no samples"),
        (lambda t: t.update(counts=t["counts"][:0]), "holds 0 moments"),
        (lambda t: t.update(means=torch.tensor(1.0)), "of 0 features"),
    ],
)
def test_what_no_site_would_send_is_refused(change: object, says: str) -> None:
    tensors = pack_comparisons([compare(*draw) for draw in SITES[0]])
    change(tensors)  # type: ignore[operator]
    with pytest.raises(PayloadError, match=says):
        unpack_comparisons(tensors)
