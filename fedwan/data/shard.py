"""A site's shard: its own part of the training data, which never leaves it, and held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import torch

from fedwan.config import DataConfig
from fedwan.data.sources import PAIRS, source_of
from fedwan.data.splits import parse_split, split_indices
from fedwan.data.stream import BatchStream
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["Shard", "check_data", "open_shard"]


@dataclass(frozen=True)
class Shard:
    """What one site holds."""

    train: Batch
    """This site's training samples and labels, on the CPU."""
    held_out: Batch
    """Real data that no site trains on; the same at every site and for every seed."""
    num_classes: int
    """Labels are 0 … num_classes - 1, here or at other sites."""
    public: bool
    """Held-out samples may be shown beside generated ones, in pictures that leave the site."""

    def batches(
        self, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> BatchStream:
        """An endless reshuffled stream of this shard; see `BatchStream`."""
        return BatchStream(self.train, batch_size, generator, device)


def check_data(config: DataConfig, num_sites: int) -> None:
    """Refuse, without reading any data, settings that cannot work.

    Raises:
        ConfigError: unknown name or split, a folder unasked or missing, negative batch, more sites
            than labels, or a split that one site alone makes meaningless.
    """
    source = source_of(config)
    _check_folder(config)
    split = parse_split(config.split)
    if config.batch < 0:
        raise ConfigError(
            f"data.batch is {config.batch}; take 1 or more, or 0 for the recipe's own"
        )
    if split.kind == "by_label" and num_sites > source.num_classes:
        raise ConfigError(
            f"data.split is 'by_label' and sites is {num_sites}, but {config.name} has only "
            f"{source.num_classes} labels; take at most {source.num_classes} sites, or dirichlet:A"
        )
    if split.kind != "iid" and num_sites == 1:
        raise ConfigError(
            f"data.split is {config.split!r}, which has no effect with one site; take iid"
        )


def _check_folder(config: DataConfig) -> None:
    if config.name != PAIRS:
        for key in ("path", "size", "direction"):
            value = getattr(config, key)
            if value:
                raise ConfigError(
                    f"data.{key} = {value!r} has no effect on {config.name}; "
                    f"leave it out, or set data.name={PAIRS}"
                )
        return
    if not Path(config.path).is_absolute():
        raise ConfigError(
            f"data.path is {config.path!r}; name the folder of images from the root, as in "
            "/data/facades: sites run in folders of their own"
        )


def open_shard(config: DataConfig, site_index: int, num_sites: int, seed: int) -> Shard:
    """Open one site's shard.

    Args:
        config: data set and split.
        site_index: which site, 0 … num_sites - 1.
        num_sites: number of sites of the run.
        seed: the run's seed; it deals the training data, and does not touch the held-out data.

    Raises:
        ConfigError: see `check_data`, or some site would be left without data.
    """
    assert 0 <= site_index < num_sites
    check_data(config, num_sites)
    source = source_of(config)
    train, held_out = source.load()
    mine = split_indices(train.y, config.split, num_sites, seed)[site_index]
    return Shard(
        train=Batch(train.x[mine], train.y[mine]),
        held_out=held_out,
        num_classes=source.num_classes,
        public=source.public,
    )
