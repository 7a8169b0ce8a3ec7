"""The handwritten digits."""

from __future__ import annotations

import torch

from fedwan.data.digits import HELD_OUT_PER_CLASS, load_digits


def test_every_bundled_image_is_in_exactly_one_part() -> None:
    train, held_out = load_digits()
    assert len(train.x) + len(held_out.x) == 1797
    assert train.x.shape[1:] == held_out.x.shape[1:] == (1, 8, 8)
    assert train.y.dtype == torch.int64


def test_forty_images_of_each_digit_are_held_out() -> None:
    _, held_out = load_digits()
    assert torch.bincount(held_out.y).tolist() == [HELD_OUT_PER_CLASS] * 10


def test_pixels_fill_the_range_from_minus_one_to_one() -> None:
    train, _ = load_digits()
    assert train.x.dtype == torch.float32
    assert (float(train.x.min()), float(train.x.max())) == (-1.0, 1.0)


def test_loading_twice_gives_the_same() -> None:
    assert all(
        torch.equal(a, b)
        for first, again in zip(load_digits(), load_digits(), strict=True)
        for a, b in zip(first, again, strict=True)
    )
