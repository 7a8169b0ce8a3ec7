"""A folder of images; its subfolders may be classes."""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from fedwan.data.classes import Classes
from fedwan.data.items import require_folder
from fedwan.errors import ConfigError

__all__ = ["FolderItems", "open_folder"]

_ENDINGS = (".png", ".jpg", ".jpeg")


@dataclass(frozen=True)
class FolderItems:
    """See `fedwan.data.items.Items`."""

    folder: str
    names: tuple[str, ...]
    """Paths below the folder, in name order."""
    labels: Tensor

    def read(self, index: int) -> bytes:
        """See `Items`."""
        with open(self.where(index), "rb") as file:
            return file.read()

    def where(self, index: int) -> str:
        """See `Items`."""
        return os.path.join(self.folder, self.names[index])


def open_folder(folder: Path, classes: Classes, least: int) -> FolderItems:
    """List a folder's PNG and JPEG files, those in folders of its own too.

    Args:
        folder: which.
        classes: names of the folders right below it; or none, and all labels are 0.
        least: files that there must be.

    Raises:
        ConfigError: there is no such folder, too few images in it, or one in no class's folder.
    """
    require_folder(folder)
    # By parts, so that a folder's files are not apart for a character that sorts before a slash.
    names = sorted(_images_below(folder), key=lambda name: name.split(os.sep))
    if len(names) < least:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds {len(names)} PNG or JPEG files; "
            f"put {least} or more there"
        )
    if not classes.names:
        return FolderItems(str(folder), tuple(names), torch.zeros(len(names), dtype=torch.int64))
    numbers: dict[str, int] = {}
    labels = [_label(folder, name, classes, numbers) for name in names]
    return FolderItems(str(folder), tuple(names), torch.tensor(labels, dtype=torch.int64))


def _images_below(folder: Path) -> Iterator[str]:
    """Paths below the folder; links to folders are not followed, which might lead out of it."""
    for parent, _, files in os.walk(folder, onerror=_refuse):
        for name in files:
            if os.path.splitext(name)[1].lower() in _ENDINGS:
                yield os.path.relpath(os.path.join(parent, name), folder)


def _refuse(error: OSError) -> None:
    raise ConfigError(
        f"data.path: {error.filename} cannot be listed ({error.strerror}); let this user read it"
    )


def _label(folder: Path, name: str, classes: Classes, numbers: dict[str, int]) -> int:
    first, separator, _ = name.partition(os.sep)
    if not separator:
        raise ConfigError(
            f"data.path: {folder / name} lies in no folder of a class, which data.classes asks "
            "for; move it into one, or leave data.classes out"
        )
    if first not in numbers:
        try:
            numbers[first] = classes.find(first)
        except ValueError as error:
            raise ConfigError(f"data.path: {folder / first} {error}") from None
    return numbers[first]
