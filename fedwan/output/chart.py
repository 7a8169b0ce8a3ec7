"""Charts as inline SVG: no scripts, no fonts, no colours of their own (the page's CSS has them)."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from html import escape

__all__ = ["Bar", "Series", "line_chart", "stacked_bars"]

NUM_COLORS = 8
"""Classes `c0` … `c7` of the page's style sheet; more series begin again."""

_WIDTH, _HEIGHT = 560, 240
_LEFT, _RIGHT, _TOP, _BOTTOM = 58, 12, 10, 34
_MOST_POINTS = 400
_DOTS_UP_TO = 40


@dataclass(frozen=True)
class Series:
    """A line: points (x, y) in order of x; a y of None leaves a gap."""

    name: str
    points: Sequence[tuple[float, float | None]]
    color: int = 0
    is_reference: bool = False
    """Dashed and grey: what the others are compared with."""


@dataclass(frozen=True)
class Bar:
    """A row of parts, drawn one after the other."""

    name: str
    parts: Sequence[tuple[str, float]] = field(default_factory=tuple)


def line_chart(
    title: str,
    series: Sequence[Series],
    x_label: str,
    y_text: Callable[[float], str],
    log_y: bool = False,
) -> str:
    """A figure with lines, axes, and a legend if there is more than one line.

    Args:
        title: caption of the figure.
        series: the lines; those without a drawable point are left out.
        x_label: below the axis.
        y_text: writes a value of the y axis.
        log_y: draw the y axis by its logarithm; points at 0 and below are left out.

    Returns:
        HTML; empty if there is nothing to draw.
    """
    drawable = [(s, _drawable(s.points, log_y)) for s in series]
    drawable = [(s, points) for s, points in drawable if any(y is not None for _, y in points)]
    if not any(not s.is_reference for s, _ in drawable):
        return ""
    xs = [x for _, points in drawable for x, y in points if y is not None]
    ys = [y for _, points in drawable for _, y in points if y is not None]
    x_scale = _Scale(0.0 if min(xs) >= 0 else min(xs), max(xs), _LEFT, _WIDTH - _RIGHT)
    y_scale = _Scale(*_y_range(ys, log_y), _HEIGHT - _BOTTOM, _TOP, log_y)
    body = [_axes(x_scale, y_scale, x_label, y_text)]
    # References first, so that nothing is hidden behind them.
    for s, points in sorted(drawable, key=lambda pair: not pair[0].is_reference):
        body.append(_line(s, points, x_scale, y_scale, y_text))
    names = [(s.name, "ref" if s.is_reference else f"c{s.color % NUM_COLORS}") for s, _ in drawable]
    return _figure(title, _HEIGHT, "".join(body), names if len(names) > 1 else [])


def stacked_bars(title: str, bars: Sequence[Bar], value_text: Callable[[float], str]) -> str:
    """A figure with one horizontal bar per row, all to one scale.

    Args:
        title: caption of the figure.
        bars: the rows; part k of every row has colour k.
        value_text: writes a part's value.

    Returns:
        HTML; empty if there is nothing to draw.
    """
    longest = max((sum(value for _, value in bar.parts) for bar in bars), default=0.0)
    if not longest > 0:
        return ""
    row, left = 30, 84
    scale = _Scale(0.0, longest, left, _WIDTH - _RIGHT)
    body = []
    for index, bar in enumerate(bars):
        y, start = index * row + 6, 0.0
        body.append(
            f'<text x="{left - 8}" y="{y + 14}" class="tick" text-anchor="end">'
            f"{escape(bar.name)}</text>"
        )
        for color, (name, value) in enumerate(bar.parts):
            x0, x1 = scale(start), scale(start + value)
            body.append(
                f'<rect x="{x0:.1f}" y="{y}" width="{max(0.0, x1 - x0):.1f}" height="20" '
                f'class="fill c{color % NUM_COLORS}"><title>{escape(bar.name)}: {escape(name)} '
                f"{escape(value_text(value))}</title></rect>"
            )
            start += value
    names = [(name, f"c{color % NUM_COLORS}") for color, (name, _) in enumerate(bars[0].parts)]
    return _figure(title, len(bars) * row + 6, "".join(body), names)


class _Scale:
    """Maps values to pixels."""

    def __init__(self, low: float, high: float, start: float, end: float, log: bool = False):
        self._map: Callable[[float], float] = math.log10 if log else float
        if high - low <= 1e-6 * max(abs(low), abs(high)):  # One value, give or take rounding.
            pad = 0.5 * abs(low) or 0.5
            low, high = (low / 2, low * 2) if log else (low - pad, high + pad)
        self.low, self.high, self.start, self.end, self.log = low, high, start, end, log

    def __call__(self, value: float) -> float:
        low, high = self._map(self.low), self._map(self.high)
        return self.start + (self._map(value) - low) / (high - low) * (self.end - self.start)

    def ticks(self) -> list[float]:
        """Round values, about five."""
        if self.log:
            first, last = math.floor(math.log10(self.low)), math.ceil(math.log10(self.high))
            digits = (1.0,) if last - first > 3 else (1.0, 2.0, 5.0)
            values = [digit * 10.0**power for power in range(first, last + 1) for digit in digits]
        else:
            step = _nice_step((self.high - self.low) / 5)
            first = math.ceil(self.low / step)
            values = [step * k for k in range(first, math.floor(self.high / step) + 1)]
        slack = 1e-9 * (self.high - self.low)
        return [value for value in values if self.low - slack <= value <= self.high + slack]


def _nice_step(rough: float) -> float:
    power = 10.0 ** math.floor(math.log10(rough))
    return power * next(digit for digit in (1, 2, 5, 10) if digit * power >= rough * 0.999)


def _y_range(ys: Sequence[float], log: bool) -> tuple[float, float]:
    low, high = min(ys), max(ys)
    if log:
        return low / 1.15, high * 1.15
    # From zero where zero is near, so that small wiggles do not look like cliffs.
    if 0 <= low < 0.5 * high:
        low = 0.0
    pad = 0.05 * (high - low)
    return (low if low == 0 else low - pad), high + pad


def _drawable(
    points: Sequence[tuple[float, float | None]], log: bool
) -> list[tuple[float, float | None]]:
    """Finite points, thinned to what a screen can show; the last one always stays."""
    kept = [
        (x, y if y is not None and math.isfinite(y) and (y > 0 or not log) else None)
        for x, y in points
    ]
    stride = max(1, math.ceil(len(kept) / _MOST_POINTS))
    return kept[(len(kept) - 1) % stride :: stride] if kept else []


def _axes(x: _Scale, y: _Scale, x_label: str, y_text: Callable[[float], str]) -> str:
    parts = []
    for value in y.ticks():
        py = y(value)
        parts.append(
            f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{py:.1f}" y2="{py:.1f}" class="grid"/>'
            f'<text x="{_LEFT - 7}" y="{py + 3.5:.1f}" class="tick" text-anchor="end">'
            f"{escape(y_text(value))}</text>"
        )
    bottom = _HEIGHT - _BOTTOM
    for value in x.ticks():
        parts.append(
            f'<text x="{x(value):.1f}" y="{bottom + 15}" class="tick" text-anchor="middle">'
            f"{value:,.10g}</text>"
        )
    parts.append(
        f'<line x1="{_LEFT}" x2="{_WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}" class="axis"/>'
        f'<text x="{_WIDTH - _RIGHT}" y="{_HEIGHT - 4}" class="tick" text-anchor="end">'
        f"{escape(x_label)}</text>"
    )
    return "".join(parts)


def _line(
    series: Series,
    points: Sequence[tuple[float, float | None]],
    x: _Scale,
    y: _Scale,
    y_text: Callable[[float], str],
) -> str:
    kind = "ref" if series.is_reference else f"c{series.color % NUM_COLORS}"
    path, pen_down, dots = [], False, []
    for px, py in points:
        if py is None:
            pen_down = False
            continue
        at = f"{x(px):.1f} {y(py):.1f}"
        path.append(f"{'L' if pen_down else 'M'}{at}")
        pen_down = True
        label = f"{series.name}: {y_text(py)} at {px:,.10g}"
        dots.append(
            f'<circle cx="{x(px):.1f}" cy="{y(py):.1f}" r="2.6" class="fill {kind}">'
            f"<title>{escape(label)}</title></circle>"
        )
    line = (
        f'<path d="{"".join(path)}" class="line {kind}"><title>{escape(series.name)}</title></path>'
    )
    return line + ("".join(dots) if len(dots) <= _DOTS_UP_TO and not series.is_reference else "")


def _figure(title: str, height: float, body: str, names: Sequence[tuple[str, str]]) -> str:
    legend = "".join(
        f'<span><i class="swatch {kind}"></i>{escape(name)}</span>' for name, kind in names
    )
    return (
        f"<figure><figcaption>{escape(title)}</figcaption>"
        f'<svg viewBox="0 0 {_WIDTH} {height:g}" role="img" aria-label="{escape(title)}">'
        f"{body}</svg>" + (f'<div class="legend">{legend}</div>' if legend else "") + "</figure>"
    )
