"""Time of a round over the data plane: coordinator and sites, a process each, on loopback.

The product's two services: encode, upload, check, merge, outer Nesterov step, moving average,
encode, download, apply. A round is timed at a site, from the beginning of one step to that of the
next (the step itself only moves each weight a little), so that everything a user waits for is in
it. `--quick`: a quarter of the rounds.

`--payload 1400000000 --sites 1`: a network of 350 million, for what the two hold at most.
"""

from __future__ import annotations

import argparse
import statistics
from itertools import pairwise

from benchmarks.harness.fleet import run_fleet
from benchmarks.harness.table import Row

ROUNDS = {1_000: 300, 200_000_000: 12}
"""By payload bytes."""
WARM_UP = 3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--payload", type=int, nargs="*", default=list(ROUNDS), help="bytes")
    parser.add_argument("--sites", type=int, default=2)


def cases(args: argparse.Namespace) -> list[int]:
    payloads: list[int] = args.payload
    return payloads


def measure_case(args: argparse.Namespace, payload_bytes: int, seed: int) -> Row:
    rounds = ROUNDS.get(payload_bytes, 8)
    rounds = max(8, rounds // 4) if args.quick else rounds
    words = ["workload=weights", f"model.num_bytes={payload_bytes}", "strategy=diloco", "h=1"]
    words += [f"sites={args.sites}", f"steps={rounds}", "eval.every=0"]
    # Checkpoints are no part of a round.
    run = run_fleet([*words, f"checkpoint.every={1000 * rounds}"])
    times = sorted(
        1e3 * (after - before)
        for site in run.sites
        for before, after in list(pairwise(site["began"]))[WARM_UP:]
    )
    return {
        "payload_bytes": payload_bytes,
        "sites": args.sites,
        "round_ms_median": round(statistics.median(times), 2),
        "round_ms_p95": round(times[int(0.95 * (len(times) - 1))], 2),
        "coordinator_rss_mb": round(run.parties["coordinator"]["rss_mb"]),
        "site_rss_mb": round(max(site["rss_mb"] for site in run.sites)),
    }
