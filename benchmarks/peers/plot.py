"""A picture of the rows: utilisation of each system, and its quality over time."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.peers.rows import Row, summarise

if TYPE_CHECKING:
    from matplotlib.axes import Axes

__all__ = ["draw"]

INK, FAINT, OURS, OTHERS = "#222222", "#bbbbbb", "#1b6ca8", "#c0722c"


def draw(rows: list[Row], path: Path) -> None:
    """Write a PNG with a panel per question that the rows answer."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [_draw_utilisation]
    if any(row["curve"] for row in rows):
        panels += [_draw_curves, _draw_times]
    figure, axes = pyplot.subplots(
        1, len(panels), figsize=(6.2 * len(panels), 0.5 * _count(rows) + 2.2), squeeze=False
    )
    for panel, ax in zip(panels, axes[0], strict=True):
        panel(rows, ax)
        ax.spines[["top", "right"]].set_visible(False)
    figure.suptitle(_title(rows), x=0.01, ha="left", fontsize=11)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _count(rows: list[Row]) -> int:
    return max(4, len(_systems(rows)))


def _title(rows: list[Row]) -> str:
    row = next((r for r in rows if r["link"] == "wan"), rows[0])
    loss = f", {100 * row['loss']:g} % lost" if row["loss"] else ""
    link = f"{row['rate_mbit']:g} Mbit/s, {row['rtt_ms']:g} ms{loss}"
    h = max(r["h"] for r in rows)
    return f"{row['workload'].replace('_', ' ')}, {row['sites']} sites, H = {h}, {link}"


def _systems(rows: Iterable[Row]) -> list[str]:
    return list(dict.fromkeys(row["system"] for row in rows))


def _colour(system: str) -> str:
    return OURS if system.startswith("fedwan") else OTHERS


def _draw_utilisation(rows: list[Row], ax: Axes) -> None:
    systems = _systems(rows)
    for place, system in enumerate(systems):
        for link, height, colour in (("none", 0.7, FAINT), ("wan", 0.4, _colour(system))):
            values = [r["utilisation"] for r in rows if (r["system"], r["link"]) == (system, link)]
            if not values:
                continue
            middle = sorted(values)[len(values) // 2]
            ax.barh(place, middle, height, color=colour, zorder=2)
            ax.plot(values, [place] * len(values), "|", color=INK, markersize=7, zorder=3)
            if link == "wan":
                ax.text(1.02, place, f"{middle:.3f}", va="center", color=INK)
    ax.set_yticks(range(len(systems)), systems)
    ax.invert_yaxis()
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of time that a site computes (grey: without the wide area)")


def _draw_curves(rows: list[Row], ax: Axes) -> None:
    wan = [row for row in rows if row["link"] == "wan" and row["curve"]]
    for number, system in enumerate(systems := _systems(wan)):
        colour = _colour(system)
        style = ("-", "--", ":", "-.")[sum(_colour(s) == colour for s in systems[:number]) % 4]
        for row in (r for r in wan if r["system"] == system):
            times, quality = [p[1] for p in row["curve"]], [p[2] for p in row["curve"]]
            label = system if row["seed"] == 0 else None
            ax.plot(times, quality, style, color=colour, label=label, linewidth=1.2)
    ax.axhline(wan[0]["target_fd"], color=FAINT, linewidth=1)
    ax.axhline(wan[0]["fd_floor"], color=FAINT, linewidth=1, linestyle=":")
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlabel("seconds of training")
    ax.set_ylabel("Fréchet distance (dotted: real data)")
    ax.legend(frameon=False, fontsize=8)


def _draw_times(rows: list[Row], ax: Axes) -> None:
    wan = [r for r in summarise(rows) if r["link"] == "wan" and r["time_to_fd_s"] is not None]
    target = next(row["target_fd"] for row in rows)
    for place, row in enumerate(wan):
        ax.barh(place, row["time_to_fd_s"], 0.5, color=_colour(row["system"]))
        ax.text(row["time_to_fd_s"], place, f" {row['time_to_fd_s']:.0f} s", va="center")
    ax.set_yticks(range(len(wan)), [row["system"] for row in wan])
    ax.invert_yaxis()
    ax.set_xscale("log")
    ax.margins(x=0.3)
    ax.set_xlabel(f"seconds to a Fréchet distance of {target:g}")
