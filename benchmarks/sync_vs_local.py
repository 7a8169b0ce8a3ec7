"""Synchronous or local steps? The same samples, four strategies, four links, in real processes.

Every run trains the recipe's own number of steps on 4 sites, so that all see the same samples; the
coordinator and the sites are the product's services under mutual TLS, in network namespaces joined
by emulated links. Training is the same on every link, so quality is that of the run, and time is
what the link adds; where whole runs of a strategy end on different weights (`sha256`), this ends
with an error. `time_to_quality_s` is the run's time until the moving average first came below 1.25
times synchronous training's final distance.

A strategy that would take hours on a link is run there for a bounded number of rounds; its time is
then the mean time of those rounds times all of them, and `extrapolated` says so.
`--quick`: few steps, two links.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from contextlib import nullcontext
from statistics import fmean
from typing import NamedTuple

from benchmarks.harness.fleet import FleetRun, run_fleet
from benchmarks.harness.table import Row, columns_of, seeds_of, select
from benchmarks.wan import BARE, Star, WanLink
from fedwan.errors import FedwanError

SITES = 4
SEEDS = 1
STEPS = {"gan": 2800, "flow": 4000}
QUICK_STEPS = 400
BOUNDED_ROUNDS = 120
"""Rounds of synchronous training on a link with a round trip."""
QUALITY = 1.25
"""Times synchronous training's distance: the quality whose time is asked."""

LINKS = {
    "loopback": BARE,
    "1 Gbit/s, 40 ms": WanLink(1000.0, 40.0),
    "200 Mbit/s, 100 ms": WanLink(200.0, 100.0),
    "50 Mbit/s, 150 ms, 0.1 %": WanLink(50.0, 150.0, 0.001),
}


class Strategy(NamedTuple):
    name: str
    h: int = 20
    codec: str = "fp32"
    words: tuple[str, ...] = ()


STRATEGIES = (
    Strategy("sync", h=1),
    Strategy("local_sgd"),
    Strategy("diloco"),
    Strategy("streaming_diloco", codec="int4", words=("stream.tau=10",)),
)


def measure_one(
    workload: str, strategy: Strategy, link_name: str, seed: int, steps: int
) -> tuple[Row, list[tuple[float, float]]]:
    """One run on one link, as a row without the time to a quality, and its curve."""
    link, rounds = LINKS[link_name], steps // strategy.h
    is_slow = strategy.h == 1 and link.rtt_ms > 0
    bound = min(rounds, BOUNDED_ROUNDS) if is_slow else rounds
    is_whole, factor = bound == rounds, rounds / bound
    words = f"workload={workload} strategy={strategy.name} sites={SITES} seed={seed}"
    words += f" steps={bound * strategy.h} codec.up={strategy.codec} codec.down={strategy.codec}"
    words += f" eval.every={max(strategy.h, steps // 20) if is_whole else 0}"
    words += f" h={strategy.h}" if strategy.h > 1 else ""
    with nullcontext() if link == BARE else Star(SITES, link) as star:
        run = run_fleet([*words.split(), *strategy.words], star, threads=1)
    summary, curve = run.summary, quality_over_time(run)
    # Without start-up, measuring and farewells; with what the last update takes.
    seconds = fmean(site["busy_s"] for site in run.sites)
    return {
        "workload": workload,
        "strategy": strategy.name,
        "codec": strategy.codec,
        "link": link_name,
        **columns_of(link, "rate_mbit rtt_ms loss"),
        "emulation": star.emulation if star else "none",
        "steps": round(summary["steps"] * factor),
        "h": strategy.h,
        "wall_s": round(seconds * factor, 1),
        "bytes_up": round(sum(site["bytes_up"] for site in run.sites) * factor),
        "bytes_down": round(sum(site["bytes_down"] for site in run.sites) * factor),
        "utilisation": round(summary["utilisation"], 4),
        "fd": round(summary["quality"]["fd"], 3) if is_whole else None,
        "fd_floor": round(summary["quality"]["fd_floor"], 3),
        "time_to_quality_s": None,
        "extrapolated": not is_whole,
        "seed": seed,
        "sha256": summary["global_sha256"],
    }, curve


def quality_over_time(run: FleetRun) -> list[tuple[float, float]]:
    """(Seconds of training, distance of the moving average) as training went.

    Computing and waiting, mean over sites, until a version's contributions have left.
    """
    spent, total = dict[int, float](), 0.0
    for row in run.rounds:
        total += (row["compute_s"] + row["wait_s"]) / SITES
        spent[row["version"]] = total
    looks = [row for row in run.records if row["kind"] == "quality"]
    return [(spent[r["version"]], r["fd"]) for r in looks if r["version"] in spent]


def compare(workload: str, seed: int, steps: int, links: list[str]) -> Iterator[Row]:
    """All strategies on all links, with one seed; synchronous training on loopback comes first."""
    sync: Row = {}
    sync_curve: list[tuple[float, float]] = []
    ends: dict[str, str] = {}
    for strategy in STRATEGIES:
        for link_name in links:
            row, curve = measure_one(workload, strategy, link_name, seed, steps)
            if row["extrapolated"]:
                # The same training, bit for bit, only slower: quality by the share of its steps.
                row["fd"], last = sync["fd"], sync_curve[-1][0]
                curve = [(seconds / last * row["wall_s"], fd) for seconds, fd in sync_curve]
            elif ends.setdefault(strategy.name, row["sha256"]) != row["sha256"]:
                raise FedwanError(f"{strategy.name} trains otherwise over {link_name}: no times")
            elif strategy.h == 1:
                sync, sync_curve = row, curve
            reached = (round(s, 1) for s, fd in curve if fd <= QUALITY * sync["fd"])
            row["time_to_quality_s"] = next(reached, None)
            yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default="flow,gan")
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    links = ["loopback", "200 Mbit/s, 100 ms"] if args.quick else list(LINKS)
    for workload in select(args.workloads.split(","), args.only):
        for seed in seeds_of(args, quick=SEEDS):
            steps = args.steps or (QUICK_STEPS if args.quick else STEPS[workload])
            yield from compare(workload, seed, steps, links)
