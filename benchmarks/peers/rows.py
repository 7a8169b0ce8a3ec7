"""From what a run left to a row of the table."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from statistics import fmean, median
from typing import Any

from benchmarks.harness.table import Row
from benchmarks.peers.run import Outcome
from benchmarks.wan import BARE, WanLink
from fedwan.errors import FedwanError

COLUMNS = (
    "system link rate_mbit rtt_ms loss steps h wall_s bytes_up bytes_down utilisation fd "
    "time_to_fd_s"
).split()
"""What every row has; `steps` and `wall_s` are those that ran, `fd` is at the end of the curve."""

SKIPPED_STEPS = 2
"""Of a system that exchanges in every step: DDP arranges its buckets in the first."""


def make_row(name: str, outcome: Outcome, link: WanLink, target_fd: float) -> Row:
    """One start's row.

    The clock runs from the moment when the last site begins its first step until the last site has
    the last weights. `utilisation` is what sites compute in a window of steady work, see
    `utilisation`.

    """
    spec, sites = outcome.spec, outcome.sites
    began = max(site["began"][0] for site in sites)
    ended = max(site["ended"] for site in sites)
    bytes_up, bytes_down = outcome.traffic.between([site["began"][0] for site in sites], ended)
    curve = [[p["step"], round(p["at"] - began, 3), p["fd"]] for p in sites[0].get("curve", [])]
    return {
        "system": name,
        "link": "none" if link == BARE else "wan",
        "rate_mbit": link.rate_mbit,
        "rtt_ms": link.rtt_ms,
        "loss": link.loss,
        "steps": spec.num_steps,
        "h": spec.h,
        "wall_s": round(ended - began, 3),
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "utilisation": round(fmean(utilisation(s, spec.h) for s in sites), 5),
        "fd": curve[-1][2] if curve else None,
        "time_to_fd_s": time_to(curve, target_fd),
        "workload": spec.workload,
        "sites": spec.sites,
        "seed": spec.seed,
        "emulation": outcome.emulation,
        "congestion": outcome.congestion,
        "settings": {**spec.options, "words": list(spec.words)},
        "s_per_step": round(s_per_step(sites, spec.h), 5),
        "target_fd": target_fd,
        "fd_floor": sites[0].get("fd_floor"),
        "fd_from": "itself" if curve else None,
        "curve": curve,
        "hash": sites[0].get("hash", ""),
        "sha256": sites[0]["sha256"],
    }


def utilisation(site: dict[str, Any], h: int) -> float:
    """Share of a site's time that it computed, from its third exchange to its last but one.

    Whole rounds, each with its exchange, and neither what follows the last step nor the first two:
    sites do not all begin at once where one sends the initial weights first, and whoever overlaps
    notices in the second. For systems that exchange in every step, from the third step on.
    """
    first, last = _window(site, h)
    began, computed = site["began"][first : last + 1], site["computed"][first:last]
    times = [after - before for before, after in pairwise(began)]
    # What a step computes may have been measured elsewhere, but it fits between two steps.
    return float(sum(map(min, computed, times)) / sum(times))


def s_per_step(sites: list[dict[str, Any]], h: int) -> float:
    """Seconds from one step to the next in that window, exchanges included."""
    first, last = _window(sites[0], h)
    return fmean((s["began"][last] - s["began"][first]) / (last - first) for s in sites)


def _window(site: dict[str, Any], h: int) -> tuple[int, int]:
    steps = len(site["began"])
    first, last = (SKIPPED_STEPS, steps - 1) if h == 1 else (2 * h, steps - h)
    if last <= first:
        least = SKIPPED_STEPS + 2 if h == 1 else 4 * h
        raise FedwanError(f"{steps} steps with H = {h} hold no steady part; take {least} or more")
    return first, last


def time_to(curve: list[list[float]], target_fd: float) -> float | None:
    """Seconds to the first point of a curve that is as good as asked for; None if none is."""
    return next((at for _, at, fd in curve if fd <= target_fd), None)


def borrow_curve(row: Row, fast: Row) -> Row:
    """A row whose run was too short to train to the end, with the curve of the same run elsewhere.

    Synchronous training takes the same steps on any link, to the bit: both runs have the same hash
    after the steps that both took, or this refuses. Times are steps of the curve times the seconds
    per step that the short run measured.
    """
    if not row["hash"] or row["hash"] != fast["hash"] or row["seed"] != fast["seed"]:
        raise FedwanError(
            f"{row['system']} took other steps on {row['link']} than on {fast['link']} "
            f"(hashes {row['hash'][:12]!r} and {fast['hash'][:12]!r}): no curve can be borrowed"
        )
    curve = [[step, round(step * row["s_per_step"], 3), fd] for step, _, fd in fast["curve"]]
    return row | {
        "fd": fast["fd"],
        "fd_floor": fast["fd_floor"],
        "fd_from": "fast link",
        "fd_steps": fast["steps"],
        "time_to_fd_s": time_to(curve, row["target_fd"]),
        "curve": curve,
    }


def summarise(rows: list[Row]) -> Iterator[str]:
    """A line per system and link: medians over its starts, and how many there were."""
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row["system"], row["link"]), []).append(row)
    for (system, link), group in groups.items():
        keys = ("wall_s", "bytes_up", "bytes_down", "utilisation", "fd", "time_to_fd_s")
        found = {key: [row[key] for row in group] for key in keys}
        texts = [f"{k} {'-' if None in v else f'{median(v):.4g}'}" for k, v in found.items()]
        # Steps of the same training on the fast link, times seconds per step on this one.
        borrowed = " (counted)" if group[0]["fd_from"] == "fast link" else ""
        yield f"{system}, {link}, {len(group)} starts: {', '.join(texts)}{borrowed}"
