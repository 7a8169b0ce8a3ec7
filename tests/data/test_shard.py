"""Shards."""

from __future__ import annotations

import pytest
import torch

from fedwan.config import DataConfig
from fedwan.data import check_data, open_shard
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch


def rows(batch: Batch) -> set[bytes]:
    return {row.numpy().tobytes() for row in batch.x}


@pytest.mark.parametrize("name", ["digits", "ring8", "grid25", "stacked_digits"])
def test_the_held_out_data_are_the_same_everywhere_and_nobody_trains_on_them(name: str) -> None:
    shards = [open_shard(DataConfig(name), site, 3, seed) for seed in (0, 1) for site in range(3)]
    for shard in shards:
        assert torch.equal(shard.held_out.x, shards[0].held_out.x)
        assert torch.equal(shard.held_out.y, shards[0].held_out.y)
    # Two identical scans exist in no pair of the two parts; points repeat with probability zero.
    assert not rows(shards[0].held_out) & set.union(
        *(rows(shard.train.batch) for shard in shards[:3])
    )


@pytest.mark.parametrize(
    ("name", "total"),
    [("digits", 1397), ("ring8", 8000), ("grid25", 10_000), ("stacked_digits", 20_000)],
)
def test_sites_share_out_all_training_data(name: str, total: int) -> None:
    config = DataConfig(name, split="dirichlet:0.5")
    shards = [open_shard(config, site, 4, seed=5) for site in range(4)]
    assert sum(len(shard.train) for shard in shards) == total


def test_a_shard_streams_its_own_data_only() -> None:
    shard = open_shard(DataConfig(split="by_label"), 2, 4, seed=0)
    batch = next(shard.loader(64, torch.Generator().manual_seed(0)))
    assert batch.x.shape == (64, 1, 8, 8)
    assert set(batch.y.tolist()) <= set(shard.train.batch.y.tolist())
    assert len(set(shard.train.batch.y.tolist())) in (2, 3)


def test_networks_may_be_told_the_site_instead_of_the_class() -> None:
    shard = open_shard(DataConfig(split="by_label", labels="site"), 2, 4, seed=0)
    plain = open_shard(DataConfig(split="by_label"), 2, 4, seed=0)
    batches = [next(s.loader(64, torch.Generator().manual_seed(0))) for s in (shard, plain)]
    assert torch.equal(batches[0].x, batches[1].x)
    assert batches[0].y.tolist() == [2] * 64
    # The doctor compares samples of the same classes, and then tells the network the site.
    assert torch.equal(shard.some(50).y, plain.some(50).y)
    assert torch.equal(shard.held_out.y, plain.held_out.y)
    assert set(shard.tell(shard.held_out).y.tolist()) == {2}
    assert plain.tell(plain.held_out) is plain.held_out


def test_bundled_data_are_public_and_know_their_classes() -> None:
    shard = open_shard(DataConfig("ring8"), 0, 1, 0)
    assert shard.public
    assert shard.num_classes == 8


@pytest.mark.parametrize(
    ("config", "sites", "text"),
    [
        (DataConfig("digit"), 1, "data.name is 'digit', .*; did you mean 'digits'"),
        (DataConfig(split="label"), 2, "data.split is 'label'; valid: iid"),
        (DataConfig(labels="sites"), 2, "data.labels is 'sites'; did you mean 'site'.*class, site"),
        (DataConfig(labels="site"), 1, "tells the same of every sample at one site"),
        (DataConfig(batch=-1), 2, "data.batch is -1; take 1 or more"),
        (DataConfig(split="by_label"), 11, "sites is 11, but digits has only 10 labels"),
        (DataConfig(split="dirichlet:1"), 1, "no effect with one site"),
    ],
)
def test_what_cannot_work_is_refused_without_reading_data(
    config: DataConfig, sites: int, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_data(config, sites)
    assert "\n" not in str(caught.value)
