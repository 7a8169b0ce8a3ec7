"""The grid of twenty-five Gaussians."""

from __future__ import annotations

import pytest
import torch

from fedwan.data.grid25 import SIGMA, grid25_centres, load_grid25


def test_centres_are_all_whole_numbers_from_minus_two_to_two() -> None:
    pairs = {tuple(centre) for centre in grid25_centres().tolist()}
    assert pairs == {(float(x), float(y)) for x in range(-2, 3) for y in range(-2, 3)}


def test_points_scatter_about_the_centre_of_their_label_as_many_of_each() -> None:
    for part, per_mode in zip(load_grid25(), (400, 20), strict=True):
        offsets = part.x - grid25_centres()[part.y]
        assert float(offsets.std()) == pytest.approx(SIGMA, rel=0.05)
        assert torch.bincount(part.y).tolist() == [per_mode] * 25


def test_every_process_sees_the_same_points_and_none_is_in_both_parts() -> None:
    (train, held_out), (again, _) = load_grid25(), load_grid25()
    assert torch.equal(train.x, again.x)
    assert train.x[0].tolist() == pytest.approx([-2.0067, -1.9834], abs=1e-4)
    assert not {tuple(p) for p in train.x.tolist()} & {tuple(p) for p in held_out.x.tolist()}
