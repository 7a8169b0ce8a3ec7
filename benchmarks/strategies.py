"""What each strategy sends, how good its pictures are, and what a site's absence does to them.

Digits, iid, 4 sites, half of the recipe's steps, whole runs in one process (`fedwan.simulate`: the
real engine, round loop, codecs and strategies over loopback links). Every strategy is run
undisturbed, and with one site that dies at a third of the run and returns, as a new process, at two
thirds. Where a strategy has a quorum it is 3 of 4, so that the others go on; else they wait.

`--codecs` tells what coding costs in quality: undisturbed runs with and without it. `int4` and
`int2` code DiLoCo's deltas and updates, H = 20; `topk2` codes the deltas of plain averaging, whose
updates come back as int4, H = 5 and all of the recipe's steps, since what sends 1.6 % at a time
needs many rounds. Each is compared with fp32, the same H, steps and seeds.
Bytes are those of a site and a step. `--quick`: one seed, a tenth of the steps.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from statistics import fmean

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, mean_of, ratio_half_interval, told, values_of
from fedwan.simulation import Absence

STEPS = {"flow": 2000, "gan": 1400}
QUORUM = ("round.quorum=3", "round.max_staleness=2")
INT4 = ("codec.up=int4", "codec.down=int4")
CASES: dict[str, tuple[str, ...]] = {
    "sync": ("strategy=sync",),
    "parameter_server": ("strategy=parameter_server",),
    "local_sgd": ("strategy=local_sgd", "h=20", *QUORUM),
    "scaffnew": ("strategy=scaffnew", "h=20", "round.quorum=3"),
    "local_sgd, topk2": (
        *("strategy=local_sgd", "h=5", "codec.up=topk2", "codec.down=int4"),
        *QUORUM,
    ),
    "diloco": ("strategy=diloco", "h=20", *QUORUM),
    "diloco, steps by speed": ("strategy=diloco", "h=20", "round.least_steps=1", QUORUM[0]),
    "streaming_diloco, int4": ("strategy=streaming_diloco", "h=20", *INT4, *QUORUM),
    "eager_diloco, int4": ("strategy=eager_diloco", "h=20", *INT4, *QUORUM),
    "async_diloco": ("strategy=async_diloco", "h=20"),
    "sparse_loco": ("strategy=sparse_loco", "h=5", *QUORUM),
}
FP32 = ("codec.up=fp32", "codec.down=fp32")
INT2 = ("codec.up=int2", "codec.down=int2")
TOPK2 = ("codec.up=topk2", "codec.down=int4")
CODED: dict[str, tuple[tuple[str, ...], int, str]] = {
    "diloco, fp32": (("strategy=diloco", "h=20", *FP32), 1, ""),
    "diloco, int4": (("strategy=diloco", "h=20", *INT4), 1, "diloco, fp32"),
    "diloco, int2": (("strategy=diloco", "h=20", *INT2), 1, "diloco, fp32"),
    "streaming, int4": (("strategy=streaming_diloco", "h=20", *INT4), 1, "diloco, fp32"),
    "averaging, fp32": (("strategy=local_sgd", "h=5", *FP32), 2, ""),
    "averaging, topk2": (("strategy=local_sgd", "h=5", *TOPK2), 2, "averaging, fp32"),
}
"""Words, times the steps above, and the case without coding."""
SEEDS = 3
ABSENCES = {"s2": Absence(1 / 3, 2 / 3)}
COLUMNS = "h steps seed absent up down bytes_up bytes_down fd fd_floor late dropped".split()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--workload", choices=STEPS, default="flow")
    parser.add_argument("--steps", type=int, default=0, help="0: half of the recipe's")
    parser.add_argument("--codecs", action="store_true", help="what coding costs instead")


def cases(args: argparse.Namespace) -> Mapping[str, tuple[str, bool]]:
    """Names, and whether a site is absent."""
    if args.codecs:
        return {name: (name, False) for name in CODED}
    undisturbed = {name: (name, False) for name in CASES}
    return undisturbed | {f"{name}, disturbed": (name, True) for name in CASES}


def measure_case(args: argparse.Namespace, case: tuple[str, bool], seed: int) -> Row:
    name, is_absent = case
    own, times, _ = CODED[name] if args.codecs else (CASES[name], 1, "")
    steps = times * (args.steps or STEPS[args.workload] // (10 if args.quick else 1))
    words = [f"workload={args.workload}", "sites=4", f"seed={seed}", f"steps={steps}", *own]
    row = describe(*run_simulated(words, absences=ABSENCES if is_absent else None))
    row |= {key: round(row[key] / row["site_steps"]) for key in ("bytes_up", "bytes_down")}
    row["absent"] = is_absent
    return {"workload": args.workload, "strategy": name} | {key: row[key] for key in COLUMNS}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    for case in dict.fromkeys(row["strategy"] for row in rows):
        whole, absent = (mean_of(rows, "fd", strategy=case, absent=a) for a in (False, True))
        text = f"{case}: {told(rows, 'fd', strategy=case, absent=False)}"
        if case not in CODED:
            text += f", with an absence {absent:.3f}, ratio {absent / whole:.3f}"
        elif base := values_of(rows, "fd", strategy=CODED[case][2]):
            half = ratio_half_interval(values_of(rows, "fd", strategy=case), base)
            text += f", ratio to what is not coded {whole / fmean(base):.3f} ± {half:.3f}"
        yield text
