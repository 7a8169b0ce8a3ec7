"""WebDataset shards: tar files that are read from end to end, by Hugging Face `datasets`.

A sample's files share a name: `0001.jpg` or `.png`; `0001.cls` with a number or `0001.json` with a
`label`; and for a caption `0001.txt`. Each epoch takes the tar files in a new order, and shuffles what a window
of samples holds. Where a stream stands is the place where its window began and the samples taken of
it since: to go on, the window is read again, from inside its first tar file.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from fedwan.data.file_source import FileSource
from fedwan.data.pictures import Row, made
from fedwan.data.tables import Columns, class_number, find_columns, import_datasets, load
from fedwan.errors import ConfigError
from fedwan.rng import derive_seed

__all__ = ["TarStream", "find_tars", "keys_of"]

WINDOW = 1024
"""Samples, undecoded, that are shuffled at a time."""


def find_tars(folder: Path) -> list[str]:
    """The tar files of a folder and below, in the order of their names.

    Raises:
        ConfigError: there are none.
    """
    tars = sorted(str(path) for path in folder.rglob("*.tar"))
    if not tars:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds no .tar files; put shards there that are not "
            "compressed, or set data.name=folder for images"
        )
    return tars


def keys_of(tar: str) -> list[str]:
    """The names of a tar file's samples, from its headers.

    Raises:
        ConfigError: it cannot be read.
    """
    keys: dict[str, None] = {}
    try:
        with tarfile.open(tar, "r:") as archive:
            for member in archive:
                folder, slash, name = member.name.rpartition("/")
                key, dot, _ = name.partition(".")
                if member.isreg() and key and dot:
                    keys[folder + slash + key] = None
                archive.members = []  # type: ignore[attr-defined]  # a kilobyte of each
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(
            f"data.path: {tar} cannot be read as a tar file ({error}); copy it anew, and see that "
            "it is not compressed"
        ) from None
    return list(keys)


class TarStream(IterableDataset[Any]):
    """Samples of tar files, without end; each worker reads files of its own.

    Args:
        tars: of this site; at least one.
        num_samples: in them.
        held_out: `TAR:SAMPLE` of those that are left out.
        source: what samples are made of.
        seed: of the order.
    """

    def __init__(
        self,
        tars: list[str],
        num_samples: int,
        held_out: frozenset[str],
        source: FileSource,
        seed: int,
    ) -> None:
        self._tars, self._num_samples, self._held_out = tars, num_samples, held_out
        self._source, self._seed = source, seed
        self._place = (0, 0, 0, 0)

    @property
    def num_samples(self) -> int:
        """In all tar files, without those that are held out."""
        return self._num_samples

    @cached_property
    def _opened(self) -> tuple[Any, Columns]:
        datasets = import_datasets("webdataset")
        folder = Path(self._tars[0]).parent
        rows = load(datasets, "webdataset", folder, self._tars)
        columns = find_columns(datasets, self._source, folder, rows.features)
        return rows.cast_column(columns.image, datasets.Image(decode=False)), columns

    def __iter__(self) -> Iterator[Any]:
        return made(self._shuffled(), self._source.transform)

    def rows(self, tar: int) -> Iterator[tuple[str, Row]]:
        """A tar file's samples in its order, each with its key."""
        rows, columns = self._opened
        for row in rows.shard(num_shards=len(self._tars), index=tar):
            key = f"{self._tars[tar]}:{row['__key__']}"
            name = f"{self._tars[tar]}: sample {row['__key__']!r}"
            label = 0
            if columns.label:
                label = class_number(name, row[columns.label], columns, self._source.classes)
            caption = str(row[columns.caption] or "") if columns.caption else None
            yield key, Row(name, row[columns.image], label, caption)

    def _shuffled(self) -> Iterator[Row]:
        worker = get_worker_info()
        first, step = (worker.id, worker.num_workers) if worker else (0, 1)
        mine = range(first, len(self._tars), step)
        while mine:
            epoch, tar, sample, skipped = self._place
            window: list[Row] = []
            after = (epoch + 1, 0, 0, 0)
            for place, row in self._from(mine, epoch, tar, sample):
                if len(window) == WINDOW:
                    after = (epoch, *place, 0)
                    break
                window.append(row)
            if not window and not (tar or sample):
                return  # all of its samples are held out
            generator = torch.Generator().manual_seed(
                derive_seed(self._seed, first, epoch, tar, sample)
            )
            order = torch.randperm(len(window), generator=generator).tolist()
            for number in range(skipped, len(order)):
                self._place = (epoch, tar, sample, number + 1)
                yield window[order[number]]
            self._place = after

    def _from(
        self, mine: range, epoch: int, tar: int, sample: int
    ) -> Iterator[tuple[tuple[int, int], Row]]:
        """An epoch's samples from a place on, each with its own place."""
        generator = torch.Generator().manual_seed(derive_seed(self._seed, mine.start, epoch))
        order = torch.randperm(len(mine), generator=generator).tolist()
        for number in range(tar, len(order)):
            start = sample if number == tar else 0
            rows = enumerate(self.rows(mine[order[number]]))
            for place, (key, row) in islice(rows, start, None):
                if key not in self._held_out:
                    yield (number, place), row

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {"place": list(self._place)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        epoch, tar, sample, skipped = state["place"]
        self._place = (epoch, tar, sample, skipped)
