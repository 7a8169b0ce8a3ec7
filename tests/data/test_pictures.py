"""From the bytes of an image to a sample."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from fedwan.data.pictures import BadPicture, Row, Transform, made
from fedwan.errors import ConfigError
from tests.data.files import crop, encoded


def png(image: Image.Image, **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, "PNG", **options)
    return out.getvalue()


def row(data: bytes, name: str = "a.png") -> Row:
    return Row(name, {"bytes": data, "path": None}, 1)


def test_the_middle_square_is_resized_to_values_between_minus_one_and_one() -> None:
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 8:24] = (255, 0, 51)
    x = Transform(8)(png(Image.fromarray(pixels)))
    assert x.shape == (3, 8, 8) and x.dtype == torch.float32
    assert torch.allclose(x[:, 4, 4], torch.tensor([1.0, -1.0, -0.6]))
    assert torch.equal(x.amin((1, 2)), x.amax((1, 2))), "nothing but the square"


@pytest.mark.parametrize("mode", ["L", "LA", "RGBA", "P", "CMYK", "1"])
def test_pictures_of_every_mode_become_rgb(mode: str) -> None:
    out = io.BytesIO()
    Image.fromarray(crop(0)).convert(mode).save(out, "TIFF" if mode == "CMYK" else "PNG")
    assert Transform(16)(out.getvalue()).shape == (3, 16, 16)


def test_a_picture_is_turned_as_its_tag_says() -> None:
    pixels = np.zeros((16, 16, 3), np.uint8)
    pixels[:8] = 255
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    x = Transform(8)(png(Image.fromarray(pixels), exif=exif))
    assert float(x[0, 0, 0]) == -1 and float(x[0, 7, 0]) == 1


@pytest.mark.parametrize("swapped", [False, True])
def test_pairs_are_cut_in_the_middle_before_they_are_resized(swapped: bool) -> None:
    pixels = np.zeros((20, 64, 3), np.uint8)
    pixels[:, 32:] = 255
    x = Transform(32, pairs=True, swapped=swapped)(png(Image.fromarray(pixels)))
    left, right = (1, -1) if swapped else (-1, 1)
    assert x.shape == (6, 32, 32)
    assert (x[:3] == left).all() and (x[3:] == right).all()


@pytest.mark.parametrize(
    ("data", "transform", "text"),
    [
        (b"no image", Transform(8), "cannot be read as an image; remove it"),
        (encoded(0, "png")[:300], Transform(8), r"cannot be read as an image \(.*; remove it"),
        (encoded(0, "jpg"), Transform(64), "is 48 x 40 pixels, smaller than data.size = 64"),
        (png(Image.new("RGB", (7, 4))), Transform(8, pairs=True), "is 7 pixels wide, which two"),
    ],
)
def test_what_is_no_such_picture_is_named(data: bytes, transform: Transform, text: str) -> None:
    with pytest.raises(BadPicture, match=text):
        transform(data)
    with pytest.raises(ConfigError, match=f"^data.path: a.png {text}"):
        row(data).sample(transform)


def test_a_row_without_an_image_or_its_file_is_named() -> None:
    for image in (None, {"bytes": None, "path": None}):
        with pytest.raises(ConfigError, match=r"row 3 cannot be read \(there is no image\)"):
            Row("row 3", image, 0).sample(Transform(8))
    with pytest.raises(ConfigError, match="No such file"):
        Row("b", {"bytes": None, "path": "/no/such"}, 0).sample(Transform(8))


def test_the_next_picture_stands_in_for_one_that_cannot_be_read_until_there_are_many(
    caplog: pytest.LogCaptureFixture,
) -> None:
    good, bad = row(encoded(0, "png")), row(b"no image", "bad.png")
    assert len(list(made([bad, good, bad, good], Transform(8)))) == 2
    assert "bad.png cannot be read as an image; remove it; until then" in caplog.text
    with pytest.raises(ConfigError, match=r"\(nor can the 7 before it\)"):
        list(made([good] + 8 * [bad], Transform(8)))


def test_captions_make_a_dict_of_a_sample() -> None:
    image = {"bytes": encoded(0, "png"), "path": None}
    sample = Row("a", image, 1, "a cat").sample(Transform(8))
    assert set(sample) == {"x", "y", "caption"} and sample["caption"] == "a cat"
