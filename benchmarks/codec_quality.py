"""What coding costs in picture quality: the same runs with and without it, over seeds.

Digits, iid, 4 sites, whole runs in one process (`fedwan.simulate`: the real engine, round loop,
codecs and strategies over loopback links). `int4` codes DiLoCo's deltas and updates, H = 20, half
of the recipes' steps; `topk2` codes the deltas of plain averaging, whose updates come back as int4,
H = 5 and all steps, since what sends 1.6 % at a time needs many rounds. Each is compared with fp32,
the same H, steps and seeds. `--quick`: one seed, a tenth of the steps.

Row: workload strategy up down h steps seed fd fd_floor bytes_up bytes_down
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, mean_of, over_seeds, select

STEPS = {"flow": 4000, "gan": 2800}
"""The recipes' own."""
COLUMNS = "up down h steps seed fd fd_floor bytes_up bytes_down".split()


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


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workloads", default="flow,gan")
    parser.add_argument("--seeds", type=int, default=5)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """One run, as a row."""
    workloads = args.workloads.split(",")
    cases = {f"{w} {' '.join(map(str, c))}": (w, c) for w in workloads for c in CASES}

    def measure_one(pair: tuple[str, Case], seed: int) -> Row:
        workload, case = pair
        steps = int(STEPS[workload] * case.share) // (10 if args.quick else 1)
        words = [f"workload={workload}", f"strategy={case.strategy}", "sites=4", f"seed={seed}"]
        words += [f"steps={steps}", f"h={case.h}", f"codec.up={case.up}", f"codec.down={case.down}"]
        row = describe(*run_simulated(words))
        named = {"workload": workload, "strategy": case.strategy}
        return named | {key: row[key] for key in COLUMNS}

    return over_seeds(args, select(cases, args.only), measure_one)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Each coded case beside its uncoded one, mean over seeds."""
    for workload in dict.fromkeys(row["workload"] for row in rows):
        for case in filter(lambda case: case.plain, CASES):
            keys = {"workload": workload, "h": case.h}
            own = {"strategy": case.strategy, "up": case.up, "down": case.down}
            mean = mean_of(rows, "fd", **keys, **own)
            base = mean_of(rows, "fd", **keys, strategy=case.plain, up="fp32")
            yield (
                f"{workload}: {case.strategy} with {case.up} up, {case.down} down, H = {case.h}: "
                f"{mean:.3f}; {case.plain} with fp32: {base:.3f}; ratio {mean / base:.3f}"
            )
