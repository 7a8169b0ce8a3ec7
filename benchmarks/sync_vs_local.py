"""Synchronous or local steps? The same samples, four strategies, four links, in real processes.

Every run trains the recipe's own number of steps on 4 sites, so that all see the same samples; the
coordinator and the sites are the product's services under mutual TLS, in network namespaces joined
by emulated links. Training is the same on every link (`global_sha256` says so), so quality is that
of the run, and time is what the link adds. `time_to_quality_s` is the run's time until the moving
average first came below 1.25 times synchronous training's final distance.

A strategy that would take hours on a link is run there for a bounded number of rounds; its time is
then the mean time of those rounds times all of them, and `extrapolated` says so.
`--quick`: few steps, two links.

Row: workload strategy codec link rate_mbit rtt_ms loss emulation steps h wall_s bytes_up bytes_down
utilisation fd fd_floor time_to_quality_s extrapolated seed
"""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from benchmarks.harness.fleet import FleetRun, linked, run_fleet
from benchmarks.harness.table import Row, columns_of, seeds_of, select
from benchmarks.wan import BARE, WanLink

SITES = 4
SEEDS = 1
STEPS = {"gan": 2800, "flow": 4000}
QUICK_STEPS = {"gan": 400, "flow": 400}
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
) -> tuple[Row, FleetRun]:
    """One run on one link, as a row without the time to a quality."""
    link, rounds = LINKS[link_name], steps // strategy.h
    is_slow = strategy.h == 1 and link.rtt_ms > 0
    bound = min(rounds, BOUNDED_ROUNDS) if is_slow else rounds
    is_whole, factor = bound == rounds, rounds / bound
    words = [f"workload={workload}", f"strategy={strategy.name}", f"sites={SITES}", f"seed={seed}"]
    words += [f"steps={bound * strategy.h}", f"codec.up={strategy.codec}", "threads=1"]
    words += [f"codec.down={strategy.codec}", *strategy.words]
    words += [f"eval.every={max(strategy.h, steps // 20) if is_whole else 0}"]
    words += [f"h={strategy.h}"] if strategy.h > 1 else []
    with linked(SITES, link) as (star, emulation, shaped):
        run = run_fleet([*words, *shaped], star)
    summary = run.summary
    return {
        "workload": workload,
        "strategy": strategy.name,
        "codec": strategy.codec,
        "link": link_name,
        **columns_of(link, "rate_mbit rtt_ms loss"),
        "emulation": emulation,
        "steps": round(summary["steps"] * factor),
        "h": strategy.h,
        "wall_s": round(sum(map(_seconds, run.rounds)) * factor, 1),
        "bytes_up": round(sum(row["bytes_up"] for row in run.rounds) * factor),
        "bytes_down": round(sum(row["bytes_down"] for row in run.rounds) * factor),
        "utilisation": round(summary["utilisation"], 4),
        "fd": round(summary["quality"]["fd"], 3) if is_whole else None,
        "fd_floor": round(summary["quality"]["fd_floor"], 3),
        "time_to_quality_s": None,
        "extrapolated": not is_whole,
        "seed": seed,
    }, run


def _seconds(row: Mapping[str, Any]) -> float:
    """Computing and waiting, mean over sites: without start-up, measuring and farewells."""
    return float(row["compute_s"] + row["wait_s"]) / SITES


def quality_over_time(run: FleetRun) -> list[tuple[float, float]]:
    """(seconds of training, distance of the moving average), as training went."""
    spent: dict[int, float] = {}
    total = 0.0
    for record in run.rounds:
        total += _seconds(record)
        spent[record["version"]] = total
    return [
        (spent[record["version"]], record["fd"])
        for record in run.records
        if record["kind"] == "quality" and record["version"] in spent
    ]


def time_to(curve: Iterable[tuple[float, float]], distance: float) -> float | None:
    return next((round(seconds, 1) for seconds, fd in curve if fd <= distance), None)


def compare(workload: str, seed: int, steps: int, links: list[str]) -> Iterator[Row]:
    """All strategies on all links, with one seed; synchronous training on loopback comes first."""
    target, fd = 0.0, None
    sync_curve: list[tuple[float, float]] = []
    for strategy in STRATEGIES:
        for link_name in links:
            row, run = measure_one(workload, strategy, link_name, seed, steps)
            curve = quality_over_time(run)
            if strategy.h == 1 and not row["extrapolated"]:
                fd, sync_curve = row["fd"], curve
                target = QUALITY * row["fd"]
            if row["extrapolated"]:
                # The same training, bit for bit, only slower: quality by the share of its steps.
                last = sync_curve[-1][0]
                curve = [(seconds / last * row["wall_s"], one) for seconds, one in sync_curve]
                row["fd"] = fd
            row["time_to_quality_s"] = time_to(curve, target)
            yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default="flow,gan")
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    links = ["loopback", "200 Mbit/s, 100 ms"] if args.quick else list(LINKS)
    for workload in select({name: name for name in args.workloads.split(",")}, args.only):
        for seed in seeds_of(args, quick=args.seeds):
            steps = args.steps or (QUICK_STEPS if args.quick else STEPS)[workload]
            yield from compare(workload, seed, steps, links)
