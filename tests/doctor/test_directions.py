"""Cosines, agreement and who looks back, on vectors whose answers are known."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.doctor.directions import Directions, agreement_of, cosine_of


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_agreement_is_one_for_the_same_and_one_over_sites_for_the_orthogonal() -> None:
    assert agreement_of([vector(1, 2)] * 3) == pytest.approx(1.0)
    assert agreement_of(list(torch.eye(4))) == pytest.approx(1 / 4)
    assert agreement_of([vector(1, 0), vector(-1, 0)]) == pytest.approx(0.0)
    assert agreement_of([vector(0, 0)] * 2) == 0.0


def test_a_zero_has_no_direction() -> None:
    assert cosine_of(vector(0, 0), vector(1, 0)) == 0.0


def test_each_site_is_compared_with_the_mean_of_the_others() -> None:
    found = Directions().compare(
        {"s1": {"g": vector(1, 0)}, "s2": {"g": vector(1, 0)}, "s3": {"g": vector(-1, 1)}},
        {"g": vector(0, 0)},
    )
    assert found["s1"].cosines["g"] == pytest.approx(0.0)
    assert found["s3"].cosines["g"] == pytest.approx(-(0.5**0.5))
    assert found["s1"].agreement == found["s3"].agreement
    assert found["s1"].backward == {}


def test_one_site_alone_is_compared_with_nobody() -> None:
    found = Directions().compare({"s1": {"g": vector(1, 0)}}, {"g": vector(0, 0)})
    assert found["s1"] == ({}, {}, {})


def test_where_sites_come_one_by_one_the_others_latest_count() -> None:
    directions = Directions()
    directions.compare({"s1": {"g": vector(1, 0)}}, {"g": vector(0, 0)})
    found = directions.compare({"s2": {"g": vector(-2, 0)}}, {"g": vector(0, 0)})
    assert found["s2"].cosines == {"g": pytest.approx(-1.0)}
    assert found["s2"].agreement == {"g": pytest.approx(0.1)}


def test_who_trains_from_old_weights_asks_to_undo_the_moves_since() -> None:
    """Global weights 0, 1, 2, 3 along a line; deltas are global minus local."""
    directions = Directions()
    for position in range(4):
        present = vector(position, 0)
        fresh = present - (present + vector(1, 0.1))
        old = present - (vector(max(0, position - 2), 0) + vector(1, 0.1))
        samples = {"fresh": {"g": fresh}, "old": {"g": old}}
        found = directions.compare(samples, {"g": present})
    assert found["fresh"].backward["g"] < -0.9 and found["old"].backward["g"] > 0.9
