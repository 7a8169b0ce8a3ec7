"""The picture of `transport.py`: goodput by loss, a panel per link."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

TCP_SHARE = 1448 / 1500
"""What of a link's rate is left for payload under the headers of TCP and IP."""
STYLES = {
    ("cubic", "tcp_mbit"): ("#9db7d5", "one TCP flow, cubic"),
    ("cubic", "goodput_mbit"): ("#1f5f9e", "fedwan, cubic"),
    ("bbr", "tcp_mbit"): ("#f2c199", "one TCP flow, bbr"),
    ("bbr", "goodput_mbit"): ("#d9731a", "fedwan, bbr"),
}


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw every row that has a style; one panel per link, one group of bars per loss."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    links = sorted({(row["link"], row["rate_mbit"]) for row in rows}, key=lambda link: link[1])
    figure, axes = pyplot.subplots(
        1, len(links), figsize=(1.0 + 4.6 * len(links), 4.2), squeeze=False, layout="constrained"
    )
    for axis, (name, rate) in zip(axes[0], links, strict=True):
        _panel(axis, [row for row in rows if row["link"] == name], name, rate)
    axes[0][0].set_ylabel("goodput in Mbit/s")
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=5, frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _panel(axis: Any, rows: Sequence[Mapping[str, Any]], name: str, rate: float) -> None:
    losses = sorted({row["loss"] for row in rows})
    width = 0.8 / len(STYLES)
    for place, ((cc, key), (color, label)) in enumerate(STYLES.items()):
        values = {row["loss"]: row[key] for row in rows if row["cc"] == cc}
        at = [losses.index(loss) + (place - 1.5) * width for loss in values]
        bars = axis.bar(at, list(values.values()), 0.94 * width, color=color, label=label)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=1)
    axis.axhline(
        rate * TCP_SHARE, color="0.35", linewidth=0.8, linestyle="--", label="all the link carries"
    )
    axis.set_title(name, fontsize=11)
    axis.set_xticks(range(len(losses)), [f"{100 * loss:g} %" for loss in losses])
    axis.set_xlabel("packets lost")
    axis.set_ylim(0, 1.08 * rate)
    for side in ("top", "right"):
        axis.spines[side].set_visible(False)
