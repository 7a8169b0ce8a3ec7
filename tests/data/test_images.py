"""From files to pixels."""

from __future__ import annotations

import io

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as bundled

from fedwan.data.images import BadImage, PairDecoder, SquareDecoder, to_unit


def as_file(pixels: np.ndarray, kind: str = "PNG", **settings: object) -> bytes:
    out = io.BytesIO()
    Image.fromarray(pixels).save(out, kind, **settings)
    return out.getvalue()


PHOTO = bundled.chelsea()


def test_the_square_in_the_middle_is_taken() -> None:
    pixels = SquareDecoder(100).decode(as_file(PHOTO[100:200, 50:210]))
    assert (pixels.shape, pixels.dtype) == ((3, 100, 100), torch.uint8)
    assert torch.equal(pixels, torch.tensor(PHOTO[100:200, 80:180]).permute(2, 0, 1))


def test_it_is_made_smaller_by_means_of_pixels_and_not_by_leaving_some_out() -> None:
    board = np.indices((64, 64)).sum(axis=0) % 2 * 255
    pixels = SquareDecoder(16).decode(as_file(np.stack([board] * 3, axis=2).astype(np.uint8)))
    assert (pixels.float() - 127.5).abs().max() < 8


@pytest.mark.parametrize("mode", ["L", "RGBA", "P", "CMYK"])
def test_whatever_colours_a_file_has_there_are_three_channels(mode: str) -> None:
    out = io.BytesIO()
    kind = "JPEG" if mode == "CMYK" else "PNG"
    Image.fromarray(PHOTO[:80, :80]).convert(mode).save(out, kind)
    assert SquareDecoder(64).decode(out.getvalue()).shape == (3, 64, 64)


def test_an_image_is_turned_as_its_camera_was() -> None:
    exif = Image.Exif()
    exif[0x0112] = 6  # a quarter turn
    upright = SquareDecoder(60).decode(as_file(PHOTO[:60, :60], "JPEG", quality=95))
    turned = SquareDecoder(60).decode(as_file(PHOTO[:60, :60], "JPEG", quality=95, exif=exif))
    assert torch.equal(turned, upright.rot90(-1, (1, 2)))


def test_pixels_fill_the_range_from_minus_one_to_one() -> None:
    assert to_unit(torch.tensor([0, 255], dtype=torch.uint8)).tolist() == [-1, 1]


@pytest.mark.parametrize("kind", ["PNG", "JPEG"])
def test_a_file_that_is_cut_short_is_refused_and_its_header_is_not_enough(kind: str) -> None:
    half = as_file(PHOTO[:, :450], kind)
    half = half[: len(half) // 2]
    for decoder in (SquareDecoder(64), PairDecoder(64, "")):
        decoder.check(half)
        with pytest.raises(BadImage, match="cannot be read as an image"):
            decoder.decode(half)


@pytest.mark.parametrize("data", [b"", b"no image", b"\x89PNG\r\n\x1a\n", b"\xff\xd8\xff"])
def test_what_is_no_image_is_seen_at_its_header(data: bytes) -> None:
    with pytest.raises(BadImage, match="cannot be read as an image") as caught:
        SquareDecoder(64).check(data)
    assert "object at" not in str(caught.value)


def test_an_image_that_is_too_small_is_told_with_its_size() -> None:
    with pytest.raises(BadImage, match="is 50 x 300 pixels, smaller than data.size = 64"):
        SquareDecoder(64).check(as_file(PHOTO[:300, :50]))
