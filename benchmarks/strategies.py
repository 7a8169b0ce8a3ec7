"""What each strategy sends, how good its pictures are, and what a site's absence does to them.

    python benchmarks/strategies.py [--quick] [--workload flow] [--seeds 3] --json PATH

Digits, iid, 4 sites, half of the recipe's steps, whole runs in one process (`fedwan.simulate`: the
real engine, round loop, codecs and strategies over loopback links). Every strategy is run
undisturbed, and with one site that dies at a third of the run and returns, as a new process, at two
thirds. Where a strategy has a quorum it is 3 of 4, so that the others go on; else they wait.

Row: workload strategy h steps seed absent up down bytes_up bytes_down fd fd_floor late dropped;
bytes are those of a site and a step.
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402
from fedwan.simulate import Absence  # noqa: E402

from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.simulated import run_simulated  # noqa: E402
from fedwan.app import load_run  # noqa: E402
from fedwan.config import site_names  # noqa: E402

SITES = 4
STEPS = {"flow": 2000, "gan": 1400}
QUORUM = ("round.quorum=3", "round.grace=3", "round.max_staleness=2")
INT4 = ("codec.up=int4", "codec.down=int4")
CASES: dict[str, tuple[str, ...]] = {
    "sync": ("strategy=sync",),
    "parameter_server": ("strategy=parameter_server",),
    "local_sgd": ("strategy=local_sgd", "h=20", *QUORUM),
    "scaffnew": ("strategy=scaffnew", "h=20", "round.quorum=3", "round.grace=3"),
    "local_sgd, topk2": (
        *("strategy=local_sgd", "h=5", "codec.up=topk2", "codec.down=int4"),
        *QUORUM,
    ),
    "diloco": ("strategy=diloco", "h=20", *QUORUM),
    "diloco, steps by speed": ("strategy=diloco", "h=20", "round.least_steps=1", *QUORUM),
    "streaming_diloco, int4": ("strategy=streaming_diloco", "h=20", *INT4, *QUORUM),
    "eager_diloco, int4": ("strategy=eager_diloco", "h=20", *INT4, *QUORUM),
    "async_diloco": ("strategy=async_diloco", "h=20"),
    "sparse_loco": ("strategy=sparse_loco", "h=5", *QUORUM),
}
ABSENCE = Absence(1 / 3, 2 / 3)


def measure(workload: str, case: str, seed: int, steps: int, is_disturbed: bool) -> dict[str, Any]:
    """One run, as a row."""
    words = [f"workload={workload}", f"sites={SITES}", f"seed={seed}", f"steps={steps}"]
    config = load_run(None, [*words, *CASES[case]])
    absences = {site_names(config)[1]: ABSENCE} if is_disturbed else {}
    run = run_simulated(config, absences=absences)
    quality, totals = run.totals.quality, run.totals
    # Each fragment's contributions count the samples behind it.
    first = [r for r in run.records if r["kind"] == "round" and r["fragment"] == 0]
    site_steps = sum(row["samples"] for row in first) / config.data.batch
    return {
        "workload": workload,
        "strategy": case,
        "h": config.h,
        "steps": steps,
        "seed": seed,
        "absent": is_disturbed,
        "up": config.codec.up,
        "down": config.codec.down,
        "bytes_up": round(totals.bytes_up / site_steps),
        "bytes_down": round(totals.bytes_down / site_steps),
        "fd": round(quality["fd"], 3),
        "fd_floor": round(quality["fd_floor"], 3),
        "late": totals.late,
        "dropped": totals.dropped,
    }


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Each strategy with and without the absence, means over seeds."""
    for case in dict.fromkeys(row["strategy"] for row in rows):
        whole, absent = _distances(rows, case, False), _distances(rows, case, True)
        if whole and absent:
            mean, disturbed = statistics.mean(whole), statistics.mean(absent)
            print(
                f"{case}: {mean:.3f} undisturbed, {disturbed:.3f} with an absence, "
                f"ratio {disturbed / mean:.3f}, {min(len(whole), len(absent))} seeds"
            )


def _distances(rows: list[dict[str, Any]], case: str, is_disturbed: bool) -> list[float]:
    return [r["fd"] for r in rows if (r["strategy"], r["absent"]) == (case, is_disturbed)]


def main() -> None:
    """Measure, print a table, write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--workload", choices=STEPS, default="flow")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: half of the recipe's")
    parser.add_argument("--only", default="", help="only strategies whose name holds this")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in case]
    if not cases:
        parser.error(f"--only {args.only!r} is in none of: {'; '.join(CASES)}")
    torch.set_num_threads(1)  # the sites' threads share the cores
    rows: list[dict[str, Any]] = []
    for seed in range(1 if args.quick else args.seeds):
        for case in cases:
            for is_disturbed in (False, True):
                steps = args.steps or STEPS[args.workload] // (10 if args.quick else 1)
                rows.append(measure(args.workload, case, seed, steps, is_disturbed))
                print_row(rows[-1], is_first=len(rows) == 1)
                if args.json:
                    write_rows(args.json, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
