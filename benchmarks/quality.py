"""The promise: pictures of local steps beside those of synchronous training, at any split.

Whole runs in one process (`fedwan.simulate`: the real engine, round loop, codecs and strategies
over loopback links), moving averages, paired seeds: a seed has the same initial weights, shards and
order of data in both. Synchronous training sees the same samples whatever the split, so that it is
run once for each workload, data set and number of sites, with the learning rate that suits it best;
but for networks with batch norm, which see each site's batch by itself, on the row's own split.
A run's distance is the mean over eight sets of generated samples: one set's own spread, with the
same weights, is 0.13 on digits, as large as what the table is to tell.
With `--runs` the outcome of every run is kept in a file and read from there again: the whole table
takes hours, and may be interrupted. Emoji, which are drawn with a font, and take the longest, are
run where `--only` names them. `--quick`: two seeds, a twentieth of the steps.

Bytes are of a site, both ways. `ratio_half_interval`: of 95 %, paired by seed. `modes`: fewest of
any seed; `with_all_modes`: seeds that found all. `good`: share of samples near a mode or classified
with confidence. `l1_ratio`: of pix2pix's distance to its targets. `teacher_ratio`: a student's
distance over that of its teacher in all its steps.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.simulated import describe, evaluate, run_simulated
from benchmarks.harness.table import (
    Row,
    columns_of,
    half_interval,
    ratio_half_interval,
    seeds_of,
    select,
)
from fedwan.app import load_run
from fedwan.data.sources import find_source

INT4 = ("codec.up=int4", "codec.down=int4")
CLASS = ("model.conditional=true",)
SITE = (*CLASS, "data.labels=site")
SEEDS = 5
NUM_EVALUATIONS = 8
"""Sets of generated samples that a run's distance is the mean of."""
SEEN = ("seen_through", "num_real")
"""What images were seen through, and how many real ones a draw is compared with."""
TEACHER = "{teacher}"
"""Stands for the folder of a flow that was trained with a student's seed."""


class Case(NamedTuple):
    workload: str
    data: str
    split: str
    strategy: str
    h: int
    sites: int = 4
    own: tuple[str, ...] = ()
    """Words of the local steps."""
    both: tuple[str, ...] = ()
    """Words that hold for synchronous training, too."""
    sync: tuple[str, ...] = ()
    """Words of synchronous training alone."""

    def words(self, is_sync: bool) -> list[str]:
        own = ["strategy=sync", *self.sync]
        if not is_sync:
            own = [f"strategy={self.strategy}", f"h={self.h}", f"data.split={self.split}"]
            own += self.own
        words = [f"workload={self.workload}", f"data.name={self.data}", f"sites={self.sites}"]
        return [*words, *self.both, *own]


def _rate(lr: float, *networks: str) -> tuple[str, ...]:
    return tuple(f"inner.{network}.lr={lr:g}" for network in networks)


MOMENTS = (
    *("inner.velocity.state=average", "inner.velocity.lr=1.5e-3", "inner.velocity.schedule=linear"),
    *("outer.velocity.lr=0.8", "outer.velocity.momentum=0.8"),
)
GAN = ("generator", "discriminator")
FULL = tuple(f"outer.{network}.lr=1" for network in GAN)
"""With momentum 0.5 a merged delta counts twice in the end; under the default of 0.5, once."""
# The best of three rates in synchronous training (docs/log.md); gan's is the recipe's own.
FLOW_SYNC = _rate(1e-3, "velocity")
FALLING = tuple(f"inner.{network}.schedule=cosine" for network in GAN)
SHARED = "inner.discriminator.state=average"
PUSHED = (
    *(*_rate(5e-4, "generator"), *_rate(7e-4, "discriminator")),
    *("outer.generator.momentum=0.5", "outer.discriminator.momentum=0.3"),
)
"""What all sites agree on moves faster than the rates that H bears."""
DIT = ("model.network=dit",)
"""Told the class."""
SMALL = ("data.batch=16", "eval.every=0")
EMOJI_GAN = (*CLASS, *SMALL, "model.width=16", "steps=5000")
EMOJI_DIT = (*DIT, *SMALL, "steps=4800")
"""Half an hour of one core, until synchronous training is at the floor.

The recipes' own rates suit synchronous training best (docs/log.md).
"""
STUDENT = (f"model.teacher={TEACHER}", "model.student_steps=4", "steps=600")

CASES = (
    Case("flow", "digits", "iid", "diloco", 50, sync=FLOW_SYNC),
    Case("gan", "digits", "iid", "diloco", 50, 4, (*FULL, "inner.generator.state=ema")),
    Case("flow", "digits", "iid", "diloco", 20, 8, MOMENTS, sync=FLOW_SYNC),
    Case("gan", "digits", "iid", "diloco", 20, 8),
    # SNOO (2510.15830): an outer step over synchronous training, one site of the joint batch.
    Case("flow", "digits", "iid", "diloco", 50, 1, both=("data.batch=256",), sync=FLOW_SYNC),
    Case("flow", "digits", "by_label", "diloco", 50, sync=FLOW_SYNC),
    Case("flow", "digits", "by_label", "experts", 50, sync=FLOW_SYNC),
    Case(
        *("flow", "digits", "by_label", "scaffnew", 50, 4),
        ("inner.velocity.state=average",),
        (*DIT, "inner.velocity.schedule=cosine"),
    ),
    Case("gan", "digits", "by_label", "local_sgd", 20),
    Case("gan", "digits", "by_label", "local_sgd", 20, 4, INT4, CLASS),
    Case("gan", "digits", "by_label", "local_sgd", 50, 4, INT4, CLASS),
    Case("gan", "digits", "dirichlet:0.3", "local_sgd", 20, 4, INT4, CLASS),
    Case(
        *("gan", "digits", "by_label", "scaffnew", 20, 4),
        (*INT4, *SITE, *_rate(3e-3, *GAN), *FALLING, SHARED),
    ),
    Case("gan", "ring8", "by_label", "local_sgd", 20),
    Case(
        *("gan", "ring8", "by_label", "scaffnew", 20, 4),
        (*INT4, SHARED, "network.discriminator.h=10", *PUSHED),
        sync=FALLING,
    ),
    Case("gan", "ring8", "by_label", "experts", 100),
    Case("gan", "digits", "by_label", "experts", 100),
    # Batch norm sees other batches where a site has one photograph, in synchronous training, too.
    Case("pix2pix", "photo_edges", "by_label", "diloco", 50, 5, sync=("data.split=by_label",)),
    Case("distill", "digits", "iid", "diloco", 20, both=STUDENT),
    Case("gan", "emoji", "iid", "diloco", 20, both=EMOJI_GAN),
    Case("gan", "emoji", "by_label", "experts", 20, both=EMOJI_GAN),
    Case("flow", "emoji", "iid", "diloco", 20, both=EMOJI_DIT),
    Case("flow", "emoji", "by_label", "experts", 20, both=EMOJI_DIT),
)


Outcome = dict[str, Any]
"""Figures of one run: `fd`, `fd_floor`, `modes`, `bytes_per_step`, and of some workloads `l1`,
`teacher_fd` and `good`, the share of samples near a mode or classified with confidence."""


class Runs:
    """Trains, and keeps what came of it in a file, a JSON object a line: the same run only once."""

    def __init__(self, folder: Path, kept: Path | None = None) -> None:
        self._folder = folder
        self._kept = kept
        self._outcomes: dict[str, Outcome] = {}
        if kept is not None and kept.exists():
            rows = map(json.loads, kept.read_text().splitlines())
            self._outcomes = {row.pop("run"): row for row in rows}

    def outcome(self, words: Sequence[str], seed: int, share: float) -> Outcome:
        """Of one run, of a share of the recipe's steps."""
        asked = [*words, f"seed={seed}"]
        told = self._tell_teacher(asked, seed, share)
        config = load_run(None, told)
        steps = f"steps={max(1, round(share * config.steps / config.h)) * config.h}"
        run = " ".join([*asked, steps, f"evaluations={NUM_EVALUATIONS}"])
        if run not in self._outcomes:
            self._outcomes[run] = train([*told, steps])
            if self._kept is not None:
                with self._kept.open("a") as file:
                    file.write(json.dumps({"run": run, **self._outcomes[run]}) + "\n")
        return self._outcomes[run]

    def _tell_teacher(self, words: Sequence[str], seed: int, share: float) -> list[str]:
        """The words with a teacher's folder in place; it is trained first, if there is none yet."""
        folder = self._folder / f"teacher-{seed}-{share:g}"
        if any(TEACHER in word for word in words) and not folder.exists():
            taught = ["workload=flow", "data.name=digits", "sites=4", "h=20", f"seed={seed}"]
            steps = max(1, round(share * 4000 / 20)) * 20
            with tempfile.TemporaryDirectory() as made:
                run_simulated([*taught, f"steps={steps}"], folder=Path(made))
                shutil.copytree(made, folder)
        return [word.replace(TEACHER, str(folder)) for word in words]


def train(words: Sequence[str]) -> Outcome:
    """One whole run; each figure of quality is the mean over sets of samples."""
    with tempfile.TemporaryDirectory() as made:
        config, run = run_simulated(words, folder=Path(made))
        found = evaluate(Path(made), NUM_EVALUATIONS)
    row = describe(config, run)
    num_bytes = (row["bytes_up"] + row["bytes_down"]) / config.num_sites / config.steps
    quality = run.totals.quality
    outcome = {"fd_floor": quality["fd_floor"], "modes": row["modes"], "bytes_per_step": num_bytes}
    outcome |= {key: quality[key] for key in SEEN if key in quality}
    for key in ("fd", "l1", "teacher_fd", "good"):
        if key in found[0]:
            outcome[key] = statistics.fmean(one[key] for one in found)
    return outcome


def compare(case: Case, runs: Runs, seeds: Sequence[int], share: float) -> Row:
    """A case and its synchronous twin, over seeds, as a row."""
    ours, sync = (
        Figures([runs.outcome(case.words(is_sync), seed, share) for seed in seeds])
        for is_sync in (False, True)
    )
    fds, sync_fds, modes = ours["fd"], sync["fd"], ours["modes"]
    is_spread, num_classes = len(fds) > 1, find_source(case.data).num_classes
    given, own = {*case.own, *case.both}, " ".join(case.own)
    beside = ", moments" * (".state=average" in own) + ", every step's ema" * (".state=ema" in own)
    told = ", told the site" if SITE[-1] in case.own else ", told the class"
    return {
        "workload": case.workload + told * bool(given & {*CLASS, *DIT}),
        **columns_of(case, "data split"),
        "strategy": case.strategy + ", int4" * (INT4[0] in given) + beside,
        **columns_of(case, "h sites"),
        "seeds": len(seeds),
        "fd_mean": ours.mean("fd"),
        "fd_sd": _short(statistics.stdev(fds)) if is_spread else 0.0,
        "fd_half_interval": _short(half_interval(fds)) if is_spread else None,
        "fd_floor": _short(ours["fd_floor"][0]),
        **{key: next(iter(ours[key]), None) for key in SEEN},
        "sync_fd_mean": sync.mean("fd"),
        "sync_fd_sd": _short(statistics.stdev(sync_fds)) if is_spread else 0.0,
        "ratio": _ratio(fds, sync_fds),
        "ratio_half_interval": _short(ratio_half_interval(fds, sync_fds)) if is_spread else None,
        "first_seed": seeds[0],
        "modes": min(modes, default=None),
        "with_all_modes": f"{modes.count(num_classes)} of {len(modes)}" if modes else None,
        "good": ours.mean("good"),
        "sync_good": sync.mean("good"),
        "bytes_per_step": round(statistics.mean(ours["bytes_per_step"])),
        "sync_bytes_per_step": round(statistics.mean(sync["bytes_per_step"])),
        "l1_ratio": _ratio(ours["l1"], sync["l1"]),
        "teacher_ratio": _ratio(fds, ours["teacher_fd"]),
        "sync_teacher_ratio": _ratio(sync_fds, sync["teacher_fd"]),
    }


class Figures:
    """Of runs with several seeds, by name; empty where they do not have one."""

    def __init__(self, outcomes: Sequence[Outcome]) -> None:
        self._outcomes = outcomes

    def __getitem__(self, name: str) -> list[Any]:
        return [value for run in self._outcomes if (value := run.get(name)) is not None]

    def mean(self, name: str) -> float | None:
        return _short(statistics.mean(self[name])) if self[name] else None


def _ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    return _short(sum(ours) / sum(theirs)) if ours and theirs else None


def _short(value: float) -> float:
    """Four digits that count: distances of points are small."""
    return float(f"{value:.4g}")


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--runs", type=Path, help="a file to keep every run's outcome in")
    parser.add_argument("--share", type=float, help="of the recipes' steps; 1, or 0.05 if quick")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    seeds, share = seeds_of(args, quick=2), args.share or (0.05 if args.quick else 1.0)
    with tempfile.TemporaryDirectory() as made:
        runs = Runs(args.runs.with_suffix(".teachers") if args.runs else Path(made), args.runs)
        asked = [case for case in CASES if case.data != "emoji" or "emoji" in args.only]
        for case in select(asked, args.only):
            yield compare(case, runs, seeds, share)
