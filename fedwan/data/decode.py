"""Decoding a picture: from the bytes of a file to what networks take."""

from __future__ import annotations

import io
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor

FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")


class BadPicture(Exception):
    """What is wrong with an image, as the end of a line that begins with its name."""


class Resize(NamedTuple):
    """What is made of an image: the square in its middle, or of pairs both halves, resized."""

    size: int
    """Pixels a side."""
    pairs: bool = False
    """Two images lie side by side in one; each becomes a square, whatever its shape."""
    swapped: bool = False
    """Of pairs: the left half is made from the right one, not the right from the left."""

    @property
    def num_bytes(self) -> int:
        """Of what is made of an image."""
        return 4 * 3 * (1 + self.pairs) * self.size**2

    def apply(self, data: bytes) -> Tensor:
        """RGB, (3, size, size) float32 in [-1, 1]; of pairs 6 channels, the input's first.

        A `BadPicture` if it cannot be read, or is of a size that cannot be used.
        """
        try:
            image = Image.open(io.BytesIO(data), formats=FORMATS)
            self._check(*image.size)
            parts = self._parts(image)
        except (BadPicture, MemoryError):
            raise
        except Exception as error:  # Pillow fails in many ways where files are damaged or odd
            # Pillow's text on what is no image would name an object in memory.
            is_known = not isinstance(error, UnidentifiedImageError)
            reason = f" ({' '.join(str(error).split())})" if is_known else ""
            raise BadPicture(f"cannot be read as an image{reason}; remove it") from None
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
        if min(width // 2 if self.pairs else width, height) < self.size:
            what = (
                "of which each half must have data.size" if self.pairs else "smaller than data.size"
            )
            mend = "make it two pictures side by side" if self.pairs else "remove it"
            raise BadPicture(
                f"is {width} x {height} pixels, {what} = {self.size}; {mend}, or lower data.size"
            )

    def _parts(self, image: Image.Image) -> list[Image.Image]:
        if not self.pairs:
            image = _rgb(ImageOps.exif_transpose(image))
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            return [image.crop((left, top, left + side, top + side))]
        # Cut before resizing: `resize(box=…)` would look across the middle.
        image, half, height = _rgb(image), image.width // 2, image.height
        boxes = [(0, 0, half, height), (half, 0, 2 * half, height)]
        return [image.crop(box) for box in (boxes[::-1] if self.swapped else boxes)]


def _rgb(image: Image.Image) -> Image.Image:
    """8 bits a channel, transparent pixels on white; a `BadPicture` of values without a range."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode[0] in "IF":
        raise BadPicture(
            f"is of Pillow's mode {image.mode!r}, numbers whose black and white are not known; "
            "save it with 8 or 16 bits a channel, or remove it"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")
