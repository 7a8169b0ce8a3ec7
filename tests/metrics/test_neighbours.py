"""Nearest neighbours."""

from __future__ import annotations

import pytest
import torch

from fedwan.metrics.neighbours import find_neighbours


def test_distances_are_to_the_nearest_others_in_order() -> None:
    found = find_neighbours(torch.tensor([[0.0], [1.0], [4.0], [6.0]]), k=2)
    assert found.distances.tolist() == [[1, 4], [1, 3], [2, 3], [2, 5]]
    assert found.radii(1).tolist() == [1, 1, 2, 2]
    assert found.radii(2).tolist() == [4, 3, 3, 5]


def test_a_twin_is_a_neighbour_at_no_distance_but_a_point_is_none_of_itself() -> None:
    found = find_neighbours(torch.tensor([[5.0, 5.0], [5.0, 5.0], [8.0, 9.0]]), k=2)
    assert found.radii(1).tolist() == pytest.approx([0, 0, 5], abs=1e-6)
    assert found.radii(2).tolist() == pytest.approx([5, 5, 5])
