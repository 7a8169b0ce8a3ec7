"""Pictures of samples: crisp, beside real data, the same bytes for the same samples."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedwan.output import samples
from fedwan.output.samples import draw_samples, most_shown
from fedwan.site.quality import to_bytes


def images(num: int, channels: int = 1, size: int = 8, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(num, channels, size, size, generator=generator) * 2 - 1


def pixels(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path).convert("RGB"))


def test_every_pixel_of_an_image_becomes_a_square_of_one_colour(tmp_path: Path) -> None:
    checker = torch.tensor([[-1.0, 1.0], [1.0, -1.0]]).reshape(1, 1, 2, 2)
    draw_samples(tmp_path / "a.png", checker, None, "")
    picture = pixels(tmp_path / "a.png")
    ink = (picture == 0).all(axis=2)
    rows, columns = np.nonzero(ink)
    assert rows.max() - rows.min() + 1 == columns.max() - columns.min() + 1 == 420
    # Two black squares of 210 x 210, and no grey between them.
    assert ink.sum() == 2 * 210 * 210


def test_the_same_samples_give_the_same_bytes_even_those_that_diverged(tmp_path: Path) -> None:
    spoilt = images(9, channels=3)
    spoilt[:3] = torch.nan
    for name in ("a.png", "b.png"):
        draw_samples(tmp_path / name, spoilt, images(9, channels=3), "title")
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_captions_stand_below_the_pictures_which_they_do_not_move(tmp_path: Path) -> None:
    draw_samples(tmp_path / "a.png", images(4), None, "title")
    draw_samples(tmp_path / "b.png", images(4), None, "title", ["$5 and a dog" * 40] * 99)
    plain, told = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    high = len(plain) - samples._MARGIN_PX
    assert (told[:high] == plain[:high]).all()
    below = told[high:]
    assert len(below) > samples._MARGIN_PX and (below != 255).any()
    assert (below[:, -samples._MARGIN_PX // 2 :] == 255).all(), "lines are cut"


def test_a_heading_that_is_too_long_for_a_picture_goes_on_in_another_line(tmp_path: Path) -> None:
    words = "text_to_image on folder"
    draw_samples(tmp_path / "a.png", images(4), None, words)
    draw_samples(tmp_path / "b.png", images(4), None, f"{words} · streaming_diloco · seed 0")
    one, two = pixels(tmp_path / "a.png"), pixels(tmp_path / "b.png")
    assert len(two) - len(one) == samples._HEADING_PX
    assert (two[samples._HEADING_PX + samples._TITLE_PX :] == one[samples._TITLE_PX :]).all()
    first = slice(0, samples._MARGIN_PX + 6)
    assert (two[first, :200] == one[first, :200]).all(), "of the same size"


def test_pictures_that_came_as_bytes_are_drawn_as_they_were(tmp_path: Path) -> None:
    spoilt = 1.5 * images(9, channels=3)
    spoilt[:2], spoilt[2:4], spoilt[4] = torch.nan, torch.inf, -torch.inf
    draw_samples(tmp_path / "a.png", spoilt, images(9, 3), "title")
    draw_samples(tmp_path / "b.png", to_bytes(spoilt), to_bytes(images(9, 3)), "title")
    assert (pixels(tmp_path / "a.png") == pixels(tmp_path / "b.png")).all()


def test_points_are_scattered_in_the_frame_of_the_real_ones(tmp_path: Path) -> None:
    real = torch.randn(100, 2, generator=torch.Generator().manual_seed(0))
    generated = real.clone()
    generated[0] = torch.tensor([1e9, float("nan")])
    draw_samples(tmp_path / "points.png", generated, real, "ring")
    assert (pixels(tmp_path / "points.png") != 255).any()


def test_what_cannot_be_drawn_is_refused(tmp_path: Path) -> None:
    for generated, real, says in (
        (torch.zeros(4, 3), None, "neither images nor points"),
        (torch.zeros(4, 2, 8, 8), None, "neither images nor points"),
        (torch.zeros(4), None, "neither images nor points"),
        (torch.zeros(70_000, 2), None, "too many to show"),
        (torch.zeros(1, 2), torch.zeros(70_000, 2), "70000 real points are too many to show"),
        (torch.zeros(90_000, 1, 8, 8), None, "too many to show"),
        (images(4), images(4, 3, 16), "must match"),
        (torch.zeros(4, 2), torch.zeros(5), "must match"),
        (torch.zeros(4, 2), torch.zeros(()), "must match"),
    ):
        with pytest.raises(ValueError, match=says):
            draw_samples(tmp_path / "a.png", generated, real, "t")
    assert not (tmp_path / "a.png").exists()


def test_as_many_as_it_says_are_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(samples, "_MOST_PX", 1 << 21)
    large = torch.zeros(1, 1, 512, 512).expand(99, -1, -1, -1)
    most = most_shown(large, 99)
    assert 1 < most < 99 and most_shown(large, 3) == 3
    draw_samples(tmp_path / "a.png", large[:most], None, "")
    with pytest.raises(ValueError, match="too many to show"):
        draw_samples(tmp_path / "b.png", large[: most + 1], None, "")


@pytest.mark.parametrize("num_given", [1, 3])
def test_pairs_are_drawn_as_what_was_given_what_was_made_and_what_is_real(
    tmp_path: Path, num_given: int
) -> None:
    made, pairs = images(16, 3, 32), images(16, num_given + 3, 32, seed=1)
    draw_samples(tmp_path / "pairs.png", made, pairs, "title")
    draw_samples(tmp_path / "both.png", made, pairs[:, num_given:], "title")
    three, two = pixels(tmp_path / "pairs.png"), pixels(tmp_path / "both.png")
    assert three.shape[0] == two.shape[0]
    grid = three.shape[1] - two.shape[1]
    # What was made and what is real stand to the right of what was given, as they would alone.
    assert (three[80:, grid + 40 :] == two[80:, 40:]).all()
