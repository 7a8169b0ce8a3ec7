"""Splits of the training data."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.data.splits import parse_split, split_indices
from fedwan.errors import ConfigError

LABELS = torch.arange(400) % 10


@given(
    split=st.sampled_from(["iid", "by_label", "dirichlet:0.5", "dirichlet:100"]),
    num_sites=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_shards_are_disjoint_cover_everything_and_are_never_empty(
    split: str, num_sites: int, seed: int
) -> None:
    parts = split_indices(LABELS, split, num_sites, seed)
    assert len(parts) == num_sites
    assert all(len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(LABELS)))
    again = split_indices(LABELS, split, num_sites, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    if split == "iid":
        assert len({len(part) for part in parts}) <= 2
    if split == "by_label":
        held = [set(LABELS[part].tolist()) for part in parts]
        assert sum(len(labels) for labels in held) == 10
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_another_seed_gives_another_split_and_a_small_concentration_an_uneven_one() -> None:
    for split in ("iid", "by_label", "dirichlet:0.5"):
        first, other = (split_indices(LABELS, split, 4, seed) for seed in (3, 4))
        assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))

    def largest_share(split: str) -> float:
        parts = split_indices(LABELS, split, 4, 0)
        counts = torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts])
        return float((counts.max(dim=0).values / counts.sum(dim=0)).mean())

    assert largest_share("dirichlet:0.1") > 0.7 > 0.4 > largest_share("dirichlet:1000")


def test_splits_that_leave_a_site_without_data_are_refused() -> None:
    with pytest.raises(ConfigError, match="sites is 5, but there are only 4 samples"):
        split_indices(LABELS[:4], "iid", 5, 0)
    with pytest.raises(ConfigError, match="'dirichlet:0.001' and sites is 8, .* a larger A"):
        split_indices(torch.zeros(100, dtype=torch.int64), "dirichlet:0.001", 8, 0)


@pytest.mark.parametrize("number", ["", ":", ":x", ":0", ":-1", ":nan", ":inf"])
def test_what_is_no_split_is_refused_with_the_valid_forms(number: str) -> None:
    for kind in ("dirichlet", "IID"):
        with pytest.raises(ConfigError, match=f"'{kind}{number}'; valid: iid, by_label, or diri"):
            parse_split(kind + number)
