"""A site's shard: its own part of the training data, which never leaves it, and held-out data."""

from __future__ import annotations

import dataclasses
import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedwan.config import DataConfig, nearest
from fedwan.data.file_stream import FileStream
from fedwan.data.files import FILE_NAMES, PAIRS, FileSet, open_files
from fedwan.data.images import to_unit
from fedwan.data.reader import Reader
from fedwan.data.sources import find_source, source_of
from fedwan.data.splits import has_own_data, parse_split, split_indices
from fedwan.data.stream import BatchStream, Stream
from fedwan.data.telling import LABELS, tell, tell_labels
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = [
    "AnyShard",
    "FileShard",
    "Shard",
    "check_data",
    "data_at_site",
    "mean_shard_samples",
    "open_shard",
]

SITE = "{site}"
"""What stands for the site's name in `data.path`."""
_LEAST_PAIR_SIZE = 32


class AnyShard(Protocol):
    """What one site holds."""

    @property
    def held_out(self) -> Batch:
        """Real data that the site does not train on, the same for every seed.

        Of data that all sites could read, they are the same at every site, and none trains on them.
        """
        ...

    @property
    def num_classes(self) -> int:
        """Labels are 0 … num_classes - 1, here or at other sites."""
        ...

    @property
    def num_samples(self) -> int:
        """That the site trains on."""
        ...

    @property
    def public(self) -> bool:
        """Held-out samples may be shown beside generated ones, in pictures that leave the site."""
        ...

    def some(self, num: int) -> Batch:
        """Training samples at even distances, `num` or all if there are fewer, on the CPU."""
        ...

    def drawn(self, num: int, seed: int) -> Batch:
        """Training samples drawn without replacement, `num` or all if there are fewer, in order."""
        ...

    def file_keys(self, num: int, num_bytes: int, seed: int) -> Tensor:
        """A number for the file of each of some training samples, the same for equal ones.

        Nothing is decoded. Files that cannot be read are left out.

        Args:
            num: most samples, which are drawn without replacement.
            num_bytes: no further file is read after as many.
            seed: of the draw.

        Returns:
            (n,), int64; none of a shard in memory.
        """
        ...

    def batches(
        self, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> Stream:
        """An endless reshuffled stream of this shard, with the labels that networks are told."""
        ...

    def tell(self, batch: Batch) -> Batch:
        """`held_out` and `some` have classes: samples with the labels that networks are told."""
        ...


@dataclass(frozen=True)
class Shard:
    """What one site holds in memory; see `AnyShard`."""

    train: Batch
    """This site's training samples and labels, on the CPU."""
    held_out: Batch
    num_classes: int
    public: bool
    told: int | None = None
    """The site's number, where networks are told that and not classes."""

    @property
    def num_samples(self) -> int:
        """See `AnyShard`."""
        return len(self.train.y)

    def some(self, num: int) -> Batch:
        """See `AnyShard`."""
        chosen = _evenly(self.num_samples, num)
        return Batch(self.train.x[chosen], self.train.y[chosen])

    def drawn(self, num: int, seed: int) -> Batch:
        """See `AnyShard`."""
        chosen = _any_order(self.num_samples, seed)[:num].sort().values
        return Batch(self.train.x[chosen], self.train.y[chosen])

    def file_keys(self, num: int, num_bytes: int, seed: int) -> Tensor:
        """None."""
        return torch.empty(0, dtype=torch.int64)

    def batches(
        self, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> BatchStream:
        """See `BatchStream`."""
        return BatchStream(self.tell(self.train), batch_size, generator, device)

    def tell(self, batch: Batch) -> Batch:
        """See `AnyShard`."""
        return tell(batch, self.told)


@dataclass(frozen=True)
class FileShard:
    """What one site holds in files; see `AnyShard`."""

    files: FileSet
    index: Tensor
    """The site's training samples among `files`, ascending, int64."""
    held_out: Batch
    num_classes: int
    public: bool
    cache_mb: int
    workers: int
    told: int | None = None
    """As in `Shard`."""

    @property
    def num_samples(self) -> int:
        """See `AnyShard`."""
        return len(self.index)

    def some(self, num: int) -> Batch:
        """See `AnyShard`."""
        return self._read(_evenly(self.num_samples, num))

    def drawn(self, num: int, seed: int) -> Batch:
        """See `AnyShard`."""
        return self._read(_any_order(self.num_samples, seed)[:num].sort().values)

    def file_keys(self, num: int, num_bytes: int, seed: int) -> Tensor:
        """See `AnyShard`."""
        keys: list[int] = []
        for place in _any_order(self.num_samples, seed)[:num].tolist():
            try:
                data = self.files.items.read(int(self.index[place]))
            except OSError:
                continue  # training names it
            digest = hashlib.blake2b(data, digest_size=8).digest()
            keys.append(int.from_bytes(digest, "little", signed=True))
            num_bytes -= len(data)
            if num_bytes <= 0:
                break
        return torch.tensor(keys, dtype=torch.int64)

    def batches(
        self, batch_size: int, generator: torch.Generator, device: torch.device | str = "cpu"
    ) -> FileStream:
        """See `FileStream`; each has a cache of its own."""
        reader = self._reader(self.cache_mb, self.told)
        return FileStream(reader, batch_size, generator, device, self.workers)

    def tell(self, batch: Batch) -> Batch:
        """See `AnyShard`."""
        return tell(batch, self.told)

    def _read(self, places: Tensor) -> Batch:
        batch = self._reader(cache_mb=0).read(places.tolist())
        return Batch(to_unit(batch.x), batch.y)

    def _reader(self, cache_mb: int, told: int | None = None) -> Reader:
        return Reader(
            lambda place: self.files.decode(int(self.index[place])),
            tell_labels(self.files.items.labels[self.index], told),
            self.files.source.shape,
            cache_mb << 20,
        )


def _evenly(num_samples: int, num: int) -> Tensor:
    return torch.arange(num_samples)[:: -(-num_samples // num)]


def _any_order(num_samples: int, seed: int) -> Tensor:
    return torch.randperm(num_samples, generator=torch.Generator().manual_seed(seed))


def check_data(config: DataConfig, num_sites: int) -> None:
    """Refuse, without reading any data, settings that cannot work.

    Raises:
        ConfigError: unknown name or split, a setting of files unasked or missing, negative batch,
            more sites than labels, or a split that one site alone makes meaningless.
    """
    source = source_of(config)
    split = parse_split(config.split)
    if config.name in FILE_NAMES:
        _check_files(config, split.kind == "own")
    else:
        _check_small(config, split.kind == "own")
    if config.batch < 0:
        raise ConfigError(
            f"data.batch is {config.batch}; take 1 or more, or 0 for the recipe's own"
        )
    if config.labels not in LABELS:
        raise ConfigError(
            f"data.labels is {config.labels!r}{nearest(config.labels, LABELS)}; valid: "
            f"{', '.join(LABELS)}"
        )
    if config.labels == "site" and num_sites == 1:
        raise ConfigError(
            "data.labels is 'site', which tells the same of every sample at one site; leave it out"
        )
    if split.kind == "by_label" and num_sites > source.num_classes:
        raise ConfigError(
            f"data.split is 'by_label' and sites is {num_sites}, but {config.name} has only "
            f"{source.num_classes} labels; take at most {source.num_classes} sites, or dirichlet:A"
        )
    if split.kind not in ("iid", "own") and num_sites == 1:
        raise ConfigError(
            f"data.split is {config.split!r}, which has no effect with one site; take iid"
        )


def _check_small(config: DataConfig, is_own: bool) -> None:
    """Refuse what only files have."""
    for key in ("path", "size", "direction", "classes", "cache_mb", "workers"):
        value = getattr(config, key)
        if value != getattr(DataConfig(), key):
            names = PAIRS if key == "direction" else " or ".join(FILE_NAMES)
            raise ConfigError(
                f"data.{key} = {value!r} has no effect on {config.name}; "
                f"leave it out, or set data.name={names}"
            )
    if is_own:
        raise ConfigError(
            f"data.split is 'own', but no site has {config.name} of its own; take iid, or set "
            f"data.name={' or '.join(FILE_NAMES)}"
        )


def _check_files(config: DataConfig, is_own: bool) -> None:
    """Refuse paths and sizes that cannot be."""
    if config.direction and config.name != PAIRS:
        raise ConfigError(
            f"data.direction = {config.direction!r} has no effect on {config.name}; leave it out, "
            f"or set data.name={PAIRS}"
        )
    if config.name == PAIRS and 0 < config.size < _LEAST_PAIR_SIZE:
        raise ConfigError(
            f"data.size = {config.size} is out of range for pairs; choose 0, or "
            f"{_LEAST_PAIR_SIZE} to 1024"
        )
    if not is_own and SITE in config.path:
        raise ConfigError(
            f"data.path is {config.path!r}, another folder at each site, of which nothing can be "
            f"dealt by data.split = {config.split!r}; set data.split=own"
        )
    if not Path(config.path).is_absolute() and not (is_own and not config.path):
        raise ConfigError(
            f"data.path is {config.path!r}; name the folder of images from the root, as in "
            "/data/facades: sites run in folders of their own"
        )


def data_at_site(config: DataConfig, site: str, own_path: str = "") -> DataConfig:
    """A run's data as one site has them.

    Args:
        config: of the run.
        site: the site's name, which takes the place of `{site}` in `data.path`.
        own_path: that the site's own file names in place of the run's; it does not matter to data
            that come with fedwan.
    """
    if config.name not in FILE_NAMES:
        return config
    return dataclasses.replace(config, path=own_path or config.path.replace(SITE, site))


def open_shard(config: DataConfig, site_index: int, num_sites: int, seed: int) -> AnyShard:
    """Open one site's shard.

    Args:
        config: data set and split, as this site has them.
        site_index: which site, 0 … num_sites - 1.
        num_sites: number of sites of the run.
        seed: the run's seed; it deals the training data, and does not touch the held-out data.

    Raises:
        ConfigError: see `check_data`; some site would be left without data; or of files, what is
            wrong with the first that cannot be used.
    """
    assert 0 <= site_index < num_sites
    check_data(config, num_sites)
    if config.name in FILE_NAMES:
        return _open_files(config, site_index, num_sites, seed)
    source = find_source(config.name)
    train, held_out = source.load()
    mine = split_indices(train.y, config.split, num_sites, seed)[site_index]
    return Shard(
        train=Batch(train.x[mine], train.y[mine]),
        held_out=held_out,
        num_classes=source.num_classes,
        public=source.public,
        told=_told(config, site_index),
    )


def mean_shard_samples(config: DataConfig, num_sites: int) -> float:
    """Training samples of the mean site; of data that are sites' own, those of this one."""
    if config.name not in FILE_NAMES:
        return len(find_source(config.name).load()[0].y) / num_sites
    num_here = len(open_files(config).train_index)
    return num_here / (1 if has_own_data(config) else num_sites)


def _open_files(config: DataConfig, site_index: int, num_sites: int, seed: int) -> FileShard:
    if not config.path:
        raise ConfigError(
            "data.path is '' at this site, whose data are its own; name their folder in SITE.yaml, "
            "as in data: {path: /data/images}"
        )
    files = open_files(config)
    index = files.train_index
    if not has_own_data(config):
        index = index[
            split_indices(files.items.labels[index], config.split, num_sites, seed)[site_index]
        ]
    files.check(index)
    return FileShard(
        files=files,
        index=index,
        held_out=files.held_out,
        num_classes=files.source.num_classes,
        public=files.source.public,
        cache_mb=config.cache_mb,
        workers=config.workers,
        told=_told(config, site_index),
    )


def _told(config: DataConfig, site_index: int) -> int | None:
    return site_index if config.labels == "site" else None
