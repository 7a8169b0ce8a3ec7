"""What each strategy sends, how good its pictures are, and what a site's absence does to them.

Digits, iid, 4 sites, half of the recipe's steps, whole runs in one process (`fedwan.simulate`: the
real engine, round loop, codecs and strategies over loopback links). Every strategy is run
undisturbed, and with one site that dies at a third of the run and returns, as a new process, at two
thirds. Where a strategy has a quorum it is 3 of 4, so that the others go on; else they wait.
`--quick`: one seed, a tenth of the steps.

Row: workload strategy h steps seed absent up down bytes_up bytes_down fd fd_floor late dropped;
bytes are those of a site and a step.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, mean_of, over_seeds, select

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
ABSENCE = (1 / 3, 2 / 3)
COLUMNS = "h steps seed absent up down bytes_up bytes_down fd fd_floor late dropped".split()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=STEPS, default="flow")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=0, help="0: half of the recipe's")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every case with a seed, undisturbed and with an absence."""
    steps = args.steps or STEPS[args.workload] // (10 if args.quick else 1)

    def measure_one(case: tuple[str, bool], seed: int) -> Row:
        name, is_disturbed = case
        return measure_case(args.workload, name, seed, steps, is_disturbed)

    names = select({name: name for name in CASES}, args.only)
    return over_seeds(args, [(n, absent) for n in names for absent in (False, True)], measure_one)


def measure_case(workload: str, case: str, seed: int, steps: int, is_disturbed: bool) -> Row:
    """One run, as a row."""
    words = [f"workload={workload}", "sites=4", f"seed={seed}", f"steps={steps}", *CASES[case]]
    row = describe(*run_simulated(words, absence=ABSENCE if is_disturbed else None))
    row |= {key: round(row[key] / row["site_steps"]) for key in ("bytes_up", "bytes_down")}
    row["absent"] = is_disturbed
    return {"workload": workload, "strategy": case} | {key: row[key] for key in COLUMNS}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Each strategy with and without the absence, means over seeds."""
    for case in dict.fromkeys(row["strategy"] for row in rows):
        whole, absent = (mean_of(rows, "fd", strategy=case, absent=a) for a in (False, True))
        yield f"{case}: {whole:.3f}, with an absence {absent:.3f}, ratio {absent / whole:.3f}"
