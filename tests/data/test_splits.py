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
@settings(max_examples=60, deadline=None)
def test_shards_are_disjoint_cover_everything_and_are_never_empty(
    split: str, num_sites: int, seed: int
) -> None:
    parts = split_indices(LABELS, split, num_sites, seed)
    assert len(parts) == num_sites
    assert all(len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(LABELS)))


@pytest.mark.parametrize("split", ["iid", "by_label", "dirichlet:0.5"])
def test_every_site_computes_the_same_split_and_another_seed_another_one(split: str) -> None:
    first, again, other = (split_indices(LABELS, split, 4, seed) for seed in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert any(not torch.equal(a, b) for a, b in zip(first, other, strict=True))


def test_iid_shards_differ_by_one_sample_at_most() -> None:
    sizes = [len(part) for part in split_indices(LABELS[:399], "iid", 4, 0)]
    assert sorted(sizes) == [99, 100, 100, 100]


def test_by_label_gives_each_label_to_one_site_and_labels_evenly() -> None:
    held = [set(LABELS[part].tolist()) for part in split_indices(LABELS, "by_label", 4, 0)]
    assert sorted(len(labels) for labels in held) == [2, 2, 3, 3]
    assert sum(len(labels) for labels in held) == len(set.union(*held)) == 10


def test_a_small_concentration_is_more_uneven_than_a_large_one() -> None:
    def largest_share(split: str) -> float:
        parts = split_indices(LABELS, split, 4, 0)
        counts = torch.stack([torch.bincount(LABELS[part], minlength=10) for part in parts])
        return float((counts.max(dim=0).values / counts.sum(dim=0)).mean())

    assert largest_share("dirichlet:0.1") > 0.7 > 0.4 > largest_share("dirichlet:1000")


def test_more_sites_than_samples_is_refused() -> None:
    with pytest.raises(ConfigError, match="sites is 5, but there are only 4 samples"):
        split_indices(LABELS[:4], "iid", 5, 0)


def test_a_dirichlet_that_leaves_a_site_without_data_is_refused() -> None:
    with pytest.raises(ConfigError, match="'dirichlet:0.001' and sites is 8, .* a larger A"):
        split_indices(torch.zeros(100, dtype=torch.int64), "dirichlet:0.001", 8, 0)


@pytest.mark.parametrize(
    "text", ["", "IID", "dirichlet", "dirichlet:", "dirichlet:x", "dirichlet:0", "dirichlet:-1"]
    + ["dirichlet:nan", "dirichlet:inf", "by_label:2"]
)  # fmt: skip
def test_what_is_no_split_is_refused_with_the_valid_forms(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_split(text)
    assert repr(text) in str(caught.value)
    assert "iid, by_label, or dirichlet:A with A > 0" in str(caught.value)
    assert "\n" not in str(caught.value)
