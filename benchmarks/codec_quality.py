"""What coding costs in picture quality: the same runs with and without it, over seeds.

    python benchmarks/codec_quality.py [--quick] [--workloads flow,gan] [--seeds 5] --json PATH

Digits, iid, 4 sites, whole runs in one process (`fedwan.simulate`: the real engine, round loop,
codecs and strategies over loopback links). `int4` codes DiLoCo's deltas and updates, H = 20, half
of the recipes' steps; `topk2` codes the deltas of plain averaging, whose updates come back as int4,
H = 5 and all steps, since what sends 1.6 % at a time needs many rounds. Each is compared with fp32,
the same H, steps and seeds.

Row: workload strategy up down h steps seed fd fd_floor bytes_up bytes_down
"""

from __future__ import annotations

import argparse
import statistics
import sys
from pathlib import Path
from typing import Any, NamedTuple

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.simulated import run_simulated  # noqa: E402
from fedwan.app import load_run  # noqa: E402

SITES = 4
STEPS = {"flow": 4000, "gan": 2800}
"""The recipes' own."""


class Case(NamedTuple):
    """A strategy with its codecs, and how long it is run."""

    strategy: str
    up: str
    down: str
    h: int
    share: float
    """Of the recipe's steps."""
    plain: str = ""
    """The strategy whose run in fp32 it is compared with; empty for that run itself."""


CASES = (
    Case("diloco", "fp32", "fp32", 20, 0.5),
    Case("diloco", "int4", "int4", 20, 0.5, "diloco"),
    Case("streaming_diloco", "int4", "int4", 20, 0.5, "diloco"),
    Case("local_sgd", "fp32", "fp32", 5, 1.0),
    Case("local_sgd", "topk2", "int4", 5, 1.0, "local_sgd"),
)


def measure(workload: str, case: Case, seed: int, steps: int) -> dict[str, Any]:
    """One run, as a row."""
    config = load_run(
        None,
        [
            f"workload={workload}",
            f"strategy={case.strategy}",
            f"sites={SITES}",
            f"seed={seed}",
            f"steps={steps}",
            f"h={case.h}",
            f"codec.up={case.up}",
            f"codec.down={case.down}",
        ],
    )
    run = run_simulated(config)
    quality, totals = run.totals.quality, run.totals
    return {
        "workload": workload,
        "strategy": case.strategy,
        "up": case.up,
        "down": case.down,
        "h": case.h,
        "steps": steps,
        "seed": seed,
        "fd": round(quality["fd"], 3),
        "fd_floor": round(quality["fd_floor"], 3),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
    }


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Each coded case beside its uncoded one, mean over seeds."""
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for case in CASES:
            if not case.plain:
                continue
            plain = next(c for c in CASES if c.strategy == case.plain and not c.plain)
            ours, theirs = _distances(rows, workload, case), _distances(rows, workload, plain)
            if ours and theirs:
                mean, base = statistics.mean(ours), statistics.mean(theirs)
                print(
                    f"{workload}: {case.strategy} with {case.up} up, {case.down} down, "
                    f"H = {case.h}: {mean:.3f}; {plain.strategy} with fp32: {base:.3f}; "
                    f"ratio {mean / base:.3f}, {min(len(ours), len(theirs))} seeds"
                )


def _distances(rows: list[dict[str, Any]], workload: str, case: Case) -> list[float]:
    wanted = (workload, case.strategy, case.up, case.down, case.h)
    keys = ("workload", "strategy", "up", "down", "h")
    return [row["fd"] for row in rows if tuple(row[key] for key in keys) == wanted]


def main() -> None:
    """Measure, print a table, write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--workloads", default="flow,gan")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the sites' threads share the cores
    rows: list[dict[str, Any]] = []
    for seed in range(1 if args.quick else args.seeds):
        for workload in args.workloads.split(","):
            for case in CASES:
                steps = int(STEPS[workload] * case.share) // (10 if args.quick else 1)
                rows.append(measure(workload, case, seed, steps))
                print_row(rows[-1], is_first=len(rows) == 1)
                if args.json:
                    write_rows(args.json, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
