"""fedwan beside its peers: the same model, data, batches, H and link, in real processes.

    make bench-peers ARGS="--json out/peers.json"

PyTorch DDP over gloo, torchft's DiLoCo over gloo, Flower's FedAvg through its messages, and fedwan,
each on an emulated wide area and, between the same namespaces, on bare links. `--loss` is in
percent on this command line. Needs root (network namespaces) and the peers' environment.
`--quick`: one seed, fewer steps. `--systems sync-int4`: fedwan's synchronous training, int4 both
ways, whose steps are all run on the wide area.

`steps` and `wall_s` are those that ran, `fd` is at the end of the curve, bytes are those of all
sites, as the link counts them. `fd_from` says where `fd` comes from: of DDP
and Flower a bounded number of steps is run on the wide area, and their quality over steps is that
of the same training, bit for bit, on bare links.
"""

from __future__ import annotations

import argparse
import itertools
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any

from benchmarks.harness.table import (
    Row,
    columns_of,
    grouped,
    ratio_half_interval,
    seeds_of,
    select,
)
from benchmarks.peers.part import WORKLOADS, Spec
from benchmarks.peers.run import CONGESTION, Outcome, run
from benchmarks.wan import BARE, WanLink
from fedwan.errors import FedwanError, UserError


@dataclass(frozen=True)
class Variant:
    """A system with settings, and how much of it is run on a wide area."""

    system: str
    words: tuple[str, ...] = ()
    options: dict[str, dict[str, Any]] = field(default_factory=dict)
    """By workload: what suits it best, of what was tried; see docs/log.md."""
    rounds: dict[str, int] = field(default_factory=dict)
    """By workload: exchanges to run where the whole training would take too long."""


STREAMING = ("strategy=streaming_diloco",)
SYNC = "strategy=sync"
INT4 = ("codec.up=int4", "codec.down=int4")
SNOO = {"every": 50, "lr": 1.0, "momentum": 0.6}
TORCHFT = {"digits_flow": {"bucketize": True}, "timed": {"bucketize": False, "flows": 4}}
VARIANTS = {
    "ddp": Variant("ddp", options={"timed": {"flows": 4}}, rounds={"digits_flow": 150, "timed": 8}),
    "ddp-fp16": Variant(
        "ddp", options={"digits_flow": {"fp16": True}}, rounds={"digits_flow": 150}
    ),
    "ddp-snoo": Variant(
        "ddp", options={"digits_flow": {"fp16": True, "snoo": SNOO}}, rounds={"digits_flow": 150}
    ),
    "torchft": Variant("torchft", options=TORCHFT, rounds={"timed": 7}),
    "flower": Variant("flower", rounds={"digits_flow": 12, "timed": 5}),
    "sync-int4": Variant("fedwan", words=(SYNC, *INT4)),
    "fedwan-diloco": Variant("fedwan", words=("strategy=diloco",)),
    "fedwan-fp32": Variant("fedwan", words=STREAMING),
    "fedwan": Variant("fedwan", words=(*STREAMING, *INT4)),
}

NO_CHECKPOINTS = "checkpoint.every=1000000"
"""For what is timed: none of the peers writes any here."""
STEPS = {"digits_flow": 4000, "timed": 500}
QUICK_STEPS = {"digits_flow": 200, "timed": 200}
H = {"digits_flow": 20, "timed": 50}
SEEDS = 3
POINTS = 40
"""Looks at the quality."""
TARGET_FD = 1.4
"""Quality whose time is compared on digits: twice that of real data; untrained weights have 80."""


def spec_of(name: str, args: argparse.Namespace, seed: int, is_bounded: bool) -> Spec:
    variant = VARIANTS[name]
    is_timed = args.workload == "timed"
    words = variant.words
    h = 1 if variant.system == "ddp" or SYNC in words else H[args.workload]
    if STREAMING[0] in words:
        words += (f"stream.tau={4 * h // 5}", *(["stream.fragments=10"] if is_timed else []))
    if variant.system == "fedwan" and is_timed:
        words += (NO_CHECKPOINTS,)
    bound = min(args.steps, h * variant.rounds.get(args.workload, args.steps))
    options = dict(variant.options.get(args.workload, {}))
    if not is_timed:
        options["hash_at"] = bound
    # Quality needs the whole training, once; how long a step takes does not.
    return Spec(
        variant.system,
        args.workload,
        args.steps,
        h,
        seed=seed,
        stop_at=bound if bound < args.steps and (is_bounded or is_timed) else 0,
        points=0 if is_timed else POINTS,
        words=words,
        options=options,
    )


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every system, seed by seed, so that what else a machine does meets them all alike.

    A variant is on bare links first, then on the wide area; of the whole trainings by both, the
    curve is kept.
    """
    is_timed, systems = args.workload == "timed", select(args.systems, args.only)
    if is_timed and (odd := {"ddp-fp16", "ddp-snoo"} & set(systems)):
        raise UserError(
            f"{', '.join(sorted(odd))}: of digits_flow alone; take ddp, or --workload digits_flow"
        )
    args.steps = args.steps or (QUICK_STEPS if args.quick else STEPS)[args.workload]
    curves: dict[tuple[str, int], Row] = {}
    wan = WanLink(args.rate_mbit, args.rtt_ms, args.loss / 100)
    with tempfile.TemporaryDirectory() as made:
        folder = (args.keep or Path(made)).resolve()
        for seed in seeds_of(args):
            for name, link in itertools.product(systems, (BARE, wan)):
                # Where too few steps are run on a wide area, quality is measured on bare links.
                needs_curve = not is_timed and args.workload in VARIANTS[name].rounds
                if args.wan_only and link == BARE and not needs_curve:
                    continue
                key = (name, seed)
                spec = spec_of(name, args, seed, is_bounded=link != BARE)
                at = folder / f"{name}-{seed}-{'bare' if link == BARE else 'wan'}"
                row = make_row(name, run(spec, link, at), link)
                if spec.stop_at and spec.points:
                    row = borrow_curve(row, curves[key])
                curves.setdefault(key, row)
                yield row


def add_options(parser: argparse.ArgumentParser) -> None:
    systems = ["ddp", "torchft", "flower", "fedwan-fp32", "fedwan"]
    parser.add_argument("--systems", nargs="+", choices=VARIANTS, default=systems)
    parser.add_argument("--workload", choices=WORKLOADS, default="timed")
    parser.add_argument("--rate-mbit", type=float, default=200.0)
    parser.add_argument("--rtt-ms", type=float, default=100.0)
    parser.add_argument("--loss", type=float, default=0.0, help="in percent, each way")
    parser.add_argument("--steps", type=int, default=0, help="0: the workload's own")
    parser.add_argument("--wan-only", action="store_true", help="bare links only for curves")
    parser.add_argument("--keep", type=Path, help="folder for the runs' files and logs")


# From what a run left to a row --------------------------------------------------------------------

SKIPPED_STEPS = 2
"""Of a system that exchanges in every step: DDP arranges its buckets in the first."""


def make_row(name: str, outcome: Outcome, link: WanLink) -> Row:
    """One start's row: from when the last site begins until the last one has the last weights."""
    spec, sites = outcome.spec, outcome.sites
    first, last = _window(sites[0], spec.h)
    spans = [site["began"][last] - site["began"][first] for site in sites]
    began = max(site["began"][0] for site in sites)
    ended = max(site["ended"] for site in sites)
    bytes_up, bytes_down = outcome.traffic()
    curve = [[p["step"], round(p["at"] - began, 3), p["fd"]] for p in sites[0].get("curve", [])]
    return {
        "system": name,
        "link": "none" if link == BARE else "wan",
        **columns_of(link, "rate_mbit rtt_ms loss"),
        "steps": spec.num_steps,
        "h": spec.h,
        "wall_s": round(ended - began, 3),
        "bytes_up": bytes_up,
        "bytes_down": bytes_down,
        "utilisation": round(fmean(utilisation(s, spec.h) for s in sites), 5),
        "fd": curve[-1][2] if curve else None,
        "time_to_fd_s": time_to(curve),
        **columns_of(spec, "workload sites seed"),
        "emulation": outcome.emulation,
        "congestion": CONGESTION,
        "settings": {**spec.options, "words": list(spec.words)},
        "step_s": spec.step_s,
        "s_per_step": round(fmean(spans) / (last - first), 5),
        "target_fd": TARGET_FD,
        "fd_floor": sites[0].get("fd_floor"),
        "fd_from": "itself" if curve else None,
        "curve": curve,
        "hash": sites[0].get("hash", ""),
        "sha256": sites[0]["sha256"],
    }


def utilisation(site: dict[str, Any], h: int) -> float:
    """Share of a site's time that it computed, from its third exchange to its last but one.

    Sites do not all begin at once where one sends the initial weights first, and whoever overlaps
    notices in the second. For systems that exchange in every step, from the third step on.
    """
    first, last = _window(site, h)
    began, computed = site["began"][first : last + 1], site["computed"][first:last]
    times = [after - before for before, after in pairwise(began)]
    # What a step computes may have been measured elsewhere, but it fits between two steps.
    return float(sum(map(min, computed, times)) / sum(times))


def _window(site: dict[str, Any], h: int) -> tuple[int, int]:
    steps = len(site["began"])
    first, last = (SKIPPED_STEPS, steps - 1) if h == 1 else (2 * h, steps - h)
    if last <= first:
        least = SKIPPED_STEPS + 2 if h == 1 else 4 * h
        raise FedwanError(f"{steps} steps with H = {h} hold no steady part; take {least} or more")
    return first, last


def time_to(curve: list[list[float]]) -> float | None:
    """Seconds to the first point of a curve that is as good as asked for; None if none is."""
    return next((at for _, at, fd in curve if fd <= TARGET_FD), None)


def borrow_curve(row: Row, fast: Row) -> Row:
    """A row whose run was too short to train to the end, with the curve of the same run elsewhere.

    Both took the same steps to the bit, or this refuses. Times are steps of the curve times the
    seconds per step that the short run measured.
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
        "time_to_fd_s": time_to(curve),
        "curve": curve,
    }


def summarise(rows: list[Row]) -> Iterator[str]:
    """A line per system and link: medians over seeds, and by how much the last system is sooner."""
    for (system, link), group in grouped(rows, "system link").items():
        keys = ("wall_s", "bytes_up", "bytes_down", "utilisation", "fd", "time_to_fd_s")
        found = {key: [row[key] for row in group] for key in keys}
        texts = [f"{k} {'-' if None in v else f'{median(v):.4g}'}" for k, v in found.items()]
        # Steps of the same training on the fast link, times seconds per step on this one.
        borrowed = " (counted)" if group[0]["fd_from"] == "fast link" else ""
        yield f"{system}, {link}, {len(group)} seeds: {', '.join(texts)}{borrowed}"
    times = {
        system: [row["time_to_fd_s"] for row in group]
        for (system, link), group in grouped(rows, "system link").items()
        if link == "wan" and all(row["time_to_fd_s"] for row in group)
    }
    last = rows[-1]["system"]  # nothing is said beside one that has not come so far
    for other in [name for name in times if name != last and last in times]:
        ratio = fmean(times[other]) / fmean(times[last])
        half = ratio_half_interval(times[other], times[last])
        yield f"{last} is sooner than {other} by {ratio:.2f} ± {half:.2f}"
