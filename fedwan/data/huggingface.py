"""A data set that Hugging Face's `datasets` wrote with `save_to_disk`: an image column, and labels.

Needs the package `datasets`, which fedwan does without elsewhere: `pip install fedwan[hf]`.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedwan.data.classes import Classes
from fedwan.data.items import require_folder
from fedwan.errors import ConfigError

__all__ = ["TableItems", "open_huggingface"]

_SPLIT = "train"


@dataclass(frozen=True)
class TableItems:
    """See `fedwan.data.items.Items`."""

    folder: Path
    names: tuple[str, ...]
    """Numbers of rows."""
    labels: Tensor
    rows: Any
    """The `datasets.Dataset` with its images undecoded."""
    column: str

    def read(self, index: int) -> bytes:
        """See `Items`."""
        image = self.rows[index][self.column]
        if image is None or not (image["bytes"] or image["path"]):
            raise OSError("the row holds no image")
        if image["bytes"]:
            return bytes(image["bytes"])
        with open(os.path.join(self.folder, image["path"]), "rb") as file:
            return file.read()

    def where(self, index: int) -> str:
        """See `Items`."""
        return f"{self.folder}: row {index} of {self.column!r}"


def open_huggingface(folder: Path, classes: Classes, least: int) -> TableItems:
    """List the rows of a data set on disk; of one with several splits, those of `train`.

    Args:
        folder: that `save_to_disk` wrote.
        classes: that rows have, in a column of labels; or none, and all labels are 0.
        least: rows that there must be.

    Raises:
        ConfigError: `datasets` is not installed, the folder holds no such data set or too few rows,
            or it is not clear which column holds images or labels.
    """
    require_folder(folder)
    datasets = _import_datasets()
    table = _load(datasets, folder)
    if len(table) < least:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds {len(table)} rows; put {least} or more there"
        )
    kinds = table.features
    column = _only(folder, "images", [n for n, k in kinds.items() if isinstance(k, datasets.Image)])
    labels = torch.zeros(len(table), dtype=torch.int64)
    if classes.names:
        found = [name for name, kind in kinds.items() if isinstance(kind, datasets.ClassLabel)]
        found = found or [name for name in ("label", "labels") if name in kinds]
        labels = _labels(folder, table, _only(folder, "labels", found), classes)
    rows = table.select_columns([column]).cast_column(column, datasets.Image(decode=False))
    names = tuple(str(number) for number in range(len(table)))
    return TableItems(folder, names, labels, rows.with_format(None), column)


def _import_datasets() -> Any:
    try:
        import datasets
    except ImportError:
        raise ConfigError(
            "data.name = 'hf' needs the package datasets, which is not installed here; "
            "pip install 'fedwan[hf]'"
        ) from None
    return datasets


def _load(datasets: Any, folder: Path) -> Any:
    try:
        loaded = datasets.load_from_disk(str(folder))
    except (OSError, ValueError, KeyError, TypeError) as error:
        reason = " ".join(str(error).split())
        raise ConfigError(
            f"data.path = {str(folder)!r} cannot be read as a data set of Hugging Face's "
            f"({reason}); write it with save_to_disk"
        ) from None
    if not isinstance(loaded, datasets.DatasetDict):
        return loaded
    if _SPLIT not in loaded:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds the splits {', '.join(loaded)} and no {_SPLIT!r}; "
            f"name the folder of one of them, as in {folder / next(iter(loaded))}"
        )
    return loaded[_SPLIT]


def _only(folder: Path, what: str, columns: list[str]) -> str:
    if len(columns) == 1:
        return columns[0]
    held = f"{len(columns)} columns of {what} ({', '.join(columns)})" if columns else f"no {what}"
    raise ConfigError(
        f"data.path = {str(folder)!r} holds {held} where one column is wanted; "
        "save it with datasets' Image and ClassLabel features, one column of each"
    )


def _labels(folder: Path, table: Any, column: str, classes: Classes) -> Tensor:
    """Each row's class: by the name that the table has for it, or its own number or text."""
    known: list[str] = getattr(table.features[column], "names", [])
    if classes.is_numbered:
        known = []
    given = table.with_format(None)[column]
    numbers: dict[Any, int] = {}
    for row, value in enumerate(given):
        if value not in numbers:
            in_range = isinstance(value, int) and 0 <= value < len(known)
            try:
                numbers[value] = classes.find(str(known[value] if in_range else value))
            except ValueError as error:
                raise ConfigError(f"data.path: {folder}: row {row} {error}") from None
    return torch.tensor([numbers[value] for value in given], dtype=torch.int64)
