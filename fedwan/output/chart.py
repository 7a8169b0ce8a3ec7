"""Charts: where lines, bars and ticks stand, in pixels; `report.html` draws them as inline SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

WIDTH, HEIGHT = 560, 240
NUM_COLORS = 8
"""Classes `c0` … `c7` of the page's style sheet; more series begin again."""

_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_MOST_POINTS = 400
_DOTS_UP_TO = 40
_LARGEST = 1e300
"""Beyond it a value is not drawn, and within 1 / 1e300 of 0 it is 0: axes divide and multiply."""

Points = Sequence[tuple[float, float | None]]
Chart = Mapping[str, Any]


class Series(NamedTuple):
    """A line: points (x, y) in order of x; a y of None leaves a gap."""

    name: str
    points: Points
    is_reference: bool = False
    """Dashed and grey: what the others are compared with."""


def line_chart(
    title: str, series: Sequence[Series], y_text: Callable[[float], str], is_log: bool = False
) -> Chart | None:
    """Lines over steps; None if there is nothing to draw. `y_text` writes a value of the y axis.

    A logarithmic axis leaves out points at 0 and below.
    """
    thinned = [s._replace(points=_drawable(s.points, is_log)) for s in series]
    shown = [s for s in thinned if any(y is not None for _, y in s.points)]
    if all(s.is_reference for s in shown):
        return None
    known = [(x, y) for s in shown for x, y in s.points if y is not None]
    xs, ys = [x for x, _ in known], [y for _, y in known]
    x_axis = _Axis(min(0.0, *xs), max(xs), _LEFT, WIDTH - _RIGHT)
    y_axis = _Axis(*_y_range(min(ys), max(ys), is_log), HEIGHT - _BOTTOM, _TOP, is_log)
    lines = []
    for color, s in enumerate(shown):
        path, dots, pen = "", [], "M"
        for x, y in s.points:
            if y is not None:
                path += f"{pen}{x_axis(x):.1f} {y_axis(y):.1f}"
                dots.append(((x_axis(x), y_axis(y)), f"{s.name}: {y_text(y)} at {x:,.10g}"))
            pen = "M" if y is None else "L"
        kind = "ref" if s.is_reference else f"c{color % NUM_COLORS}"
        has_dots = len(dots) <= _DOTS_UP_TO and not s.is_reference
        lines.append({"name": s.name, "kind": kind, "path": path, "dots": dots if has_dots else []})
    # References first, so that nothing is hidden behind them.
    lines.sort(key=lambda line: line["kind"] != "ref")
    return {
        "title": title,
        "height": HEIGHT,
        "box": (_LEFT, WIDTH - _RIGHT, HEIGHT - _BOTTOM),
        "x_ticks": [(x_axis(value), f"{value:,.10g}") for value in x_axis.ticks()],
        "y_ticks": [(y_axis(value), y_text(value)) for value in y_axis.ticks()],
        "lines": lines,
        "legend": [(line["name"], line["kind"]) for line in lines] if len(lines) > 1 else [],
    }


def stacked_bars(
    title: str,
    parts: Sequence[str],
    bars: Mapping[str, Sequence[float]],
    value_text: Callable[[float], str],
) -> Chart | None:
    """One horizontal bar per name, all to one scale; None if there is nothing to draw."""
    longest = max((sum(values) for values in bars.values()), default=0.0)
    if not longest > 0:
        return None
    axis = _Axis(0.0, longest, 84, WIDTH - _RIGHT)
    rows = []
    for bar, values in bars.items():
        cells, start = [], 0.0
        for color, (part, value) in enumerate(zip(parts, values, strict=True)):
            label = f"{bar}: {part} {value_text(value)}"
            cells.append((axis(start), axis(start + value) - axis(start), f"c{color}", label))
            start += value
        rows.append((bar, cells))
    legend = [(part, f"c{color}") for color, part in enumerate(parts)]
    return {"title": title, "height": 30 * len(rows) + 6, "bars": rows, "legend": legend}


class _Axis:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, is_log: bool = False):
        if high - low <= 1e-6 * max(abs(low), abs(high)):  # one value, give or take rounding
            pad = 0.5 * abs(low) or 0.5
            low, high = (low / 2, low * 2) if is_log else (low - pad, high + pad)
        self._map: Callable[[float], float] = math.log10 if is_log else float
        self.low, self.high, self.start, self.end, self.is_log = low, high, start, end, is_log

    def __call__(self, value: float) -> float:
        low, high = self._map(self.low), self._map(self.high)
        return self.start + (self._map(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if self.is_log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
            values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        else:
            rough = (self.high - self.low) / 5
            power = 10.0 ** math.floor(math.log10(rough))
            step = power * next(digit for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)
            first, last = math.ceil(self.low / step), math.floor(self.high / step)
            values = [step * k for k in range(first, last + 1)]
        slack = 1e-9 * (self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def _y_range(low: float, high: float, is_log: bool) -> tuple[float, float]:
    if is_log:
        return low / 1.15, high * 1.15
    # From zero where zero is near, so that small wiggles do not look like cliffs.
    low = 0.0 if 0 <= low < 0.5 * high else low
    pad = 0.05 * (high - low)
    return (low if low == 0 else low - pad), high + pad


def _drawable(points: Points, is_log: bool) -> Points:
    """What can be drawn, thinned to what a screen can show; the last point always stays."""
    stride = max(1, math.ceil(len(points) / _MOST_POINTS))
    kept = points[(len(points) - 1) % stride :: stride]
    return [(x, _drawable_y(y, is_log)) for x, y in kept]


def _drawable_y(y: float | None, is_log: bool) -> float | None:
    if y is None or not abs(y) <= _LARGEST:
        return None
    y = y if abs(y) >= 1 / _LARGEST else 0.0
    return None if is_log and y <= 0 else y
