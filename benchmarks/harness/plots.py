"""Pictures of rows: panels of bars or lines, side by side."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

__all__ = ["Panel", "Series", "draw"]

COLORS = ("#2a6f97", "#d9731a", "#8ecae6", "#f2c199", "#e76f51", "#6c757d", "#adb5bd")


@dataclass(frozen=True)
class Series:
    """One colour: a bar at every tick of the panel, or a line."""

    label: str
    values: Sequence[float | None]
    at: Sequence[float] = ()
    """Where on the x axis, of a line."""
    style: str = "o-"


@dataclass(frozen=True)
class Panel:
    """One set of axes."""

    title: str
    series: Sequence[Series]
    ticks: Sequence[str] = ()
    """Names under the groups of bars."""
    x: str = ""
    y: str = ""
    log: str = ""
    """Logarithmic axes: `x`, `y` or `xy`."""
    limit: float | None = None
    """A dashed line across: what the project promises, or what a link carries."""


def draw(panels: Sequence[Panel], path: Path) -> None:
    """Write a PNG."""
    from matplotlib.figure import Figure

    width = sum(max(4.5, 1 + 0.9 * len(panel.ticks)) for panel in panels)
    figure = Figure(figsize=(width, 4.4), layout="constrained")
    for axes, panel in zip(figure.subplots(1, len(panels), squeeze=False)[0], panels, strict=True):
        _draw(axes, panel)
    figure.savefig(path, dpi=150)


def _draw(axes: Any, panel: Panel) -> None:
    for index, series in enumerate(panel.series):
        color = COLORS[index % len(COLORS)]
        if panel.ticks:
            share = 0.8 / len(panel.series)
            shift = (index - (len(panel.series) - 1) / 2) * share
            places = [place + shift for place, v in enumerate(series.values) if v is not None]
            values = [value for value in series.values if value is not None]
            bars = axes.bar(places, values, 0.94 * share, color=color, label=series.label)
            axes.bar_label(bars, fmt="%.3g", fontsize=7, padding=1)
        else:
            axes.plot(series.at, series.values, series.style, color=color, label=series.label)
    if panel.ticks:
        turned = {"rotation": 30, "ha": "right"} if len(max(panel.ticks, key=len)) > 12 else {}
        axes.set_xticks(range(len(panel.ticks)), panel.ticks, fontsize=8, **turned)
    if panel.limit is not None:
        axes.axhline(panel.limit, color="0.4", linewidth=0.8, linestyle="--")
    for axis in panel.log:
        getattr(axes, f"set_{axis}scale")("log")
    axes.set(xlabel=panel.x, ylabel=panel.y)
    axes.set_title(panel.title, loc="left", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if any(series.label for series in panel.series):
        axes.legend(frameon=False, fontsize=8)
