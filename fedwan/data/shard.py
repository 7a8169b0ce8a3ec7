"""A site's shard: its own part of the training data, which never leaves it, and held-out data."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedwan.config import Config, DataConfig
from fedwan.data.checks import check_data, too_large
from fedwan.data.files import open_files
from fedwan.data.loader import Fetch, InMemory, Loader, copied, is_stream, tell
from fedwan.data.sources import FILE_NAMES, find_source, source_of
from fedwan.data.splits import split_indices
from fedwan.errors import ConfigError
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

__all__ = ["Shard", "dataset_of", "held_out_of", "open_shard"]

_MOST_HELD_OUT = 512


@dataclass(frozen=True)
class Shard:
    """What one site holds."""

    train: Any
    """A torch `Dataset` that the site trains on, by number or (`IterableDataset`) as a stream."""
    held_out: Any = None
    """A batch of real data that the site does not train on, on the CPU; None if there is none.

    Of data that all sites could read, it is the same at every site and for every seed."""
    num_classes: int = 1
    """Labels are 0 … num_classes - 1, here or at other sites."""
    public: bool = False
    """Held-out samples may be shown beside generated ones, in pictures that leave the site."""
    told: int | None = None
    """The site's number, where networks are told that and not classes."""
    workers: int = 0
    """Processes that read ahead."""
    flip: bool = False
    """Whether half of all pictures are mirrored."""

    @property
    def num_samples(self) -> int:
        """That the site trains on; 0 of a stream."""
        return 0 if is_stream(self.train) else len(self.train)

    def loader(
        self, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Loader:
        """Endless reshuffled batches, with the labels that networks are told; see `Loader`."""
        settings = self.workers, self.told, self.flip
        return Loader(self.train, batch_size, generator, device, *settings)

    def some(self, num: int) -> Any:
        """Training samples at even distances, of a stream the first, at most `num`, on the CPU."""
        step = max(1, -(-self.num_samples // num))
        return self._read(num, torch.arange(self.num_samples)[::step], seed=0)

    def drawn(self, num: int, seed: int, start: int = 0) -> Any:
        """At most `num` training samples drawn without replacement; another start gives others."""
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.num_samples, generator=generator)
        return self._read(num, order[start : start + num].sort().values, seed, start)

    def tell(self, batch: Any) -> Any:
        """`held_out`, `some` and `drawn` have classes: samples with what networks are told."""
        return tell(batch, self.told)

    def _read(self, num: int, places: Tensor, seed: int, start: int = 0) -> Any:
        if is_stream(self.train):
            return default_collate(list(islice(copied(self.train), start, start + num)))
        return Fetch(self.train).__getitems__((places, derive_seed(seed, "read")))


def open_shard(
    config: DataConfig, site_index: int, num_sites: int, seed: int, *, captions: bool = False
) -> Shard:
    """Open one site's shard.

    Args:
        config: data set and split, as this site has them.
        site_index: which site, 0 … num_sites - 1.
        num_sites: of the run.
        seed: the run's; it deals the training data, and does not touch the held-out data.
        captions: whether batches of files are dicts of `x`, `y` and `caption`, a list of text.

    Raises:
        ConfigError: what is wrong with the settings, the split, or the first file that is.
    """
    assert 0 <= site_index < num_sites
    check_data(config, num_sites)
    source = source_of(config)
    train: Any
    if config.name in FILE_NAMES:
        files = open_files(config, captions)
        train, held_out = files.train(config.split, site_index, num_sites, seed), files.held_out
    else:
        everything, held_out = source.load()
        mine = split_indices(everything.y, config.split, num_sites, seed)[site_index]
        train = InMemory(InMemory(everything).take(mine))
    shard = Shard(
        train,
        held_out,
        source.num_classes,
        source.public,
        site_index if config.labels == "site" else None,
        config.workers,
        config.flip,
    )
    return _checked(shard, config.batch)


def held_out_of(config: DataConfig) -> Batch:
    """The held-out data of a configuration, with the path that files have at this site."""
    if config.name not in FILE_NAMES:
        return find_source(config.name).load()[1]
    held_out: Batch = open_files(config).held_out
    return held_out


def dataset_of(module: ModuleType, config: Config, site: str) -> Shard:
    """A recipe's own data: what the `dataset(config, site)` of its page returns, as a shard.

    That is a torch `Dataset` or `IterableDataset` of samples that `default_collate` can stack, a
    pair of it and of held-out samples to measure by, or a shard.
    """
    made = module.dataset(config, site)
    if isinstance(made, Shard):
        return _checked(made, config.data.batch)
    train, held_out = made if isinstance(made, tuple) else (made, None)
    for data in (train,) if held_out is None else (train, held_out):
        by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not is_stream(data) and not (by_number and len(data)):
            what = "nothing" if by_number else f"a {type(data).__name__}"
            raise ConfigError(
                f"dataset() of workload {config.workload!r} returned {what} for site {site!r}; "
                "return a torch Dataset with samples, or a pair of two"
            )
    measured = None if held_out is None else Shard(held_out).some(_MOST_HELD_OUT)
    return _checked(Shard(train, measured, workers=config.data.workers), config.data.batch)


def _checked(shard: Shard, batch_size: int) -> Shard:
    for fault in too_large(batch_size, shard.num_samples):
        raise ConfigError(fault)
    return shard
