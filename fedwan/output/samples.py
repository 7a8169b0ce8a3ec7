"""`samples.png`: what the EMA weights generate, beside real data where that may be shown."""

from __future__ import annotations

import io
import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedwan.extras import require
from fedwan.files import replace_bytes

SAMPLES_KEPT = (
    "pictures are made of the sites' own inputs and stay with them, unless an owner sets "
    "data.show_samples (docs/data.md)"
)
"""Said where there is no picture to draw."""

_DPI = 100
_GRID_PX = 420
"""Least width of a panel; each image is enlarged by a whole factor to reach it."""
_GAP_PX, _MARGIN_PX, _CAPTION_PX, _TITLE_PX = 6, 24, 26, 44
_CHARACTER_PX, _LINE_PX, _MOST_CAPTIONS = 6.5, 15, 16
_BOLD_PX, _HEADING_PX = 9.4, 18
_INK, _MUTED, _BLUE, _GREY = "#1c2330", "#5c6675", "#2f6fde", "#9aa3af"
_MOST_PX, _MOST_POINTS = 1 << 24, 1 << 16

Floats = NDArray[np.float32]


def draw_samples(
    path: Path, generated: Any, real: Any | None, title: str, captions: Sequence[str] = ()
) -> None:
    """Draw samples to a PNG, replaced whole; the same samples give the same bytes.

    Samples are tensors: images (num, 1 or 3, height, width) in [-1, 1] or uint8, or points (num,
    2). Where real samples have more channels than generated ones, they are pairs: the first
    channels are what was given, drawn as a picture of their own, and the others what was to be made
    of it. `captions` of the generated ones come in turn. A `ValueError` if samples are neither
    images nor points, or too many to show.
    """
    panels = _panels(generated, real)
    num = len(panels["generated"])
    are_points = panels["generated"].ndim == 2
    reach, tall, wide = 0.0, _GRID_PX, _GRID_PX
    beside = 2 * _MARGIN_PX  # room for the numbers at the axes
    if are_points:
        # The real data set the frame; stray samples are drawn at its edge.
        distances = np.abs(list(panels.values())[-1])
        reach = 1.25 * float(np.max(distances[np.isfinite(distances)], initial=1e-3))
    else:
        beside = _MARGIN_PX
        panels = {name: _mosaic(images[:num], num) for name, images in panels.items()}
        tall, wide = panels["generated"].shape[:2]
    width = len(panels) * (beside + wide) + _MARGIN_PX
    told = _told(captions[:num], int((width - 2 * _MARGIN_PX) / _CHARACTER_PX))
    foot = _MARGIN_PX + len(told) * _LINE_PX
    # Between its parts alone: to `wrap` a no-break space is no space.
    whole = title.replace(" ", "\N{NO-BREAK SPACE}").replace("·\N{NO-BREAK SPACE}", "· ")
    heading = textwrap.wrap(whole, int((width - 2 * _MARGIN_PX) / _BOLD_PX)) or [""]
    head = _TITLE_PX + (len(heading) - 1) * _HEADING_PX
    height = head + _CAPTION_PX + tall + foot
    # Figures without pyplot: no global state, so any thread may draw.
    figure = require("matplotlib.figure", "report").Figure(
        figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor="white"
    )
    style = {"va": "top", "fontsize": 11, "fontweight": "bold", "color": _INK}
    for number, line in enumerate(heading):
        top = 1 - (14 + number * _HEADING_PX) / height
        figure.text(_MARGIN_PX / width, top, line, **style)
    style = {"va": "top", "fontsize": 8, "color": _MUTED, "parse_math": False}
    for number, line in enumerate(told):
        figure.text(_MARGIN_PX / width, (foot - 8 - number * _LINE_PX) / height, line, **style)
    for index, (name, panel) in enumerate(panels.items()):
        left = beside + index * (beside + wide)
        below = 1 - (head + 4) / height
        if are_points and (stray := int((~(np.abs(panel) <= reach)).any(1).sum())):
            name = f"{name}: {stray} of {len(panel)} lie outside, and are drawn at the edge"
        figure.text(left / width, below, name, va="top", fontsize=9, color=_MUTED)
        if are_points:
            box = (left / width, foot / height, wide / width, tall / height)
            _scatter(figure.add_axes(box), panel, reach, _BLUE if index == 0 else _GREY)
        else:  # pixel for pixel: resampling would blur what is to be judged
            figure.figimage(panel, left, foot, origin="upper")
    buffer = io.BytesIO()
    # Without the library's version in it, equal pictures are equal files.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    replace_bytes(path, buffer.getvalue())


def _panels(generated: Any, real: Any | None) -> dict[str, Floats]:
    """Samples by their captions, from left to right."""
    ours = _floats(generated)
    if ours.shape[1:] != (2,) and (ours.ndim != 4 or ours.shape[1] not in (1, 3)):
        raise ValueError(f"samples of shape {ours.shape} are neither images nor points")
    if ours.ndim == 2 and len(ours) > _MOST_POINTS:
        raise ValueError(f"{len(ours)} points are too many to show")
    if real is None:
        return {"generated": ours}
    theirs = _floats(real)
    if theirs.ndim == 2 and len(theirs) > _MOST_POINTS:
        raise ValueError(f"{len(theirs)} real points are too many to show")
    num_given = theirs.shape[1] - ours.shape[1] if theirs.ndim == ours.ndim == 4 else 0
    wanted = (ours.shape[1] + num_given, *ours.shape[2:])
    if theirs.shape[1:] != wanted or num_given not in (0, 1, 3):
        raise ValueError(f"generated {ours.shape[1:]} and real {theirs.shape[1:]} must match")
    given, rest = theirs[:, :num_given], theirs[:, num_given:]
    return ({"given": given} if num_given else {}) | {"generated": ours, "real, held out": rest}


def _floats(samples: Any) -> Floats:
    """Bytes of 0 to 255 as the middle of what became one of them, in [-1, 1]."""
    values: Floats = samples.detach().cpu().float().numpy()
    is_bytes = samples.element_size() == 1  # without torch, which names its dtypes
    return (values + 0.5) / 127.5 - 1 if is_bytes else values


def _told(captions: Sequence[str], most: int) -> list[str]:
    """Captions in lines of up to so many characters; the last says how many are left out.

    >>> _told(["a red fox", "a large dog in the snow"], 16)
    ['in turn, row by row:', '1  a red fox', '2  a large dog …']
    """
    if not captions:
        return []
    lines = [f"{number}  {text}" for number, text in enumerate(captions[:_MOST_CAPTIONS], 1)]
    cut = [line if len(line) <= most else f"{line[: most - 1]}…" for line in lines]
    left = len(captions) - len(cut)
    return ["in turn, row by row:", *cut, *([f"and {left} more"] if left else [])]


def most_shown(image: Any, num: int) -> int:
    """How many images of a size, (…, height, width), up to num, there is room for; 1 at least."""
    for count in range(num, 1, -1):
        _, _, height, width = _tiles(count, *image.shape[-2:])
        if count * height * width <= _MOST_PX:
            return count
    return min(num, 1)


def _tiles(count: int, tall: int, wide: int) -> tuple[int, int, int, int]:
    """Of so many images: columns, the factor of each, its height and width with the gap."""
    columns = math.ceil(math.sqrt(count))
    scale = max(1, round(_GRID_PX / (columns * wide)))
    return columns, scale, tall * scale + _GAP_PX, wide * scale + _GAP_PX


def _mosaic(images: Floats, count: int) -> Floats:
    """(num, channels, height, width) in [-1, 1] to a (H, W, 3) picture in [0, 1] of up to count."""
    tall, wide = images.shape[2:]
    columns, scale, height, width = _tiles(count, tall, wide)
    if most_shown(images, count) < count:
        raise ValueError(f"{count} pictures of {tall} by {wide} pixels are too many to show")
    images = np.nan_to_num(np.clip(images * 0.5 + 0.5, 0.0, 1.0))
    tiles = images.repeat(scale, axis=2).repeat(scale, axis=3).transpose(0, 2, 3, 1)
    canvas = np.ones((math.ceil(count / columns) * height, columns * width, 3), np.float32)
    for index, tile in enumerate(tiles):
        top, left = index // columns * height, index % columns * width
        canvas[top : top + height - _GAP_PX, left : left + width - _GAP_PX] = tile
    return canvas[:-_GAP_PX, :-_GAP_PX]


def _scatter(axes: Any, points: Floats, reach: float, color: str) -> None:
    shown = np.clip(np.nan_to_num(points), -reach, reach)
    axes.scatter(shown[:, 0], shown[:, 1], s=10, color=color, alpha=0.6, linewidths=0)
    axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal", axisbelow=True)
    axes.tick_params(labelsize=8, colors=_MUTED)
    axes.grid(color="#e6e9ee", linewidth=0.6)
    axes.spines[:].set_color("#d5dae1")
