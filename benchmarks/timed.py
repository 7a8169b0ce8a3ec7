"""Utilisation on a wide area: pix2pix's size, steps of exactly 0.1 s, an emulated link per site.

57,182,660 fp32 values in pix2pix's tensors; a step moves a part of them and sleeps for what remains
of its 0.1 s, as a processor is free while a GPU computes. Everything else is the product: encoding,
mutual TLS, merging, outer steps. All parties share this machine's cores, so that a missed target
may be the machine's.

Utilisation is 0.1 s times the steps over the time that passed, from the start of one round to the
start of a later one, mean over sites: it leaves out the beginning, where the initial weights
travel, and the last round, where nothing overlaps. What delays a step by any means counts.
`--quick`: only what the project promises.
"""

from __future__ import annotations

import argparse
import statistics
from dataclasses import dataclass

from benchmarks.harness.fleet import FleetRun, run_fleet
from benchmarks.harness.table import Row, columns_of
from benchmarks.wan import Star, WanLink

STEP_S = 0.1
NUM_FRAGMENTS = 10


@dataclass(frozen=True)
class Case:
    strategy: str
    codec: str
    h: int
    sites: int
    rate_mbit: float = 100.0
    rtt_ms: float = 100.0
    loss: float = 0.0
    rounds: int = 8
    skipped: int = 3
    """Rounds at the beginning that are not measured."""
    overlap: int = 0
    """Steps between departure and landing; 0: four fifths of a round."""
    congestion: str = "auto"
    pace_mbit: float = 0.0

    @property
    def streams(self) -> bool:
        return self.strategy in ("streaming_diloco", "eager_diloco")

    @property
    def tau(self) -> int:
        return (self.overlap or self.h - max(1, self.h // 5)) if self.streams else 0

    @property
    def words(self) -> list[str]:
        words = f"workload=timed strategy={self.strategy} sites={self.sites} eval.every=0"
        words += f" steps={self.rounds * self.h} checkpoint.every={1000 * self.rounds}"
        words += f" codec.up={self.codec} codec.down={self.codec}"
        words += f" link.congestion={self.congestion}"
        if self.pace_mbit:
            words += f" link.pace_mbit={self.pace_mbit:g}"
        if self.strategy != "sync":
            words += f" h={self.h}"
        if self.streams:
            words += f" stream.fragments={NUM_FRAGMENTS} stream.tau={self.tau}"
        return words.split()


def cases(args: argparse.Namespace) -> list[Case]:
    paced = ("streaming_diloco", "int4", 20, 2)
    first = [
        Case("streaming_diloco", "int4", 50, 4),
        # The sites find out how many channels they need in the first rounds.
        Case("streaming_diloco", "int4", 20, 2, rounds=20, skipped=9),
        # The bytes alone take 0.82 of this round's time: TCP must not look for the rate any more.
        Case(*paced, rounds=20, skipped=9, overlap=19, congestion="cubic", pace_mbit=97.5),
        Case("sync", "fp32", 1, 4, rounds=4, skipped=1),
    ]
    if args.quick:
        return first
    return [
        *first,
        Case("streaming_diloco", "fp32", 50, 2, rounds=5, skipped=2),
        Case("diloco", "fp32", 50, 2, rounds=4, skipped=1),
        Case("streaming_diloco", "int2", 50, 4, rate_mbit=25.0, overlap=49),
    ]


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    link = WanLink(case.rate_mbit, case.rtt_ms, case.loss)
    with Star(case.sites, link) as star:
        return _row(case, run_fleet(case.words, star, threads=1), star.emulation)


def _row(case: Case, run: FleetRun, emulation: str) -> Row:
    first, last = case.skipped * case.h, (case.rounds - 1) * case.h
    spans = [site["began"][last] - site["began"][first] for site in run.sites]
    num_steps = last - first
    # Up and down, all sites, of contributions that left in these steps.
    measured = [row for row in run.rounds if first < row["step"] <= last]
    num_bytes = sum(row["bytes_up"] + row["bytes_down"] for row in measured)
    coordinator, sites = run.parties["coordinator"], run.sites
    return {
        **columns_of(case, "strategy codec h"),
        "fragments": NUM_FRAGMENTS if case.streams else 1,
        **columns_of(case, "tau sites rate_mbit rtt_ms loss"),
        "cc": run.config.link.congestion,
        "pace_mbit": run.config.link.pace_mbit,
        "emulation": emulation,
        "utilisation": round(statistics.mean(num_steps * STEP_S / span for span in spans), 4),
        "round_s": round(statistics.mean(spans) * case.h / num_steps, 3),
        "bytes_per_step": round(num_bytes / num_steps / case.sites),
        "coordinator_cpu_s": round(coordinator["cpu_s"] / case.rounds, 2),
        "site_cpu_s": round(statistics.mean(s["cpu_s"] for s in sites) / case.rounds, 2),
        "coordinator_rss_mb": round(coordinator["rss_mb"]),
        "site_rss_mb": round(max(site["rss_mb"] for site in sites)),
    }
