"""The largest magnitudes of each row."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs.selection import largest


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(1, 4096), (3, 4096), (2, 2048), (2, 8192), (5, 100), (1, 1)]),
    num_different=st.sampled_from([1, 2, 70, 10**6]),
)
def test_it_finds_what_topk_finds(seed: int, shape: tuple[int, int], num_different: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(num_different, shape, generator=generator).float()
    k = -(-shape[1] // 64)
    values, indices = largest(rows, k)
    assert torch.equal(values, rows.topk(k, 1).values)
    assert torch.equal(rows.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())


@pytest.mark.parametrize("at", [0, 255, 256, 4095])
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_comes_first(at: int, value: float) -> None:
    rows = torch.ones(2, 4096)
    rows[1, at] = value
    _, indices = largest(rows, 64)
    assert indices[1, 0] == at


def test_rows_do_not_depend_on_each_other() -> None:
    rows = torch.randint(9, (40, 4096), generator=torch.Generator().manual_seed(0)).float()
    _, together = largest(rows, 64)
    assert all(torch.equal(largest(row[None], 64)[1][0], together[i]) for i, row in enumerate(rows))
