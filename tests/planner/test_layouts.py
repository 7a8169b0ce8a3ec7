"""A model of which only the size is known."""

from __future__ import annotations

import pytest

from fedwan.fragments import most_fragments, strided
from fedwan.planner.question import synthetic_layout


@pytest.mark.parametrize("count", [1, 2, 3, 79, 80, 1000, 57_182_660, 7_000_000_000])
def test_it_has_exactly_as_many_values_as_asked_for(count: int) -> None:
    assert sum(spec.num_values for spec in synthetic_layout(count).values()) == count


def test_a_large_model_can_be_cut_into_fragments_of_about_equal_weight() -> None:
    layout = synthetic_layout(57_182_660)
    assert most_fragments(layout) == 40
    sizes = [fragment.num_bytes for fragment in strided(10, 20)(layout)]
    assert max(sizes) < 1.05 * min(sizes)
