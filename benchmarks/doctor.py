"""The doctor's hits and false alarms: nine faults planted at one of four sites, and clean runs.

Whole runs in one process (`fedwan.simulate`) on digits, ten rounds of 20 steps, `diloco`; the
faults of `harness/faults.py` are planted from outside, each at a site that the seed picks. What
counts are the live findings of the coordinator, as they stand in `metrics.jsonl`.
`--quick`: one seed, flow alone.

Row: fault workload split seed site network named within_rounds false_alarms. `named`: the right
site, network and kind were told; `within_rounds`: in which round; `false_alarms`: everything else
that was told as wrong. Clean runs have the fault `none`.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from benchmarks.harness.faults import FAULTS, Fault, Unmeasured
from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, over_seeds, select

SITES = 4
H = 20
ROUNDS = 10
NONE = Fault("none", (), ())
SPLITS = ("iid", "dirichlet:0.3", "by_label")
"""Of clean runs."""


class Case(NamedTuple):
    """One run but for its seed."""

    fault: Fault
    workload: str
    split: str = "iid"


CASES = (
    *(Case(fault, workload) for fault in FAULTS for workload in fault.workloads),
    *(Case(NONE, workload, split) for workload in NONE.workloads for split in SPLITS),
)


def run_case(case: Case, seed: int, rounds: int = ROUNDS, h: int = H) -> dict[str, Any]:
    """Train with the fault planted; what was told of it, as a row."""
    words = [f"workload={case.workload}", f"data.split={case.split}", "data.name=digits"]
    words += ["strategy=diloco", f"sites={SITES}", f"h={h}", f"steps={h * rounds}", f"seed={seed}"]
    index = (seed + 1) % SITES

    def plant_data(site: int, shard: Any) -> Any:
        return case.fault.shard(shard, seed) if site == index else shard

    def plant_workload(site: int, workload: Any) -> Any:
        return Unmeasured(case.fault.workload(workload, h) if site == index else workload)

    run = run_simulated(words, plant_workload, wrap_shard=plant_data)
    return _row(case, seed, f"s{index + 1}", describe(*run)["findings"])


def _row(case: Case, seed: int, site: str, told: list[dict[str, Any]]) -> dict[str, Any]:
    fault = case.fault
    hits = [
        row
        for row in told
        if row["finding"] in fault.kinds
        and row["site"] == site
        and (row["network"] in fault.networks if fault.networks else row["network"] is None)
    ]
    others = [row for row in told if row not in hits]
    return {
        "fault": fault.name,
        "workload": case.workload,
        "split": case.split,
        "seed": seed,
        "site": site if fault.kinds else "-",
        "network": ",".join(sorted(str(row["network"] or "all") for row in hits)) or "-",
        "named": bool(hits) if fault.kinds else None,
        "within_rounds": min((row["version"] for row in hits), default=None),
        "false_alarms": "; ".join(_short(row) for row in others) or "none",
    }


def _short(row: dict[str, Any]) -> str:
    where = f"{row['site'] or 'all'} {row['network'] or 'all'}"
    return f"{where} {row['finding']} in round {row['version']}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, default=5)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every case over seeds."""
    names = {f"{case.fault.name} {case.workload} {case.split}": case for case in CASES}
    cases = select(names, args.only)
    if args.quick:
        cases = [case for case in cases if case.workload == "flow"]
    return over_seeds(args, cases, run_case)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Hits and false alarms."""
    named = [row["named"] for row in rows if row["named"] is not None]
    quiet = sum(row["false_alarms"] == "none" for row in rows)
    yield f"{sum(named)} of {len(named)} faults named, {quiet} of {len(rows)} runs quiet"
