"""Data sets of files, which need not fit in memory: what is known beforehand, and how to open one.

A site lists all names of a data set that the sites share, reads the samples that are its own and
those held out, and opens no other file. Where the data are the site's own it reads them all.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import TypeVar

import torch
from torch import Tensor

from fedwan.config import DataConfig
from fedwan.data.classes import Classes, parse_classes
from fedwan.data.folder import open_folder
from fedwan.data.images import BadImage, Decoder, PairDecoder, SquareDecoder, to_unit
from fedwan.data.items import LEAST_ITEMS, Items, hold_out_by_name, hold_out_every_tenth
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = [
    "FILE_NAMES",
    "LEAST_PAIRS",
    "PAIRS",
    "FileSet",
    "FileSource",
    "file_source",
    "open_files",
]

Used = TypeVar("Used")

PAIRS = "pairs"
FILE_NAMES = ("folder", PAIRS, "webdataset", "hf")
"""The values of `data.name` that stand for files of the user's."""
LEAST_PAIRS = 8
"""Half of them to train on, half to judge by."""
_SIZE = {PAIRS: 256}
_OTHER_SIZE = 64
_MOST_CHECKED = 2000
"""Samples whose headers are looked at before training, evenly spaced: seconds, not hours."""


@dataclass(frozen=True)
class FileSource:
    """What is known of a data set of files before it is opened, and at machines that lack it."""

    name: str
    """As in `data.name`."""
    decoder: Decoder
    classes: Classes
    inputs: int
    """Channels at the front of a sample that are given; a workload learns to make the others."""
    public: bool = False
    """Nobody said that a user's images may be shown."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample."""
        return self.decoder.shape

    @property
    def num_classes(self) -> int:
        """Labels are 0 … num_classes - 1."""
        return self.classes.num


@dataclass(frozen=True)
class FileSet:
    """A data set of files that has been listed."""

    source: FileSource
    items: Items
    is_held_out: Tensor
    """(N,), bool."""

    @property
    def train_index(self) -> Tensor:
        """Which samples may be trained on, ascending, int64."""
        return (~self.is_held_out).nonzero().squeeze(1)

    def decode(self, index: int) -> Tensor:
        """A sample's pixels, of the source's shape, uint8.

        Raises:
            ConfigError: it cannot be read; one line that names it.
        """
        return self._use(index, self.source.decoder.decode)

    def check(self, index: Tensor) -> None:
        """Look at the headers of some samples, of very many at 2000 evenly spaced ones.

        Raises:
            ConfigError: one cannot be used.
        """
        for sample in index[:: math.ceil(len(index) / _MOST_CHECKED)].tolist():
            self._use(sample, self.source.decoder.check)

    @cached_property
    def held_out(self) -> Batch:
        """All that is held out, decoded once: x in [-1, 1].

        Raises:
            ConfigError: one cannot be read.
        """
        index = self.is_held_out.nonzero().squeeze(1)
        pixels = torch.stack([self.decode(sample) for sample in index.tolist()])
        return Batch(to_unit(pixels), self.items.labels[index])

    def _use(self, index: int, use: Callable[[bytes], Used]) -> Used:
        try:
            return use(self.items.read(index))
        except OSError as error:
            text = f"cannot be read ({error.strerror or error}); see that it is there, or remove it"
        except BadImage as error:
            text = str(error)
        raise ConfigError(f"data.path: {self.items.where(index)} {text}")


def file_source(config: DataConfig) -> FileSource:
    """What is known of the files that a configuration names, without looking at them.

    Raises:
        ConfigError: `data.classes` are none.
    """
    size = config.size or _SIZE.get(config.name, _OTHER_SIZE)
    classes = parse_classes(config.classes)
    if config.name == PAIRS:
        return FileSource(PAIRS, PairDecoder(size, config.direction), classes, inputs=3)
    return FileSource(config.name, SquareDecoder(size), classes, inputs=0)


def open_files(config: DataConfig) -> FileSet:
    """List the files that a configuration names.

    Args:
        config: with the path that they have at this site.

    Raises:
        ConfigError: there are none, too few, or none of the named kind.
    """
    return _open(config.name, config.path, config.size, config.direction, config.classes)


@lru_cache(maxsize=1)
def _open(name: str, path: str, size: int, direction: str, classes: str) -> FileSet:
    """Once per process: a workload may ask for held-out inputs again and again."""
    config = DataConfig(name, path=path, size=size, direction=direction, classes=classes)
    source, folder = file_source(config), Path(path)
    items: Items
    if name == PAIRS:
        items = open_folder(folder, source.classes, LEAST_PAIRS)
        return FileSet(source, items, hold_out_every_tenth(len(items.names)))
    if name == "folder":
        items = open_folder(folder, source.classes, LEAST_ITEMS)
    elif name == "webdataset":
        from fedwan.data.webdataset import open_webdataset

        items = open_webdataset(folder, source.classes, LEAST_ITEMS)
    else:
        assert name == "hf"
        from fedwan.data.huggingface import open_huggingface

        items = open_huggingface(folder, source.classes, LEAST_ITEMS)
    return FileSet(source, items, hold_out_by_name(items.names))
