"""Synchronous or local steps? The same samples, four strategies, four links, in real processes.

    python benchmarks/sync_vs_local.py [--quick] [--workloads gan,flow] [--seeds 1] --json PATH

Every run trains the recipe's own number of steps on 4 sites, so that all see the same samples; the
coordinator and the sites are the product's services under mutual TLS, in network namespaces joined
by emulated links. Training is the same on every link (`global_sha256` says so), so quality is that
of the run, and time is what the link adds. `time_to_quality_s` is the run's time until the moving
average first came below 1.25 times synchronous training's final distance.

A strategy that would take hours on a link is run there for a bounded number of rounds; its time is
then the mean time of those rounds times all of them, and `extrapolated` says so.

Row: workload strategy codec link rate_mbit rtt_ms loss emulation steps h wall_s bytes_up bytes_down
utilisation fd fd_floor time_to_quality_s extrapolated seed
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.fleet import FleetRun, run_fleet  # noqa: E402
from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.wan import Star, WanLink, available  # noqa: E402

SITES = 4
STEPS = {"gan": 2800, "flow": 4000}
QUICK_STEPS = {"gan": 400, "flow": 400}
BOUNDED_ROUNDS = 120
"""Rounds of synchronous training on a link with a round trip."""
QUALITY = 1.25
"""Times synchronous training's distance: the quality whose time is asked."""

LINKS = {
    "loopback": WanLink(rate_mbit=0.0, rtt_ms=0.0),
    "1 Gbit/s, 40 ms": WanLink(1000.0, 40.0),
    "200 Mbit/s, 100 ms": WanLink(200.0, 100.0),
    "50 Mbit/s, 150 ms, 0.1 %": WanLink(50.0, 150.0, 0.001),
}


@dataclass(frozen=True)
class Strategy:
    """A line of the table."""

    name: str
    words: tuple[str, ...]
    codec: str = "fp32"
    h: int = 20


STRATEGIES = (
    Strategy("sync", (), h=1),
    Strategy("local_sgd", ()),
    Strategy("diloco", ()),
    Strategy("streaming_diloco", ("stream.tau=10",), "int4"),
)


def measure(
    workload: str, strategy: Strategy, link_name: str, seed: int, steps: int
) -> tuple[dict[str, Any], FleetRun]:
    """One run on one link, as a row without the time to a quality."""
    link = LINKS[link_name]
    rounds = steps // strategy.h
    is_slow = strategy.h == 1 and link.rtt_ms > 0
    bound = min(rounds, BOUNDED_ROUNDS) if is_slow else rounds
    words = [
        f"workload={workload}",
        f"strategy={strategy.name}",
        f"sites={SITES}",
        f"seed={seed}",
        f"steps={bound * strategy.h}",
        f"codec.up={strategy.codec}",
        f"codec.down={strategy.codec}",
        "threads=1",
        f"eval.every={0 if bound < rounds else max(strategy.h, steps // 20)}",
        f"ema.half_life={steps * SITES * 6.4:g}",
        *strategy.words,
    ]
    if strategy.h > 1:
        words.append(f"h={strategy.h}")
    reason = available() if link.rtt_ms else "loopback"
    if link.rtt_ms and reason:
        words += [f"link.rate_mbit={link.rate_mbit:g}", f"link.rtt_ms={link.rtt_ms:g}"]
        words += [f"link.loss={link.loss:g}"] if link.loss else []
    with Star(SITES, link) if reason is None else nullcontext() as star:
        run = run_fleet(words, star)
    emulation = star.emulation if star else ("shaped" if link.rtt_ms else "none")
    return _row(workload, strategy, link_name, emulation, run, rounds / bound), run


def _row(
    workload: str, strategy: Strategy, link_name: str, emulation: str, run: FleetRun, factor: float
) -> dict[str, Any]:
    link, summary = LINKS[link_name], run.summary
    is_whole = factor == 1
    return {
        "workload": workload,
        "strategy": strategy.name,
        "codec": strategy.codec,
        "link": link_name,
        "rate_mbit": link.rate_mbit,
        "rtt_ms": link.rtt_ms,
        "loss": link.loss,
        "emulation": emulation,
        "steps": round(summary["steps"] * factor),
        "h": strategy.h,
        "wall_s": round(_training_s(run) * factor, 1),
        "bytes_up": round(_round_bytes(run, "bytes_up") * factor),
        "bytes_down": round(_round_bytes(run, "bytes_down") * factor),
        "utilisation": round(summary["utilisation"], 4),
        "fd": round(summary["quality"]["fd"], 3) if is_whole else None,
        "fd_floor": round(summary["quality"]["fd_floor"], 3),
        "time_to_quality_s": None,
        "extrapolated": not is_whole,
        "seed": run.config.seed,
    }


def _rounds(run: FleetRun) -> list[dict[str, Any]]:
    return [record for record in run.records if record["kind"] == "round"]


def _training_s(run: FleetRun) -> float:
    """Computing and waiting, mean over sites: without start-up, measuring and farewells."""
    return sum(r["compute_s"] + r["wait_s"] for r in _rounds(run)) / SITES


def _round_bytes(run: FleetRun, key: str) -> int:
    return sum(record[key] for record in _rounds(run))


def quality_over_time(run: FleetRun) -> list[tuple[float, float]]:
    """(seconds of training, distance of the moving average), as training went."""
    spent: dict[int, float] = {}
    total = 0.0
    for record in _rounds(run):
        total += (record["compute_s"] + record["wait_s"]) / SITES
        spent[record["version"]] = total
    return [
        (spent[record["version"]], record["fd"])
        for record in run.records
        if record["kind"] == "quality" and record["version"] in spent
    ]


def time_to(curve: Iterable[tuple[float, float]], distance: float) -> float | None:
    """The first time at which the distance was reached, or None."""
    return next((round(seconds, 1) for seconds, fd in curve if fd <= distance), None)


def compare(workload: str, seed: int, steps: int, links: list[str]) -> list[dict[str, Any]]:
    """All strategies on all links, with one seed."""
    rows: list[dict[str, Any]] = []
    target = 0.0
    sync_curve: list[tuple[float, float]] = []
    for strategy in STRATEGIES:
        for link_name in links:
            row, run = measure(workload, strategy, link_name, seed, steps)
            curve = quality_over_time(run)
            if strategy.h == 1 and not row["extrapolated"]:
                target, sync_curve = QUALITY * row["fd"], curve
            if row["extrapolated"]:
                # The same training, bit for bit, only slower: quality by the share of its steps.
                last = sync_curve[-1][0]
                curve = [(seconds / last * row["wall_s"], fd) for seconds, fd in sync_curve]
                row["fd"] = rows[0]["fd"]
            row["time_to_quality_s"] = time_to(curve, target)
            rows.append(row)
            print_row(row, is_first=strategy.h == 1 and len(rows) == 1)
    return rows


def main() -> None:
    """Measure, print a table, write rows and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="few steps, two links")
    parser.add_argument("--workloads", default="flow,gan")
    parser.add_argument("--steps", type=int, default=0, help="0: the recipe's own")
    parser.add_argument("--seeds", type=int, default=1)
    args = parser.parse_args()
    links = ["loopback", "200 Mbit/s, 100 ms"] if args.quick else list(LINKS)
    rows: list[dict[str, Any]] = []
    for workload in args.workloads.split(","):
        for seed in range(args.seeds):
            steps = args.steps or (QUICK_STEPS if args.quick else STEPS)[workload]
            rows += compare(workload, seed, steps, links)
            if args.json:
                write_rows(args.json, rows)
    if args.json:
        draw(rows, args.json.with_suffix(".png"))


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """Time of training by link, one group of bars for each workload."""
    from matplotlib.figure import Figure

    workloads = list(dict.fromkeys(row["workload"] for row in rows))
    figure = Figure(figsize=(5.5 * len(workloads), 4), layout="constrained")
    panels = figure.subplots(1, len(workloads), squeeze=False)[0]
    colors = ["#adb5bd", "#8ecae6", "#2a6f97", "#e76f51"]
    for axes, workload in zip(panels, workloads, strict=True):
        mine = [row for row in rows if row["workload"] == workload and row["seed"] == 0]
        links = list(dict.fromkeys(row["link"] for row in mine))
        for index, strategy in enumerate(STRATEGIES):
            heights = [r["wall_s"] for r in mine if r["strategy"] == strategy.name]
            places = [n + 0.2 * (index - 1.5) for n in range(len(links))]
            label = f"{strategy.name}, {strategy.codec}"
            axes.bar(places, heights, 0.2, label=label, color=colors[index])
        axes.set_yscale("log")
        axes.set_xticks(range(len(links)), [link.replace(", ", "\n") for link in links], fontsize=8)
        axes.set_title(f"{workload}: the same samples, {SITES} sites", fontsize=10)
        axes.set_ylabel("seconds of training")
        axes.spines[["top", "right"]].set_visible(False)
    panels[0].legend(fontsize=8, frameon=False)
    figure.savefig(path, dpi=150)


if __name__ == "__main__":
    main()
