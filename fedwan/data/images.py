"""From the bytes of an image file to pixels, all samples of a data set of one shape."""

from __future__ import annotations

import io
import struct
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

__all__ = ["BadImage", "Decoder", "PairDecoder", "SquareDecoder", "to_unit"]

# All that Pillow raises for files that are cut short, damaged, or no images.
_UNREADABLE = (
    OSError,
    SyntaxError,
    ValueError,
    EOFError,
    struct.error,
    Image.DecompressionBombError,
)


class BadImage(ValueError):
    """What is wrong with an image, as the end of a line that begins with its name."""


class Decoder(Protocol):
    """What a sample is made of."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """(channels, height, width) of every sample."""
        ...

    def check(self, data: bytes) -> None:
        """Look at an image's header alone.

        Raises:
            BadImage: it has none, or is of a size that cannot be used.
        """
        ...

    def decode(self, data: bytes) -> Tensor:
        """An image's pixels, of `shape`, uint8.

        Raises:
            BadImage: see `check`, or the rest of it cannot be read.
        """
        ...


@dataclass(frozen=True)
class SquareDecoder:
    """The square in the middle of an image, turned as its EXIF tag says, and made smaller."""

    size: int
    """Pixels a side."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """See `Decoder`."""
        return (3, self.size, self.size)

    def check(self, data: bytes) -> None:
        """See `Decoder`."""
        self._open(data)

    def decode(self, data: bytes) -> Tensor:
        """See `Decoder`."""
        image = _decoded(self._open(data))
        width, height = image.size
        side = min(width, height)
        left, top = (width - side) // 2, (height - side) // 2
        square = image.crop((left, top, left + side, top + side))
        return _channels_first(_resized(square, self.size))

    def _open(self, data: bytes) -> Image.Image:
        image = _opened(data)
        width, height = image.size
        if min(width, height) < self.size:
            raise BadImage(
                f"is {width} x {height} pixels, smaller than data.size = {self.size}; "
                "remove it, or lower data.size"
            )
        return image


@dataclass(frozen=True)
class PairDecoder:
    """Two images that lie side by side in one, each resized to a square whatever its shape."""

    size: int
    """Pixels a side."""
    direction: str
    """`b_to_a` makes the left half from the right one, anything else the right from the left."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """The input's channels before the target's."""
        return (6, self.size, self.size)

    def check(self, data: bytes) -> None:
        """See `Decoder`."""
        self._open(data)

    def decode(self, data: bytes) -> Tensor:
        """See `Decoder`."""
        image = _decoded(self._open(data), turn=False)
        width, height = image.size
        half = width // 2
        boxes = [(0, 0, half, height), (half, 0, width, height)]
        if self.direction == "b_to_a":
            boxes.reverse()
        # Cut before resizing: `resize(box=…)` would look across the middle.
        halves = [_resized(image.crop(box), self.size) for box in boxes]
        return _channels_first(np.concatenate(halves, axis=2))

    def _open(self, data: bytes) -> Image.Image:
        image = _opened(data)
        if image.size[0] % 2:
            raise BadImage(
                f"is {image.size[0]} pixels wide, which two images side by side cannot be; "
                "make the width even"
            )
        return image


def to_unit(pixels: Tensor) -> Tensor:
    """Pixels 0 … 255, uint8, to [-1, 1], float32; on the device that they are on."""
    return pixels.float() * (2 / 255) - 1


def _opened(data: bytes) -> Image.Image:
    """An image of which only the header has been read."""
    try:
        return Image.open(io.BytesIO(data))
    except UnidentifiedImageError:  # its own text would name an object in memory
        raise BadImage("cannot be read as an image; remove it") from None
    except _UNREADABLE as error:
        raise _unreadable(error) from None


def _decoded(image: Image.Image, *, turn: bool = True) -> Image.Image:
    try:
        colours = image.convert("RGB")
        return ImageOps.exif_transpose(colours) if turn else colours
    except _UNREADABLE as error:
        raise _unreadable(error) from None


def _unreadable(error: Exception) -> BadImage:
    reason = " ".join(str(error).split())
    return BadImage(f"cannot be read as an image ({reason}); remove it")


def _resized(image: Image.Image, size: int) -> np.ndarray:
    """Pixels (size, size, 3)."""
    return np.asarray(image.resize((size, size), Image.Resampling.BICUBIC))


def _channels_first(pixels: np.ndarray) -> Tensor:
    # numpy copies in the thread that asks; torch would start threads of its own for it.
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())
