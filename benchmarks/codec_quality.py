"""What coding costs in picture quality: the same runs with and without it, over seeds.

    python benchmarks/codec_quality.py [--quick] [--workloads flow,gan] [--seeds 5] --json PATH

Digits, iid, 4 sites, H = 20, whole runs in one process (`fedwan.simulate`: the real engine, round
loop, codecs and strategies over loopback links). `int4` codes DiLoCo's deltas and updates; `topk2`
codes the deltas of plain averaging, as SparseLoCo does, whose updates come back as int4. Each is
compared with the same strategy in fp32 and the same seeds.

Row: workload strategy up down seed steps fd fd_floor bytes_up bytes_down
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.rows import print_row, write_rows  # noqa: E402
from fedwan.app import load_run, load_strategy, load_workload  # noqa: E402
from fedwan.config import site_names  # noqa: E402
from fedwan.data.shard import open_shard  # noqa: E402
from fedwan.simulate import SimulatedSite, simulate  # noqa: E402

SITES = 4
STEPS = {"flow": 2000, "gan": 1400}
"""Half of the recipes' own."""
CASES = (
    ("diloco", "fp32", "fp32"),
    ("diloco", "int4", "int4"),
    ("streaming_diloco", "int4", "int4"),
    ("local_sgd", "fp32", "fp32"),
    ("local_sgd", "topk2", "int4"),
)


def measure(
    workload: str, case: tuple[str, str, str], seed: int, steps: int, words: Sequence[str] = ()
) -> dict[str, Any]:
    """One run, as a row."""
    strategy, up, down = case
    config = load_run(
        None,
        [
            f"workload={workload}",
            f"strategy={strategy}",
            f"sites={SITES}",
            f"seed={seed}",
            f"steps={steps}",
            "h=20",
            f"codec.up={up}",
            f"codec.down={down}",
            *words,
        ],
    )
    recipe = load_workload(workload)
    sites = {
        name: SimulatedSite(
            recipe.build(config, "cpu"), open_shard(config.data, index, SITES, seed)
        )
        for index, name in enumerate(site_names(config))
    }
    with tempfile.TemporaryDirectory() as folder:
        run = simulate(
            sites,
            load_strategy(strategy).build(config),
            Path(folder),
            num_steps=steps,
            batch=config.data.batch,
            seed=seed,
            ema_half_life=config.ema.half_life,
        )
    quality, totals = run.totals.quality, run.totals
    return {
        "workload": workload,
        "strategy": strategy,
        "up": up,
        "down": down,
        "seed": seed,
        "steps": steps,
        "fd": round(quality["fd"], 3),
        "fd_floor": round(quality["fd_floor"], 3),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
    }


def print_summary(rows: list[dict[str, Any]]) -> None:
    """Each coded case beside its uncoded one, mean over seeds."""
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for case in CASES:
            plain = ("diloco" if "diloco" in case[0] else case[0], "fp32", "fp32")
            ours, theirs = _distances(rows, workload, case), _distances(rows, workload, plain)
            if case != plain and ours and theirs:
                mean, base = statistics.mean(ours), statistics.mean(theirs)
                print(
                    f"{workload}: {case[0]} with {case[1]} up, {case[2]} down: {mean:.3f}; "
                    f"{plain[0]} with fp32: {base:.3f}; ratio {mean / base:.3f}, "
                    f"{min(len(ours), len(theirs))} seeds"
                )


def _distances(
    rows: list[dict[str, Any]], workload: str, case: tuple[str, str, str]
) -> list[float]:
    return [
        row["fd"]
        for row in rows
        if (row["workload"], row["strategy"], row["up"], row["down"]) == (workload, *case)
    ]


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
                steps = STEPS[workload] // (10 if args.quick else 1)
                rows.append(measure(workload, case, seed, steps))
                print_row(rows[-1], is_first=len(rows) == 1)
                if args.json:
                    write_rows(args.json, rows)
    print_summary(rows)


if __name__ == "__main__":
    main()
