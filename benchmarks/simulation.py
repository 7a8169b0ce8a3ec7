"""The whole federation under faults that a seed chooses: real code, virtual time, invariants.

Coordinator and sites run as they are, over a network and a disk that fail (`benchmarks/seeded`).
After an update the global weights are compared with those of the run that nothing disturbed, where
nothing has come in between that makes them others (`compared`, of all `updates`); and nothing may
be merged twice, called durable too early, or wait for ever. A seed replays a run exactly:
`--seed 17 --trace` prints it, and `--shrink 17` looks for the fewest faults, of the fewest kinds,
with which it still fails.
`--bugs` plants known bugs of the protocol one at a time, and counts the seeds until each is found.
`--only` chooses scenarios by their names, whose seeds are taken from the first one on, or bugs.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import partial
from multiprocessing import get_context

import torch

from benchmarks.harness.table import Row, select
from benchmarks.seeded.bugs import BUGS, planted
from benchmarks.seeded.faults import KINDS, LOSSES, decide
from benchmarks.seeded.scenarios import DRAWN, SCENARIOS, TURNS
from benchmarks.seeded.world import BAD_BATCHES, FAULTS, Report, prepare, simulate_seed
from fedwan.errors import UserError

NAMES = [*(kind.__name__ for kind in (*KINDS, decide, *LOSSES)), BAD_BATCHES]
"""Of kinds of faults."""
NUMBERS = ("seeds", "faults", "violations", "updates", "compared")
"""Of a row, which are added up."""
MOST_SEEDS = 1000
"""For which a planted bug is looked for."""
TAKEN = {
    "seed": ("faults", "without", "trace"),
    "shrink": ("faults", "without"),
    "bugs": ("only",),
    "seeds": ("seeds", "first", "faults", "without", "only", "quick"),
}
"""By what is done, the options that it takes."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seeds", type=int, help="10,000, or 100 if quick")
    parser.add_argument("--first", type=int, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--shrink", type=int, metavar="SEED", help="one that fails, made smaller")
    parser.add_argument("--faults", type=int, help=f"least number, of each seed; {FAULTS}")
    parser.add_argument("--without", default="", help="kinds of faults that are left out, with ,")
    parser.add_argument("--trace", action="store_true", help="print what happened, with --seed")
    parser.add_argument("--bugs", action="store_true", help="plant bugs instead")


def _mode(args: argparse.Namespace) -> str:
    """What is to be done; a `UserError` where an option has no effect on it."""
    given = {name for name, value in vars(args).items() if value or type(value) is int}
    mode = next((mode for mode in ("bugs", "shrink", "seed") if mode in given), "seeds")
    if odd := given & {*TAKEN, *itertools.chain(*TAKEN.values())} - {mode, *TAKEN[mode]}:
        raise UserError(f"--{min(odd)} has no effect beside --{mode}; leave it out")
    return mode


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """A row for each scenario, or each bug; failures are printed as they come."""
    mode, faults = _mode(args), FAULTS if args.faults is None else args.faults
    if mode == "bugs":
        yield from map(_find, select(list(BUGS), args.only))
        return
    without = [kind for kind in args.without.split(",") if kind]
    if odd := {*without} - {*NAMES}:
        raise UserError(f"--without={odd.pop()}: kinds are {', '.join(NAMES)}")
    if mode == "shrink":
        yield shrink(args.shrink, faults, without)
        return
    if mode == "seed":
        report = simulate_seed(args.seed, faults=faults, without=without)
        if args.trace:
            print("\n".join(report.trace))
        yield _row([report], 0.0)
        return
    count = (100 if args.quick else 10_000) if args.seeds is None else args.seeds
    chosen, every = select(TURNS, args.only), itertools.count(args.first or 0)
    matching = (seed for seed in every if TURNS[seed % len(TURNS)] in chosen)
    seeds = [*itertools.islice(matching, count)]
    began = time.monotonic()
    found: dict[str, list[Report]] = {}
    with get_context("spawn").Pool(os.cpu_count(), _begin) as pool:
        simulate = partial(simulate_seed, faults=faults, without=without)
        for report in pool.imap_unordered(simulate, seeds, chunksize=8):
            found.setdefault(report.scenario.partition(":")[0], []).append(report)
            for violation in report.violations[:1]:
                print(f"seed {report.seed} ({report.scenario}): {violation}", flush=True)
            report.trace.clear()
    s_per_seed = (time.monotonic() - began) / len(seeds)
    for name in filter(found.get, TURNS):
        yield _row(found[name], s_per_seed)


def _begin() -> None:
    """Of a process that simulates: what was imported is looked through no more for garbage."""
    torch.set_num_threads(1)
    gc.freeze()
    gc.set_threshold(50_000)


def _row(reports: Sequence[Report], s_per_seed: float) -> Row:
    kinds: Counter[str] = sum((report.faults for report in reports), Counter())
    return {
        "scenario": reports[0].scenario.partition(":")[0],
        "seeds": len(reports),
        "faults": kinds.total(),
        "min": min(report.faults.total() for report in reports),
        "kinds": dict(sorted(kinds.items())),
        "violations": sum(bool(report.violations) for report in reports),
        "updates": sum(report.num_updates for report in reports),
        "compared": sum(report.num_compared for report in reports),
        "virtual_h": round(sum(report.virtual_s for report in reports) / 3600, 1),
        "real_s": round(s_per_seed * len(reports), 1),
    }


def shrink(seed: int, num: int = FAULTS, without: Sequence[str] = ()) -> Row:
    """The fewest kinds of faults, and the fewest faults, with which a seed still fails.

    Args:
        seed: fails with `num` faults.
        num: of faults, at first.
        without: kinds that are left out from the beginning.

    Raises:
        UserError: it does not fail.
    """

    def fails(num: int, without: Sequence[str]) -> Report | None:
        report = simulate_seed(seed, faults=num, without=without)
        return report if report.violations else None

    if (smallest := fails(num, without)) is None:
        raise UserError(f"--shrink={seed}: this seed does not fail; give one that does")
    for kind in [kind for kind in NAMES if kind not in without]:
        if report := fails(num, [*without, kind]):
            smallest, without = report, [*without, kind]
    step = num // 2
    while step:
        if num > step and (report := fails(num - step, without)):
            smallest, num = report, num - step
        else:
            step //= 2
    words = f"--seed {seed} --faults {num}" + (f" --without {','.join(without)}" if without else "")
    print(f"python -m benchmarks simulation --trace {words}\n{smallest.violations[0]}")
    return _row([smallest], 0.0)


def _find(bug: str) -> Row:
    torch.set_num_threads(1)
    for name in SCENARIOS:  # before the bug is there
        prepare(name)
    row = {"bug": bug, "seeds": None, "scenario": "", "violation": ""}
    with planted(bug):
        for seed in range(1, MOST_SEEDS + 1):
            if TURNS[seed % len(TURNS)] == DRAWN:  # nothing to compare them with is prepared
                continue
            report = simulate_seed(seed)
            if report.violations:
                found = {"scenario": report.scenario, "violation": report.violations[0]}
                return row | {"seeds": seed} | found
    return row


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    if "bug" in rows[0]:
        found = [row for row in rows if row["seeds"]]
        yield f"{len(found)} of {len(rows)} bugs found within {MOST_SEEDS} seeds"
        return
    total = {key: sum(row[key] for row in rows) for key in NUMBERS}
    days = sum(row["virtual_h"] for row in rows) / 24
    yield (
        f"{total['seeds']} seeds, {total['faults']} faults, at least "
        f"{min(row['min'] for row in rows)} each, {total['violations']} violations; "
        f"{total['compared']} of {total['updates']} updates compared; "
        f"{days:.1f} virtual days in {sum(row['real_s'] for row in rows) / 60:.1f} minutes"
    )
