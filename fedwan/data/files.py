"""Data sets of files: what is known beforehand, how one is opened, and what of it is held out.

A site reads the samples that are its own and those held out, and of other samples their names.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import default_collate

from fedwan.config import DataConfig
from fedwan.data.file_source import TARS, FileSource, file_source
from fedwan.data.pictures import Pictures, Row, made
from fedwan.data.splits import parse_split, split_indices
from fedwan.data.tables import Table, open_table
from fedwan.data.tars import TarStream, find_tars, keys_of
from fedwan.errors import ConfigError
from fedwan.rng import derive_seed

__all__ = ["Files", "hold_out", "open_files"]

LEAST = 8
"""Half of them to train on, half to judge by."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 12, 512
"""They are held in memory and measured at every evaluation: 400 MB at 256 x 256."""


@dataclass(frozen=True)
class Files:
    """A data set of files that has been listed."""

    source: FileSource
    table: Table | None
    """None of a stream."""
    tars: tuple[str, ...]
    """Of a stream."""
    keys: tuple[str, ...]
    """A name for each sample."""
    is_held_out: Tensor
    """(N,), bool."""

    def train(self, split: str, site_index: int, num_sites: int, seed: int) -> Any:
        """What one site trains on: `Pictures`, or a `TarStream`.

        Raises:
            ConfigError: some site would be left without data.
        """
        is_own = parse_split(split).kind == "own"
        if self.table is not None:
            index = (~self.is_held_out).nonzero().squeeze(1)
            if not is_own:
                labels = self.table.labels[index]
                index = index[split_indices(labels, split, num_sites, seed)[site_index]]
            return Pictures(self.table, index, self.source.transform)
        tars = list(self.tars)
        if not is_own:
            if num_sites > len(tars):
                raise ConfigError(
                    f"sites is {num_sites}, but there are only {len(tars)} tar files to share out; "
                    "write more and smaller ones"
                )
            dealt = split_indices(torch.zeros(len(tars)), split, num_sites, seed)[site_index]
            tars = [tars[place] for place in dealt.tolist()]
        held, mine = self._held_keys(), set(tars)
        num = sum(key.rpartition(":")[0] in mine and key not in held for key in self.keys)
        return TarStream(tars, num, held, self.source, derive_seed(seed, "tars", site_index))

    def some_rows(self, num: int) -> Iterable[Row]:
        """Samples, undecoded: of a table at even distances, of a stream the first."""
        if self.table is None:
            return islice((row for _, row in self._streamed()), num)
        return map(self.table.row, range(0, len(self.keys), -(-len(self.keys) // num)))

    def _streamed(self) -> Iterator[tuple[str, Row]]:
        """All samples of a stream in the order of their tar files, each with its key."""
        return TarStream(list(self.tars), 0, frozenset(), self.source, 0).rows()

    def _held_rows(self) -> Iterable[Row]:
        """What is held out, undecoded."""
        if self.table is not None:
            return map(self.table.row, self.is_held_out.nonzero().squeeze(1).tolist())
        held = self._held_keys()
        chosen = (row for key, row in self._streamed() if key in held)
        return islice(chosen, len(held))

    @cached_property
    def held_out(self) -> Any:
        """All that is held out, decoded once: a batch on the CPU.

        Raises:
            ConfigError: it cannot be read.
        """
        return default_collate(list(made(self._held_rows(), self.source.transform)))

    def _held_keys(self) -> frozenset[str]:
        chosen = self.is_held_out.nonzero().squeeze(1).tolist()
        return frozenset(self.keys[number] for number in chosen)


def hold_out(keys: Sequence[str]) -> Tensor:
    """Which samples are held out: the tenth of them with the smallest hashes of their names.

    At most 512, and at least 12 or half of them. A sample stays in its part while others come and
    go, but for a few at the border; and sites with the same files hold out the same ones.

    Returns:
        (N,), bool.
    """
    num = min(_MOST_HELD_OUT, max(min(_LEAST_HELD_OUT, len(keys) // 2), len(keys) // 10))
    hashes = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]
    chosen = sorted(range(len(keys)), key=lambda number: (hashes[number], keys[number]))[:num]
    mask = torch.zeros(len(keys), dtype=torch.bool)
    mask[chosen] = True
    return mask


def open_files(config: DataConfig, captions: bool = False) -> Files:
    """List the files that a configuration names.

    Args:
        config: with the path that they have at this site.
        captions: whether samples have them.

    Raises:
        ConfigError: there are none, too few, or none of the named kind.
    """
    if not config.path:
        raise ConfigError(
            "data.path is '' at this site, whose data are its own; name their folder in SITE.yaml, "
            "as in data: {path: /data/images}"
        )
    words = config.name, config.path, config.size, config.classes
    return _open(*words, captions)


@lru_cache(maxsize=1)
def _open(name: str, path: str, size: int, classes: str, captions: bool) -> Files:
    """Once per process: a workload may ask for held-out inputs again and again."""
    config = DataConfig(name, path=path, size=size, classes=classes)
    source, folder = file_source(config, captions), Path(path)
    if name == TARS:
        tars = tuple(find_tars(folder))
        keys = tuple(f"{tar}:{key}" for tar in tars for key in keys_of(tar))
        table = None
        # Of many, those near the beginning: what is held out is read through the stream.
        names = [str(Path(key).relative_to(folder)) for key in keys[: 10 * _MOST_HELD_OUT]]
        chosen = hold_out(names)
        mask = torch.zeros(len(keys), dtype=torch.bool)
        mask[: len(chosen)] = chosen
    else:
        table = open_table(source, folder)
        tars, keys = (), table.keys
        mask = hold_out(keys)
    if len(keys) < LEAST:
        raise ConfigError(
            f"data.path = {path!r} holds {len(keys)} samples; put {LEAST} or more there"
        )
    return Files(source, table, tars, keys, mask)
