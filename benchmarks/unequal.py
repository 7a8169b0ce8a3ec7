"""Sites of unequal speed: how much sooner a run ends whose fast sites need not wait.

Digits, iid, 4 sites, of which the first takes four times as long for a step. Every strategy takes
the same number of samples in all: `diloco` behind a barrier, H = 20 for everybody; the same with
`round.least_steps=1`, where a slow site takes fewer steps; `async_diloco`, where nobody waits. The
real engine in one process (`fedwan.simulate`, loopback links); steps last as long as they are told
to, so that the two cores of a small machine are enough for four sites. `--quick`: one seed, a tenth
of the steps.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from typing import Any

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, mean_of, told
from fedwan.data import Shard

SLOW_FACTOR = 4
SEEDS = 5
STEP_S = 0.04
"""Of a fast site: what four sites on two cores can keep."""
STEPS = 1000
CASES: dict[str, tuple[str, ...]] = {
    "diloco": ("strategy=diloco",),
    "diloco, steps by speed": ("strategy=diloco", "round.least_steps=1"),
    "async_diloco": ("strategy=async_diloco",),
}
COLUMNS = "seed steps samples slow_factor step_s wall_s fd fd_floor staleness".split()


def measure_case(args: argparse.Namespace, case: str, seed: int) -> Row:
    steps = STEPS // (10 if args.quick else 1)
    words = ["workload=flow", "sites=4", f"seed={seed}", f"steps={steps}", "h=20"]

    def paced(index: int, workload: Any, shard: Shard) -> tuple[Any, Shard]:
        step, step_s = workload.step, STEP_S if index else SLOW_FACTOR * STEP_S

        def paced_step(*args: Any) -> Any:
            began = time.monotonic()
            losses = step(*args)
            time.sleep(max(0.0, began + step_s - time.monotonic()))
            return losses

        workload.step = paced_step
        return workload, shard

    began = time.monotonic()
    row = describe(*run_simulated([*words, *CASES[case]], paced))
    row["wall_s"] = round(time.monotonic() - began, 1)
    row |= {"slow_factor": SLOW_FACTOR, "step_s": STEP_S}
    return {"workload": "flow", "strategy": case} | {key: row[key] for key in COLUMNS}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    base_s, base = (mean_of(rows, key, strategy="diloco") for key in ("wall_s", "fd"))
    for case in list(CASES)[1:]:
        wall_s, fd = (mean_of(rows, key, strategy=case) for key in ("wall_s", "fd"))
        yield (
            f"{case}: {base_s / wall_s:.2f} x sooner than diloco, distance "
            f"{told(rows, 'fd', strategy=case)} against {base:.3f}, ratio {fd / base:.3f}"
        )
