"""WebDataset shards: tar files that are read from end to end, by Hugging Face `datasets`.

A sample's files share a name: `0001.jpg` or `.png`; `0001.cls` with a number or `0001.json` with a
`label`; and for a caption `0001.txt`. Each epoch takes the tar files in a new order, and shuffles
what a window of samples holds. A stream stands where its window began, and so many samples further:
to go on, the window is read again.
"""

from __future__ import annotations

import tarfile
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset

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
        num_samples: in them, without those that are held out.
        held_out: `TAR:SAMPLE` of these.
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
        self.num_samples = num_samples
        self.num_shards = len(tars)
        self._tars, self._held_out = tars, held_out
        self._source, self._seed = source, seed
        self._epoch = self._window = self._taken = 0
        self._start: dict[str, Any] | None = None

    def __iter__(self) -> Iterator[Any]:
        return made(self._shuffled(), self._source.transform)

    def _shuffled(self) -> Iterator[Row]:
        while True:
            table, columns = self._open(_order(len(self._tars), self._seed, self._epoch))
            if self._start is not None:
                table.load_state_dict(self._start)
            rows = (row for key, row in self._named(table, columns) if key not in self._held_out)
            while window := list(islice(rows, WINDOW)):
                after = table.state_dict()
                order = _order(len(window), self._seed, self._epoch, self._window)
                for number in order[self._taken :]:
                    self._taken += 1
                    yield window[number]
                self._window, self._taken, self._start = self._window + 1, 0, after
            if not self._window:
                return  # there are none
            self._epoch, self._window, self._start = self._epoch + 1, 0, None

    def rows(self) -> Iterator[tuple[str, Row]]:
        """All samples, undecoded, in the order of their files, each with its key."""
        return self._named(*self._open(range(len(self._tars))))

    def _open(self, order: Sequence[int]) -> tuple[Any, Columns]:
        """Of several workers, each gets its share of the tar files from `datasets`."""
        datasets, folder = import_datasets("webdataset"), Path(self._tars[0]).parent
        table = load(datasets, "webdataset", folder, [self._tars[tar] for tar in order])
        columns = find_columns(datasets, self._source, folder, table.features)
        return table.cast_column(columns.image, datasets.Image(decode=False)), columns

    def _named(self, table: Any, columns: Columns) -> Iterator[tuple[str, Row]]:
        for row in table:
            tar, key = row["__url__"], row["__key__"]
            name = f"{tar}: sample {key!r}"
            label = 0
            if columns.label:
                label = class_number(name, row[columns.label], columns, self._source.classes)
            caption = str(row[columns.caption] or "") if columns.caption else None
            yield f"{tar}:{key}", Row(name, row[columns.image], label, caption)

    def state_dict(self) -> dict[str, Any]:
        """Where the stream stands."""
        return {
            "epoch": self._epoch,
            "window": self._window,
            "taken": self._taken,
            "start": self._start,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`."""
        self._epoch, self._window = state["epoch"], state["window"]
        self._taken, self._start = state["taken"], state["start"]


def _order(num: int, *seeds: int) -> list[int]:
    generator = torch.Generator().manual_seed(derive_seed(*seeds))
    order: list[int] = torch.randperm(num, generator=generator).tolist()
    return order
