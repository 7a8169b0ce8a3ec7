"""A round by number of sites: time, and what it costs the coordinator, from 2 sites to 64.

The coordinator is the product's service in a process of its own: mutual TLS, spooled contributions,
merging, outer Nesterov steps, coded updates. Sites are light (`harness/light_sites.py`): one
process hosts all, each with a certificate and connections of its own; they send real payloads, but
compute nothing and throw updates away. Nothing is packed on the way. Everything shares this
machine's cores, so that at many sites the time of a round is the machine's: the sites' processor
time stands in the row, too.

A round lasts from one update, when the first site has it, to the next; medians over the rounds that
count. Processor seconds, bytes (both directions, all sites) and chunks' framing are a round's;
memory is the whole run's peak. `--quick`: only 4 and 16 sites.

Row: sites codec model_mb channels round_ms coordinator_cpu_s coordinator_rss_mb sites_cpu_s
sites_rss_mb round_mb
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Mapping, Sequence
from itertools import pairwise

from benchmarks.harness.fleet import ALL_SITES, COORDINATOR, run_fleet
from benchmarks.harness.table import Row

SIZES = (2, 4, 8, 16, 32, 64)
MODEL_MB = 200
"""In fp32."""
CODEC = "int4"
ROUNDS = 6
WARM_UP = 2
"""Of these, not measured."""


def cases(args: argparse.Namespace) -> Mapping[str, int]:
    return {f"{num} sites": num for num in ((4, 16) if args.quick else SIZES)}


def measure_case(args: argparse.Namespace, sites: int, seed: int) -> Row:
    words = ["workload=weights", f"model.num_bytes={MODEL_MB * 10**6}", "strategy=diloco", "h=1"]
    words += [f"sites={sites}", f"steps={ROUNDS}", "eval.every=0", "checkpoint.every=1000000"]
    words += [f"codec.up={CODEC}", f"codec.down={CODEC}"]
    run = run_fleet(words, others={ALL_SITES: ["light_sites"]})
    coordinator, found = run.parties[COORDINATOR], run.parties[ALL_SITES]
    times, coordinator_cpu_s, sites_cpu_s = zip(*found["marks"], strict=True)
    return {
        "sites": sites,
        "codec": CODEC,
        "model_mb": float(MODEL_MB),
        "channels": found["channels"],
        "round_ms": round(
            statistics.median(1e3 * (b - a) for a, b in pairwise(times[WARM_UP - 1 :])), 1
        ),
        "coordinator_cpu_s": round(_growth(coordinator_cpu_s), 3),
        "coordinator_rss_mb": round(coordinator["rss_mb"]),
        "sites_cpu_s": round(_growth(sites_cpu_s), 3),
        "sites_rss_mb": round(found["rss_mb"]),
        "round_mb": round(_growth(found["num_bytes"]) / 1e6, 2),
    }


def _growth(values: Sequence[float]) -> float:
    """In a round of those that count; there is a value after each round."""
    return (values[-1] - values[WARM_UP - 1]) / (ROUNDS - WARM_UP)
