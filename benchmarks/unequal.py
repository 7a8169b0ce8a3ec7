"""Sites of unequal speed: how much sooner a run ends whose fast sites need not wait.

    python benchmarks/unequal.py [--quick] [--workload flow] [--seeds 5] --json PATH

Digits, iid, 4 sites, of which the first takes four times as long for a step. Every strategy takes
the same number of samples in all: `diloco` behind a barrier, H = 20 for everybody; the same with
`round.least_steps=1`, where a slow site takes fewer steps; `async_diloco`, where nobody waits. The
real engine in one process (`fedwan.simulate`, loopback links); steps last as long as they are told
to, so that the two cores of a small machine are enough for four sites.

Row: workload strategy seed steps samples slow_factor step_s wall_s fd fd_floor staleness
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.simulated import run_simulated  # noqa: E402
from fedwan.app import load_run  # noqa: E402
from fedwan.workloads.base import Workload  # noqa: E402

SITES = 4
SLOW_FACTOR = 4
STEP_S = 0.04
"""Of a fast site: what four sites on two cores can keep."""
STEPS = {"flow": 1000, "gan": 700}
CASES: dict[str, tuple[str, ...]] = {
    "diloco": ("strategy=diloco",),
    "diloco, steps by speed": ("strategy=diloco", "round.least_steps=1"),
    "async_diloco": ("strategy=async_diloco",),
}


class PacedWorkload:
    """A workload whose steps take a given time at least.

    Args:
        inner: the workload.
        step_s: seconds.
    """

    def __init__(self, inner: Workload, step_s: float) -> None:
        self._inner = inner
        self._step_s = step_s

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def step(self, *args: Any) -> Any:
        """One step, and a rest for what is left of its time."""
        began = time.monotonic()
        losses = self._inner.step(*args)
        time.sleep(max(0.0, self._step_s - (time.monotonic() - began)))
        return losses


def measure(workload: str, case: str, seed: int, steps: int) -> dict[str, Any]:
    """One run, as a row."""
    words = [f"workload={workload}", f"sites={SITES}", f"seed={seed}", f"steps={steps}", "h=20"]
    config = load_run(None, [*words, *CASES[case]])

    def paced(index: int, inner: Workload) -> Workload:
        step_s = STEP_S if index else SLOW_FACTOR * STEP_S
        return PacedWorkload(inner, step_s)  # type: ignore[return-value]

    began = time.monotonic()
    run = run_simulated(config, paced)
    quality, totals = run.totals.quality, run.totals
    return {
        "workload": workload,
        "strategy": case,
        "seed": seed,
        "steps": steps,
        "samples": totals.samples,
        "slow_factor": SLOW_FACTOR,
        "step_s": STEP_S,
        "wall_s": round(time.monotonic() - began, 1),
        "fd": round(quality["fd"], 3),
        "fd_floor": round(quality["fd_floor"], 3),
        "staleness": round(totals.staleness / totals.contributions, 2),
    }


def print_summary(rows: Sequence[dict[str, Any]]) -> None:
    """Each case beside the barrier, means over seeds."""

    def mean(case: str, key: str) -> float:
        return statistics.mean(row[key] for row in rows if row["strategy"] == case)

    for case in list(CASES)[1:]:
        print(
            f"{case}: {mean('diloco', 'wall_s') / mean(case, 'wall_s'):.2f} x sooner than diloco, "
            f"distance {mean(case, 'fd'):.3f} against {mean('diloco', 'fd'):.3f}, "
            f"ratio {mean(case, 'fd') / mean('diloco', 'fd'):.3f}"
        )


def main() -> None:
    """Measure, print a table, write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="one seed, a tenth of the steps")
    parser.add_argument("--workload", choices=STEPS, default="flow")
    parser.add_argument("--seeds", type=int, default=5)
    args = parser.parse_args()
    torch.set_num_threads(1)  # the sites' threads share the cores
    rows: list[dict[str, Any]] = []
    for seed in range(1 if args.quick else args.seeds):
        for case in CASES:
            steps = STEPS[args.workload] // (10 if args.quick else 1)
            rows.append(measure(args.workload, case, seed, steps))
            print_row(rows[-1], is_first=len(rows) == 1)
            if args.json:
                write_rows(args.json, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
