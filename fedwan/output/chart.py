"""The report's charts: SVG images that need nothing else, as base64."""

from __future__ import annotations

import base64
import io
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from fedwan.extras import require

_SIZE = (5.6, 2.4)
_MUTED, _DOTS_UP_TO, _MOST_NAMED = "#7d8797", 40, 24
_LARGEST = 1e30
"""Beyond it a value is not drawn, and within 1e-30 of 0 it is 0: axes divide and multiply."""

Points = Sequence[tuple[float, float | None]]
Chart = tuple[str, str]
"""Its title, and the image."""


def line_chart(
    title: str,
    lines: Mapping[str, Points],
    y_text: Callable[[float], str],
    *,
    is_log: bool = False,
    reference: str = "",
) -> Chart | None:
    """Points (x, y), in order of x, over steps; None if there is nothing to draw.

    A y of None leaves a gap, as do those at 0 and below on a logarithmic axis. The line named
    `reference` is dashed: what the others are compared with.
    """
    drawn = {name: [(x, _drawable(y, is_log)) for x, y in points] for name, points in lines.items()}
    drawn = {name: line for name, line in drawn.items() if any(y == y for _, y in line)}
    if not drawn.keys() - {reference}:
        return None
    figure, axes = _new_figure()
    for name, line in drawn.items():
        style: dict[str, Any] = {"marker": "." if len(line) <= _DOTS_UP_TO else ""}
        if name == reference:
            style = {"linestyle": "--", "color": _MUTED}
        axes.plot(*zip(*line, strict=True), label=name, linewidth=1.4, **style)
    if is_log:
        axes.set_yscale("log")
    axes.yaxis.set_major_formatter(lambda y, _: y_text(y))
    axes.set_xlabel("step", color=_MUTED, fontsize=8, loc="right")
    axes.grid(axis="y", color=_MUTED, alpha=0.3, linewidth=0.6)
    return title, _drawing(figure, has_legend=1 < len(drawn) <= _MOST_NAMED)


def stacked_bars(
    title: str,
    parts: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    value_text: Callable[[float], str],
) -> Chart | None:
    """One horizontal bar per name, all to one scale; None if there is nothing to draw."""
    if not any(sum(values) > 0 for values in bars.values()):
        return None
    figure, axes = _new_figure()
    starts = [0.0] * len(bars)
    for part, values in zip(parts, zip(*bars.values(), strict=True), strict=True):
        axes.barh(list(bars), values, left=starts, label=part)
        starts = [start + value for start, value in zip(starts, values, strict=True)]
    axes.invert_yaxis()
    axes.xaxis.set_major_formatter(lambda x, _: value_text(x))
    return title, _drawing(figure, has_legend=True)


def _new_figure() -> tuple[Any, Any]:
    # Figures without pyplot: no global state, so any thread may draw.
    figure = require("matplotlib.figure", "report").Figure(figsize=_SIZE, layout="constrained")
    axes = figure.subplots()
    axes.tick_params(colors=_MUTED, labelsize=8)
    for side, spine in axes.spines.items():
        spine.set(visible=side in ("left", "bottom"), color=_MUTED)
    return figure, axes


def _drawing(figure: Any, *, has_legend: bool) -> str:
    if has_legend:
        style = {"frameon": False, "fontsize": 8, "labelcolor": _MUTED}
        figure.legend(loc="outside upper left", ncols=6, **style)
    buffer = io.BytesIO()
    figure.savefig(buffer, format="svg", transparent=True)
    return base64.b64encode(buffer.getvalue()).decode()


def _drawable(y: float | None, is_log: bool) -> float:
    if y is None or not abs(y) <= _LARGEST:
        return math.nan
    y = y if abs(y) >= 1 / _LARGEST else 0.0
    return math.nan if is_log and y <= 0 else y
