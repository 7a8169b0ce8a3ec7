"""The promise: pictures of local steps beside those of synchronous training, at any split.

    python benchmarks/quality.py [--quick] [--only TEXT] [--seeds 5] [--share 1] [--runs PATH] --json PATH

Whole runs in one process (`fedwan.simulate`: the real engine, round loop, codecs and strategies
over loopback links), moving averages, paired seeds: a seed has the same initial weights, shards and
order of data in both. Synchronous training sees the same samples whatever the split, so that it is
run once for each workload, data set and number of sites. With `--runs` the outcome of every run is
kept in a file and read from there again: the whole table takes hours, and may be interrupted.

Row: workload data split strategy h sites seeds fd_mean fd_sd fd_floor sync_fd_mean sync_fd_sd ratio
modes bytes_per_step sync_bytes_per_step; bytes are of a site, both ways.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch  # noqa: E402

from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.simulated import run_simulated  # noqa: E402
from fedwan.app import load_run  # noqa: E402

INT4 = ("codec.up=int4", "codec.down=int4")
CONDITIONAL = ("model.conditional=true",)


class Case(NamedTuple):
    """One line of the table."""

    workload: str
    data: str
    split: str
    strategy: str
    h: int
    sites: int = 4
    coded: tuple[str, ...] = ()
    model: tuple[str, ...] = ()
    """Words that hold for synchronous training, too."""

    def words(self, is_sync: bool) -> list[str]:
        """The run's settings, but for its seed."""
        own = ["strategy=sync"]
        if not is_sync:
            own = [f"strategy={self.strategy}", f"h={self.h}", f"data.split={self.split}"]
            own += self.coded
        words = [f"workload={self.workload}", f"data.name={self.data}", f"sites={self.sites}"]
        return [*words, *self.model, *own]


CASES = (
    Case("flow", "digits", "iid", "diloco", 50),
    Case("gan", "digits", "iid", "diloco", 50),
    Case("flow", "digits", "iid", "diloco", 20, 8),
    Case("gan", "digits", "iid", "diloco", 20, 8),
    Case("flow", "digits", "by_label", "diloco", 50),
    Case("gan", "digits", "by_label", "local_sgd", 20),
    Case("gan", "digits", "by_label", "local_sgd", 20, 4, INT4, CONDITIONAL),
    Case("gan", "digits", "by_label", "local_sgd", 50, 4, INT4, CONDITIONAL),
    Case("gan", "digits", "dirichlet:0.3", "local_sgd", 20, 4, INT4, CONDITIONAL),
    Case("gan", "ring8", "by_label", "local_sgd", 20),
    Case("gan", "ring8", "by_label", "local_sgd", 20, 4, INT4, CONDITIONAL),
)


class Outcome(NamedTuple):
    """Of one run."""

    fd: float
    fd_floor: float
    modes: int | None
    bytes_per_step: float


class Runs:
    """Trains, and keeps what came of it: the same run only once.

    Args:
        kept: a file of outcomes, one JSON object a line, read and added to; None for none.
    """

    def __init__(self, kept: Path | None = None) -> None:
        self._kept = kept
        self._outcomes: dict[str, Outcome] = {}
        if kept is not None and kept.exists():
            for line in kept.read_text().splitlines():
                row = json.loads(line)
                run = row.pop("run")
                self._outcomes[run] = Outcome(**row)

    def outcome(self, words: Sequence[str], seed: int, share: float) -> Outcome:
        """Of one run, of a share of the recipe's steps."""
        config = load_run(None, [*words, f"seed={seed}"])
        steps = max(1, round(share * config.steps / config.h)) * config.h
        asked = [*words, f"seed={seed}", f"steps={steps}"]
        run = " ".join(asked)
        if run not in self._outcomes:
            self._outcomes[run] = train(asked)
            if self._kept is not None:
                with self._kept.open("a") as file:
                    file.write(json.dumps({"run": run, **self._outcomes[run]._asdict()}) + "\n")
        return self._outcomes[run]


def train(words: Sequence[str]) -> Outcome:
    """One whole run."""
    config = load_run(None, list(words))
    totals = run_simulated(config).totals
    num_bytes = (totals.bytes_up + totals.bytes_down) / config.sites / config.steps
    quality = totals.quality
    return Outcome(quality["fd"], quality["fd_floor"], quality.get("modes"), num_bytes)


def measure(case: Case, runs: Runs, seeds: int, share: float) -> dict[str, Any]:
    """A case and its synchronous twin, over seeds, as a row."""
    ours = [runs.outcome(case.words(False), seed, share) for seed in range(seeds)]
    sync = [runs.outcome(case.words(True), seed, share) for seed in range(seeds)]
    mean, sync_mean = (statistics.mean(run.fd for run in runs) for runs in (ours, sync))
    found = [run.modes for run in ours if run.modes is not None]
    return {
        "workload": case.workload + (", conditional" if case.model else ""),
        "data": case.data,
        "split": case.split,
        "strategy": case.strategy + (", int4" if case.coded else ""),
        "h": case.h,
        "sites": case.sites,
        "seeds": seeds,
        "fd_mean": _short(mean),
        "fd_sd": _deviation(ours),
        "fd_floor": _short(ours[0].fd_floor),
        "sync_fd_mean": _short(sync_mean),
        "sync_fd_sd": _deviation(sync),
        "ratio": _short(mean / sync_mean),
        "modes": min(found) if found else None,
        "bytes_per_step": round(statistics.mean(run.bytes_per_step for run in ours)),
        "sync_bytes_per_step": round(statistics.mean(run.bytes_per_step for run in sync)),
    }


def _deviation(runs: list[Outcome]) -> float:
    return _short(statistics.stdev(run.fd for run in runs)) if len(runs) > 1 else 0.0


def _short(value: float) -> float:
    """Four digits that count: distances of points are small."""
    return float(f"{value:.4g}")


def main() -> None:
    """Measure, print a table, write rows."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="two seeds, a twentieth of the steps")
    parser.add_argument("--only", default="", help="only cases whose text holds this")
    parser.add_argument("--runs", type=Path, help="a file to keep every run's outcome in")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--share", type=float, default=1.0, help="of the recipes' steps")
    args = parser.parse_args()
    cases = [case for case in CASES if args.only in str(case)]
    if not cases:
        parser.error(f"--only {args.only!r} is in none of: {'; '.join(map(str, CASES))}")
    torch.set_num_threads(1)  # the sites' threads share the cores
    runs = Runs(args.runs)
    rows: list[dict[str, Any]] = []
    for case in cases:
        seeds, share = (2, 0.05) if args.quick else (args.seeds, args.share)
        rows.append(measure(case, runs, seeds, share))
        print_row(rows[-1], is_first=len(rows) == 1)
        if args.json:
            write_rows(args.json, rows)


if __name__ == "__main__":
    main()
