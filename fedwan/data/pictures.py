"""From the bytes of an image file to a sample, all of a data set of one shape.

A picture that turns out to be unreadable during a run is named once, and the next one stands in for
it: one damaged file in a million should not stop a run of weeks, and the order of all other samples
stays as it is, whatever the number of workers. Where several in a row cannot be read, that is no
accident, and refused.
"""

from __future__ import annotations

import io
import logging
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset

from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["BadPicture", "Pictures", "Row", "Transform", "made"]

log = logging.getLogger(__name__)

_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
# All that Pillow raises for files that are cut short, damaged, or no images.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)
_MOST_IN_A_ROW = 8
"""Unreadable samples for which the next one stands in."""


class BadPicture(ValueError):
    """What is wrong with an image, as the end of a line that begins with its name."""


@dataclass(frozen=True)
class Transform:
    """What is made of an image: the square in its middle, or of pairs both halves, resized."""

    size: int
    """Pixels a side."""
    pairs: bool = False
    """Two images lie side by side in one; each becomes a square, whatever its shape."""
    swapped: bool = False
    """Of pairs: the left half is made from the right one, not the right from the left."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every sample; of pairs the input's channels come first."""
        return (6 if self.pairs else 3, self.size, self.size)

    def __call__(self, data: bytes) -> Tensor:
        """An image's pixels, of `shape`, RGB, float32 in [-1, 1].

        Raises:
            BadPicture: it cannot be read, or is of a size that cannot be used.
        """
        try:
            opened = Image.open(io.BytesIO(data), formats=_FORMATS)
            self._check(*opened.size)
            image = opened.convert("RGB")
            parts = self._halves(image) if self.pairs else [self._square(image)]
        except BadPicture:
            raise
        except UnidentifiedImageError:  # its own text would name an object in memory
            raise BadPicture("cannot be read as an image; remove it") from None
        except _UNREADABLE as error:
            reason = " ".join(str(error).split())
            raise BadPicture(f"cannot be read as an image ({reason}); remove it") from None
        small = [part.resize((self.size, self.size), Image.Resampling.BICUBIC) for part in parts]
        pixels = np.concatenate([np.asarray(part) for part in small], axis=2)
        # numpy copies in the thread that asks; torch would start threads of its own for it.
        return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) * (2 / 255) - 1)

    def _check(self, width: int, height: int) -> None:
        if self.pairs and width % 2:
            raise BadPicture(
                f"is {width} pixels wide, which two images side by side cannot be; "
                "make the width even"
            )
        if not self.pairs and min(width, height) < self.size:
            raise BadPicture(
                f"is {width} x {height} pixels, smaller than data.size = {self.size}; "
                "remove it, or lower data.size"
            )

    def _square(self, image: Image.Image) -> Image.Image:
        image = ImageOps.exif_transpose(image)
        side = min(image.size)
        left, top = (image.width - side) // 2, (image.height - side) // 2
        return image.crop((left, top, left + side, top + side))

    def _halves(self, image: Image.Image) -> list[Image.Image]:
        # Cut before resizing: `resize(box=…)` would look across the middle.
        half, height = image.width // 2, image.height
        boxes = [(0, 0, half, height), (half, 0, 2 * half, height)]
        return [image.crop(box) for box in (boxes[::-1] if self.swapped else boxes)]


@dataclass(frozen=True)
class Row:
    """One sample before it is decoded."""

    name: str
    """Its place on this machine, for whoever must look at it."""
    image: Any
    """As `datasets` gives it undecoded: `bytes`, or the `path` of a file; None if there is none."""
    label: int
    caption: str | None = None
    """None where the data set has none."""

    def sample(self, transform: Transform) -> Any:
        """A `Batch` of x and y without the batch; of data with captions a dict of x, y, caption.

        Raises:
            ConfigError: it cannot be read; one line that names it.
        """
        try:
            x = transform(self._bytes())
        except OSError as error:
            reason = error.strerror or error
            text = f"cannot be read ({reason}); see that it is there, or remove it"
        except BadPicture as error:
            text = str(error)
        else:
            y = torch.tensor(self.label)
            if self.caption is None:
                return Batch(x, y)
            return {"x": x, "y": y, "caption": self.caption}
        raise ConfigError(f"data.path: {self.name} {text}")

    def mode(self) -> str:
        """How its pixels are stored, as Pillow says it."""
        with Image.open(io.BytesIO(self._bytes()), formats=_FORMATS) as image:
            return image.mode

    def _bytes(self) -> bytes:
        image = self.image or {}
        if image.get("bytes"):
            return bytes(image["bytes"])
        if not image.get("path"):
            raise OSError("there is no image")
        with open(image["path"], "rb") as file:
            return file.read()


def made(rows: Iterable[Row], transform: Transform) -> Iterator[Any]:
    """Samples of rows; those that cannot be read are named and left out.

    Raises:
        ConfigError: too many in a row cannot be read.
    """
    num_bad = 0
    for row in rows:
        try:
            sample = row.sample(transform)
        except ConfigError as error:
            num_bad += 1
            if num_bad == _MOST_IN_A_ROW:
                raise ConfigError(f"{error} (nor can the {num_bad - 1} before it)") from None
            log.warning("%s; until then the next sample stands in for it", error)
        else:
            num_bad = 0
            yield sample


class Pictures(Dataset[Any]):
    """Pictures of a table, decoded when they are asked for.

    Args:
        table: of rows; see `fedwan.data.tables.Table`.
        index: which of its rows, (n,), int64.
        transform: of each.
    """

    def __init__(self, table: Any, index: Tensor, transform: Transform) -> None:
        self._table, self._index, self._transform = table, index, transform

    def __len__(self) -> int:
        return len(self._index)

    @property
    def num_samples(self) -> int:
        """As many as it is long."""
        return len(self)

    def row(self, place: int) -> Row:
        """A sample before it is decoded."""
        row: Row = self._table.row(int(self._index[place % len(self)]))
        return row

    def __getitem__(self, place: int) -> Any:
        rows = map(self.row, range(place, place + _MOST_IN_A_ROW))
        return next(made(rows, self._transform))
