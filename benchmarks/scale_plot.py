"""The picture of `scale.py`: time, processor time and memory by number of sites."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

__all__ = ["draw"]

BLUE, ORANGE, GREY = "#1f5f9e", "#d9731a", "0.6"
FLAT = 1.3
"""What the coordinator's memory may grow by."""


def draw(rows: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Three panels over the number of sites; dashed lines are what the project promises."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(12, 3.8), layout="constrained")
    sites = [row["sites"] for row in rows]
    base = next((row for row in rows if row["sites"] >= 4), rows[-1])
    time_axes, cpu_axes, memory_axes = figure.subplots(1, 3)

    bytes_ratio = [row["round_mb"] / base["round_mb"] for row in rows]
    like_bytes = [base["round_ms"] / 1e3 * ratio for ratio in bytes_ratio]
    time_axes.plot(sites, like_bytes, "--", color=GREY, label="as the bytes grow")
    time_axes.plot(sites, [row["round_ms"] / 1e3 for row in rows], "o-", color=BLUE, label="round")
    time_axes.set_title("time of a round, s")

    cores = [row["coordinator_cpu_s"] for row in rows]
    cpu_axes.plot(sites, cores, "o-", color=BLUE, label="coordinator")
    cpu_axes.plot(
        sites, [row["sites_cpu_s"] for row in rows], "o-", color=ORANGE, label="all sites"
    )
    cpu_axes.set_title("processor time of a round, s")
    for axes in (time_axes, cpu_axes):
        axes.set_yscale("log", base=10)
        axes.yaxis.set_major_formatter("{x:g}")

    memory = [row["coordinator_rss_mb"] for row in rows]
    limit = FLAT * base["coordinator_rss_mb"]
    memory_axes.axhline(
        limit, color=GREY, linestyle="--", label=f"{FLAT:g} x that with {base['sites']} sites"
    )
    memory_axes.plot(sites, memory, "o-", color=BLUE, label="coordinator")
    memory_axes.set_ylim(0, 1.15 * max(limit, *memory, 1))
    memory_axes.set_title("peak memory, MB")
    for axes in (time_axes, cpu_axes, memory_axes):
        axes.set_xscale("log", base=2)
        axes.set_xticks(sites, [str(num) for num in sites])
        axes.set_xlabel(f"sites ({rows[0]['model_mb']:g} MB model, {rows[0]['codec']})")
        axes.spines[["top", "right"]].set_visible(False)
        axes.legend(frameon=False, fontsize=9)
    figure.savefig(path, dpi=150)
