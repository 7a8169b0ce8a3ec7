"""`samples.png`: what the EMA weights generate, beside real data where that may be shown."""

from __future__ import annotations

import io
import math
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
"""Least width of a grid of images; each sample is enlarged by a whole factor to reach it."""
_GAP_PX = 6
_MARGIN_PX = 24
_CAPTION_PX = 26
_TITLE_PX = 44
_INK, _MUTED, _PAPER = "#1c2330", "#5c6675", "#ffffff"
_BLUE, _GREY = "#2f6fde", "#9aa3af"

_MOST_PX, _MOST_POINTS = 1 << 24, 1 << 16

Floats = NDArray[np.float32]


def draw_samples(path: Path, generated: Any, real: Any | None, title: str) -> None:
    """Draw samples to a PNG, replaced whole; the same samples give the same bytes.

    Samples are tensors: images (num, 1 or 3, height, width) in [-1, 1], or points (num,
    2). Where real samples have more channels than generated ones, they are pairs: the first
    channels are what was given, drawn as a picture of their own, and the others what was to be made
    of it.
    """
    ours = generated.detach().cpu().float().numpy()
    panels = [("generated", ours)]
    if real is not None:
        given, theirs = _part(real.detach().cpu().float().numpy(), ours)
        if given is not None:
            panels.insert(0, ("given", given))
        panels.append(("real, held out", theirs))
    if ours.ndim == 2 and ours.shape[1] == 2:
        figure = _draw_points(panels, title)
    elif ours.ndim == 4 and ours.shape[1] in (1, 3):
        figure = _draw_images(panels, title)
    else:
        raise ValueError(f"samples of shape {ours.shape} are neither images nor points")
    buffer = io.BytesIO()
    # Without the library's version in it, equal pictures are equal files.
    figure.savefig(buffer, format="png", dpi=_DPI, metadata={"Software": None})
    replace_bytes(path, buffer.getvalue())


def _part(theirs: Floats, ours: Floats) -> tuple[Floats | None, Floats]:
    """What was given with real samples, if they are pairs, and what is like ours."""
    num_given = theirs.shape[1] - ours.shape[1] if theirs.ndim == ours.ndim == 4 else 0
    rest = theirs[:, num_given:] if num_given in (1, 3) else theirs
    if rest.shape[1:] != ours.shape[1:]:
        raise ValueError(f"generated {ours.shape[1:]} and real {theirs.shape[1:]} must match")
    return (theirs[:, :num_given] if num_given else None), rest


def _draw_images(panels: list[tuple[str, Floats]], title: str) -> Any:
    count, _, tall, wide = panels[0][1].shape
    columns = math.ceil(math.sqrt(count))
    scale = _scale(columns, wide)
    if count * (tall * scale + _GAP_PX) * (wide * scale + _GAP_PX) > _MOST_PX:
        raise ValueError(f"{count} pictures of {tall} by {wide} pixels are too many to show")
    mosaics = [(name, _mosaic(images[:count], columns)) for name, images in panels]
    grid_height, grid_width = mosaics[0][1].shape[:2]
    width = _MARGIN_PX + len(mosaics) * (grid_width + _MARGIN_PX)
    height = _TITLE_PX + _CAPTION_PX + grid_height + _MARGIN_PX
    lefts = [_MARGIN_PX + index * (grid_width + _MARGIN_PX) for index in range(len(mosaics))]
    figure = _figure(width, height, title, panels, lefts)
    for (_, mosaic), left in zip(mosaics, lefts, strict=True):
        # Pixel for pixel: resampling would blur what is to be judged.
        figure.figimage(mosaic, left, _MARGIN_PX + grid_height - mosaic.shape[0], origin="upper")
    return figure


def _scale(columns: int, width: int) -> int:
    return max(1, round(_GRID_PX / (columns * width)))


def _mosaic(images: Floats, columns: int) -> Floats:
    """(num, channels, height, width) in [-1, 1] to one (H, W, 3) picture in [0, 1]."""
    scale = _scale(columns, images.shape[3])
    images = np.nan_to_num(np.clip(images * 0.5 + 0.5, 0.0, 1.0))
    tiles = images.repeat(scale, axis=2).repeat(scale, axis=3).transpose(0, 2, 3, 1)
    height, width = tiles.shape[1] + _GAP_PX, tiles.shape[2] + _GAP_PX
    rows = math.ceil(len(images) / columns)
    canvas = np.ones((rows * height, columns * width, 3), np.float32)
    for index, tile in enumerate(tiles):
        top, left = index // columns * height, index % columns * width
        canvas[top : top + height - _GAP_PX, left : left + width - _GAP_PX] = tile
    return canvas[:-_GAP_PX, :-_GAP_PX]


def _draw_points(panels: list[tuple[str, Floats]], title: str) -> Any:
    if len(panels[0][1]) > _MOST_POINTS:
        raise ValueError(f"{len(panels[0][1])} points are too many to show")
    side = 2 * _MARGIN_PX  # Room for the numbers at the axes.
    width = len(panels) * (side + _GRID_PX) + _MARGIN_PX
    height = _TITLE_PX + _CAPTION_PX + _GRID_PX + _MARGIN_PX
    lefts = [side + index * (side + _GRID_PX) for index in range(len(panels))]
    figure = _figure(width, height, title, panels, lefts)
    # The real data set the frame; stray samples are drawn at its edge.
    distances = np.abs(panels[-1][1])
    reach = 1.25 * float(np.max(distances[np.isfinite(distances)], initial=1e-3))
    for index, ((_, points), left) in enumerate(zip(panels, lefts, strict=True)):
        box = (left / width, _MARGIN_PX / height, _GRID_PX / width, _GRID_PX / height)
        axes = figure.add_axes(box)
        shown = np.clip(np.nan_to_num(points), -reach, reach)
        color = _BLUE if index == 0 else _GREY
        axes.scatter(shown[:, 0], shown[:, 1], s=10, color=color, alpha=0.6, linewidths=0)
        axes.set(xlim=(-reach, reach), ylim=(-reach, reach), aspect="equal")
        axes.tick_params(labelsize=8, colors=_MUTED)
        axes.grid(color="#e6e9ee", linewidth=0.6)
        axes.set_axisbelow(True)
        for spine in axes.spines.values():
            spine.set_color("#d5dae1")
    return figure


def _figure(
    width: int, height: int, title: str, panels: list[tuple[str, Floats]], lefts: list[int]
) -> Any:
    """An empty picture with its title, and a caption over each panel."""
    # Figures without pyplot: no global state, so any thread may draw.
    figure = require("matplotlib.figure", "report").Figure(
        figsize=(width / _DPI, height / _DPI), dpi=_DPI, facecolor=_PAPER
    )
    require("matplotlib.backends.backend_agg", "report").FigureCanvasAgg(figure)
    widest = (width - 2 * _MARGIN_PX) * 72 / _DPI / (0.68 * max(1, len(title)))
    style = {"va": "top", "fontsize": min(11.0, widest), "fontweight": "bold", "color": _INK}
    figure.text(_MARGIN_PX / width, 1 - 14 / height, title, **style)
    below = 1 - (_TITLE_PX + 4) / height
    for (name, _), left in zip(panels, lefts, strict=True):
        figure.text(left / width, below, name, va="top", fontsize=9, color=_MUTED)
    return figure
