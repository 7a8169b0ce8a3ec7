"""A site's shard: its own part of the training data, which never leaves it, and held-out data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import islice
from types import ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Subset, default_collate

from fedwan.config import FILE_NAMES, Config, DataConfig, site_names
from fedwan.data.files import MOST_HELD_OUT, open_files, read_held_out
from fedwan.data.loader import Fetch, InMemory, Loader, copied, is_stream, seeded, tell
from fedwan.data.sources import check_data, data_at_site, source_of, split_indices
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.rng import derive_seed
from fedwan.uses import Faults
from fedwan.workloads.base import Batch


@dataclass(frozen=True)
class Shard:
    """What one site holds."""

    train: Any
    """A torch `Dataset` that the site trains on, by number or (`IterableDataset`) as a stream."""
    held_out: Any = None
    """A batch of real data that the site does not train on, on the CPU; None if there is none. Of
    data that all sites could read, it is the same at every site and for every seed."""
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

    def count(self, num_labels: int) -> Tensor:
        """Training samples by what networks are told, (num_labels,) int64; 0 if not known."""
        if num_labels == 1:
            return torch.tensor([self.num_samples])
        if self.told is not None:
            return self.num_samples * (torch.arange(num_labels) == self.told)
        y = torch.as_tensor(getattr(self.train, "labels", ()), dtype=torch.int64)
        if odd := sorted({*y.tolist()} - {*range(num_labels)}):
            raise ConfigError(
                f"the data set has a label {odd[0]}, and networks are told 0 to {num_labels - 1}; "
                "number labels from 0 on, and name all in data.classes"
            )
        return y.bincount(minlength=num_labels)

    def loader(
        self,
        batch_size: int,
        generator: torch.Generator,
        device: torch.device | str = "cpu",
        places: Callable[[int], Tensor] | None = None,
        part: tuple[int, int] = (1, 0),
    ) -> Loader:
        """Endless reshuffled batches, with the labels that networks are told; see `Loader`."""
        settings = self.workers, self.told, self.flip, places, part
        return Loader(self.train, batch_size, generator, device, *settings)

    def drawn(self, num: int, seed: int, start: int = 0) -> Any:
        """At most `num` training samples drawn without replacement; another start gives others.

        In their order, of a stream as they come, on the CPU.
        """
        if is_stream(self.train):
            with seeded(seed):
                rows = list(islice(copied(self.train), start, start + num))
            if not rows:
                raise ConfigError("a stream of data gives no samples; see that it has some")
            return default_collate(rows)
        generator = torch.Generator().manual_seed(seed)
        order = torch.randperm(self.num_samples, generator=generator)
        places = order[start : start + num].sort().values
        return Fetch(self.train).__getitems__((places, derive_seed(seed, "read")))

    def tell(self, batch: Any) -> Any:
        """`held_out` and `drawn` have classes: samples with what networks are told."""
        return tell(batch, self.told)


def open_shard(
    config: DataConfig,
    site_index: int,
    num_sites: int,
    seed: int,
    *,
    captions: bool = False,
    exact: bool = False,
) -> Shard:
    """Open one site's shard, of the data set and split that this site's `config` has.

    The run's `seed` deals the training data, and does not touch the held-out data. With `captions`,
    batches are dicts of `x`, `y` and `caption`, a list of text. With `exact` no other picture
    stands in for one that cannot be read. A `ConfigError` says what is wrong with the settings, the
    split, or the first file that is.
    """
    check_data(config)
    source = source_of(config)
    if config.name in FILE_NAMES:
        files = open_files(config, captions)
        train: Any = files.train(config.split, site_index, num_sites, seed, exact=exact)
        held_out: Any = read_held_out(files)
    else:
        everything, held_out = source.load_captioned() if captions else source.load()
        rows = InMemory(everything)
        mine = split_indices(rows.labels, config.split, num_sites, seed)[site_index]
        train = InMemory(rows.take(mine))
    told = site_index if config.labels == "site" else None
    shard = Shard(train, held_out, source.public, told, config.workers, config.flip)
    _require_batch(config.batch, shard.num_samples)
    return shard


def held_out_of(config: DataConfig) -> Batch:
    """The held-out data of a configuration, with the path that files have at this site."""
    is_file = config.name in FILE_NAMES
    held_out: Batch = read_held_out(open_files(config)) if is_file else source_of(config).load()[1]
    return held_out


def dataset_of(module: ModuleType, config: Config, site: str) -> Shard:
    """A recipe's own data: what the `dataset(config, site)` of its page returns, as a shard.

    That is a torch `Dataset` or `IterableDataset` of samples that `default_collate` can stack, a
    pair of it and of held-out samples to measure by, or a shard.
    """
    if (split := config.data.split) not in ("iid", "own"):
        raise ConfigError(
            f"data.split = {split!r} deals a data set that all sites share, and dataset() of "
            f"workload {config.workload!r} is called at each; set data.split=iid"
        )
    made = module.dataset(config, site)
    if isinstance(made, Shard):
        _require_batch(config.data.batch, made.num_samples)
        return made
    train, held_out = made if isinstance(made, tuple) else (made, None)
    for data in (train,) if held_out is None else (train, held_out):
        by_number = hasattr(data, "__getitem__") and hasattr(data, "__len__")
        if not is_stream(data) and not (by_number and len(data)):
            what = "nothing" if by_number else f"a {type(data).__name__}"
            raise ConfigError(
                f"dataset() of workload {config.workload!r} returned {what} for site {site!r}; "
                "return a torch Dataset with samples, or a pair of two"
            )
    if held_out is not None and not is_stream(held_out):
        # In no order, as files': the first few, and either half, are to be of all classes.
        generator = torch.Generator().manual_seed(derive_seed("dataset", "held out"))
        held_out = Subset(held_out, torch.randperm(len(held_out), generator=generator).tolist())
    measured = None if held_out is None else Shard(held_out).drawn(MOST_HELD_OUT, 0)
    told = site_names(config).index(site) if config.data.labels == "site" else None
    flip = config.data.flip
    shard = Shard(train, measured, told=told, workers=config.data.workers, flip=flip)
    _require_batch(config.data.batch, shard.num_samples)
    return shard


def check_files(config: Config, *, captions: bool = False) -> list[str]:
    """What is wrong with the data of a resolved run whose sites are all here, one line each.

    With `captions` also whether there are any. Some pictures of each folder are read.
    """
    names, data, faults = site_names(config), config.data, Faults()
    if data.name not in FILE_NAMES:
        with faults.caught():
            y = source_of(data).load()[0].y
            parts = split_indices(y, data.split, len(names), config.seed)
            _require_batch(data.batch, min(len(part) for part in parts))
        return faults.lines
    with faults.caught():
        require("datasets", "data")  # beside folders that are not there
    for index, name in enumerate(names):
        with faults.caught():
            files = open_files(data_at_site(data, name), captions)
            train = files.train(data.split, index, len(names), config.seed)
            if data.split == "own" or not index:
                faults.add(files.faults())
            _require_batch(data.batch, len(train))
    return faults.lines


def _require_batch(batch_size: int, num_samples: int) -> None:
    """Refuse a batch of more than a site's samples; 0 where their number is not known."""
    if 0 < num_samples < batch_size:
        raise ConfigError(
            f"data.batch = {batch_size} is more than the {num_samples} samples that a site trains "
            f"on; set data.batch={num_samples} or less, or give each site more"
        )
