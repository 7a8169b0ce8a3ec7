"""The user's files as tables of pictures, labels and captions, by Hugging Face `datasets`.

Needs the extra `data`. Pictures stay undecoded: `fedwan.data.pictures` decodes them.
"""

from __future__ import annotations

import glob
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedwan.data.classes import Classes
from fedwan.data.file_source import PAIRS, FileSource
from fedwan.data.pictures import Row
from fedwan.errors import ConfigError

__all__ = ["Columns", "Table", "find_columns", "import_datasets", "load", "open_table"]

_CAPTIONS = ("caption", "text", "txt")
_LABELS = ("label", "labels", "cls", "json")
_SPLIT = "train"


@dataclass(frozen=True)
class Columns:
    """Which columns of a table are what."""

    image: str
    label: str
    """Empty where samples have no classes, or lie in their classes' folders."""
    names: tuple[str, ...]
    """Of the table's own classes, where it has any: its labels are numbers of these."""
    caption: str
    """Empty where none are wanted."""


@dataclass(frozen=True)
class Table:
    """Pictures that can be read by number."""

    folder: Path
    rows: Any
    """A `datasets.Dataset` with its images undecoded."""
    columns: Columns
    classes: Classes
    paths: tuple[str, ...]
    """Of each row's file below the folder; none where images are no files."""

    @property
    def keys(self) -> tuple[str, ...]:
        """A name for each row, the same wherever the same data lie."""
        return self.paths or tuple(str(number) for number in range(len(self.rows)))

    @cached_property
    def labels(self) -> Tensor:
        """(N,), int64.

        Raises:
            ConfigError: one that `data.classes` does not name.
        """
        if not self.classes.names:
            return torch.zeros(len(self.rows), dtype=torch.int64)
        column = self.columns.label
        given = self.rows[column] if column else [_folder_of(path) for path in self.paths]
        numbers: dict[Any, int] = {}
        for row, value in enumerate(given):
            if value not in numbers:
                numbers[value] = self._number(self.name(row), value)
        return torch.tensor([numbers[value] for value in given], dtype=torch.int64)

    def name(self, row: int) -> str:
        """A row's place on this machine."""
        return str(self.folder / self.paths[row]) if self.paths else f"{self.folder}: row {row}"

    def row(self, number: int) -> Row:
        """A sample, undecoded."""
        row = self.rows[number]
        caption = str(row[self.columns.caption] or "") if self.columns.caption else None
        label = int(self.labels[number])
        return Row(self.name(number), row[self.columns.image], label, caption)

    def _number(self, name: str, value: Any) -> int:
        if value == "" and not self.columns.label:
            raise ConfigError(
                f"data.path: {name} lies in no folder of a class, which data.classes asks for; "
                "move it into one, or leave data.classes out"
            )
        return class_number(name, value, self.columns, self.classes)


def class_number(name: str, value: Any, columns: Columns, classes: Classes) -> int:
    """The number of a sample's class, from what its label says.

    Raises:
        ConfigError: there is no such class.
    """
    known = () if classes.is_numbered else columns.names
    if isinstance(value, int) and 0 <= value < len(known):
        value = known[value]
    if isinstance(value, dict):
        value = value.get("label")
    if value is None:
        raise ConfigError(
            f"data.path: {name} has no label, which data.classes asks for; add one, or leave "
            "data.classes out"
        )
    try:
        return classes.find(str(value).strip())
    except ValueError as error:
        raise ConfigError(f"data.path: {name} {error}") from None


def import_datasets(name: str) -> Any:
    """The package `datasets`.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            f"data.name = {name!r} needs the package datasets, which is not installed here; "
            "pip install 'fedwan[data]'"
        ) from None
    datasets.disable_progress_bars()
    return datasets


def open_table(source: FileSource, folder: Path) -> Table:
    """Open `folder`, `pairs`, `parquet` or `hf`.

    Args:
        source: what is wanted.
        folder: which.

    Raises:
        ConfigError: `datasets` is not installed, the folder holds no such data, or it is not clear
            which column holds images or labels.
    """
    datasets = import_datasets(source.name)
    of_files = source.name in ("folder", *PAIRS)
    rows = load(datasets, source.name, folder)
    columns = find_columns(datasets, source, folder, rows.features)
    rows = rows.cast_column(columns.image, datasets.Image(decode=False)).with_format(None)
    if not of_files:
        return Table(folder, rows, columns, source.classes, ())
    found = [os.path.relpath(image["path"], folder) for image in rows[columns.image]]
    # By parts, so that a folder's files are not apart for a character that sorts before a slash.
    order = sorted(range(len(found)), key=lambda row: found[row].split(os.sep))
    paths = tuple(found[row] for row in order)
    return Table(folder, rows.select(order), columns, source.classes, paths)


def load(datasets: Any, name: str, folder: Path, files: list[str] | None = None) -> Any:
    """A `datasets.Dataset` of a folder; or of `files`, tar files, an `IterableDataset`.

    Raises:
        ConfigError: it cannot be read.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"data.path = {str(folder)!r} is no folder on this machine; name one that it has, or "
            "set data.path in this site's SITE.yaml"
        )
    below = os.path.join(glob.escape(str(folder)), "**")
    try:
        if name == "hf":
            return _train_split(datasets.load_from_disk(str(folder)), folder)
        if name == "parquet":
            return datasets.load_dataset(
                name, data_files={_SPLIT: os.path.join(below, "*.parquet")}, split=_SPLIT
            )
        if name == "webdataset":
            tars = {_SPLIT: [glob.escape(file) for file in files or []]}
            return datasets.load_dataset(name, data_files=tars, split=_SPLIT, streaming=True)
        return datasets.load_dataset(
            "imagefolder", data_files={_SPLIT: below}, drop_labels=True, split=_SPLIT
        )
    except ConfigError:
        raise
    except Exception as error:  # of many kinds: of the file system, pyarrow, tarfile, datasets
        what = {"hf": "what save_to_disk wrote", "folder": "images", "pairs": "images"}.get(name)
        while isinstance(error.__cause__, Exception):  # datasets say less than what they wrap
            error = error.__cause__
        raise ConfigError(
            f"data.path = {str(folder)!r} cannot be read ({' '.join(str(error).split())}); "
            f"data.name={name} takes a folder of {what or f'{name} files'}"
        ) from None


def _train_split(loaded: Any, folder: Path) -> Any:
    if not isinstance(loaded, dict):
        return loaded
    if _SPLIT not in loaded:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds the splits {', '.join(loaded)} and no {_SPLIT!r}; "
            f"name the folder of one of them, as in {folder / next(iter(loaded))}"
        )
    return loaded[_SPLIT]


def find_columns(datasets: Any, source: FileSource, folder: Path, features: Any) -> Columns:
    """Which columns hold images, and labels and captions where they are wanted.

    Raises:
        ConfigError: none does, or several.
    """
    images = [n for n, kind in features.items() if isinstance(kind, datasets.Image)]
    images = images or [name for name in ("image", "jpg", "png") if name in features]
    image = _only(folder, "images", images, features)
    label, names = "", ()
    found = [name for name, kind in features.items() if isinstance(kind, datasets.ClassLabel)]
    found = found or [name for name in _LABELS if name in features][:1]
    if source.classes.names and (found or source.name not in ("folder", *PAIRS)):
        label = _only(folder, "labels", found, features)
        names = tuple(getattr(features[label], "names", ()))
    caption = ""
    if source.captions:
        found = [name for name in _CAPTIONS if name in features][:1]
        caption = _only(folder, "captions", found, features)
    return Columns(image, label, names, caption)


def _only(folder: Path, what: str, columns: list[str], features: Any) -> str:
    if len(columns) == 1:
        return columns[0]
    held = f"{len(columns)} columns of {what}" if columns else f"no column of {what}"
    raise ConfigError(
        f"data.path = {str(folder)!r} holds {held} where one is wanted, among "
        f"{', '.join(features)}; name one {what[:-1]!r}"
    )


def _folder_of(path: str) -> str:
    first, separator, _ = path.partition(os.sep)
    return first if separator else ""
