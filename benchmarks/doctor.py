"""The doctor's hits and false alarms: nine faults planted at one of four sites, and clean runs.

    python benchmarks/doctor.py [--quick] [--only TEXT] [--seeds 5] [--json PATH]

Whole runs in one process (`fedwan.simulate`) on digits, ten rounds of 20 steps, `diloco`; the
faults of `benchmarks/faults.py` are planted from outside, each at a site that the seed picks. What
counts are the live findings of the coordinator, as they stand in `metrics.jsonl`.

Row: fault workload split seed site network named within_rounds false_alarms. `named`: the right
site, network and kind were told; `within_rounds`: in which round; `false_alarms`: everything else
that was told as wrong. Clean runs have the fault `none`.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any, NamedTuple

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.faults import FAULTS, Fault, Unmeasured  # noqa: E402
from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.simulated import run_simulated  # noqa: E402
from fedwan.app import load_run  # noqa: E402
from fedwan.config import site_names  # noqa: E402
from fedwan.data.shard import Shard  # noqa: E402
from fedwan.workloads.base import Workload  # noqa: E402

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
    config = load_run(None, words)
    index = (seed + 1) % SITES

    def plant_data(site: int, shard: Shard) -> Shard:
        return case.fault.shard(shard, seed) if site == index else shard

    def plant_workload(site: int, workload: Workload) -> Workload:
        planted = case.fault.workload(workload, h) if site == index else workload
        return Unmeasured(planted)

    run = run_simulated(config, plant_workload, wrap_shard=plant_data)
    told = [row for row in run.records if row.get("event") == "finding"]
    return _row(case, seed, site_names(config)[index], told)


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


def main() -> None:
    """Run all cases, print a table, write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, flow alone")
    parser.add_argument("--only", default="", help="only cases whose `fault workload split` fits")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    names = {f"{case.fault.name} {case.workload} {case.split}": case for case in CASES}
    cases = [case for name, case in names.items() if args.only in name]
    if args.quick:
        cases = [case for case in cases if case.workload == "flow"]
    if not cases:
        parser.error(f"--only {args.only!r} is in none of: {'; '.join(names)}")
    torch.set_num_threads(1)  # the sites' threads share the cores
    rows: list[dict[str, Any]] = []
    for seed in range(1 if args.quick else args.seeds):
        for case in cases:
            rows.append(run_case(case, seed))
            print_row(rows[-1], is_first=len(rows) == 1)
            if args.json:
                write_rows(args.json, rows)
    planted = [row for row in rows if row["named"] is not None]
    named = sum(row["named"] for row in planted)
    quiet = sum(row["false_alarms"] == "none" for row in rows)
    print(
        f"{named} of {len(planted)} faults named, {quiet} of {len(rows)} runs without false alarm"
    )


if __name__ == "__main__":
    main()
