"""What privacy costs in quality, and what an attack makes of the weights.

A flow on digits, iid, 2 sites of 698 or 699 samples each, delta 1e-5, whole runs in one process
(`fedwan.simulate`). Settings are chosen for privacy on seeds 0 and 1: a small network, large
batches and few steps. `none`: the same without privacy. `recipe`: as the recipe has it, 4000 steps
of a network of half a million weights, which learns samples by heart. `sites`: privacy of whole
sites, 32 of 43 or 44 samples each, whose weights are averaged five times, beside the same without.
The attack knows the moving average of the weights and tells by its loss, the mean of 64 draws of
noise and level, whether a sample was trained on: `auc` is the share of pairs of a training sample
and a held-out one that it tells right, 0.5 by chance.
`--accountant`: epsilon that was published for three settings, beside Opacus's accountants. `old` is
of the same moments, by the conversion that was used then (Mironov 2017, proposition 3).
`--quick`: one seed, 40 steps.
"""

from __future__ import annotations

import argparse
import math
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from torch import Tensor

from benchmarks.harness.simulated import evaluate, run_simulated
from benchmarks.harness.table import Row, half_interval, means, seeds_of, select, values_of
from fedwan.data.shard import open_shard
from fedwan.extras import require
from fedwan.weights import load
from fedwan.workloads import flow
from fedwan.workloads.base import Batch, share_above

SEEDS = 2
CLIP = 3.0
PRIVATE = "steps=400 data.batch=256 model.width=64 inner.velocity.lr=1e-3".split()
OF_SITES = [
    *"sites=32 strategy=local_sgd steps=400 h=80 data.batch=16".split(),
    *"model.width=8 model.depth=1 inner.velocity.lr=1e-2".split(),
]
SITE_CLIP = 2.0
CASES = {
    **{"recipe": -1.0, "none": 0.0, "epsilon 8": 8.0, "epsilon 4": 4.0, "epsilon 1": 1.0},
    **{"sites none": 0.0, "sites epsilon 8": 8.0},
}
"""Epsilon; 0 for no privacy, below it also the recipe's own settings."""
NUM_EVALUATIONS, NUM_DRAWS = 8, 64
PUBLISHED = {
    "Abadi et al. 2016 (1607.00133), figure 2, E = 100": (0.01, 4.0, 10_000, 1.26),
    "TensorFlow Privacy, tutorials/README.md, 60 epochs": (256 / 60_000, 1.12, 60 * 234, 2.92),
    "Opacus, examples/mnist_README.md, 45 epochs": (256 / 60_000, 0.7, 45 * 234, 7.10),
}
"""Sampling rate, noise, steps and epsilon at delta 1e-5."""
DELTA = 1e-5


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--accountant", action="store_true", help="epsilon beside published ones")
    parser.add_argument("--plot", type=Path, help="draw quality over epsilon of samples, a picture")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    if args.accountant:
        for name in select(list(PUBLISHED), args.only):
            yield accounted(name, *PUBLISHED[name])
        return
    rows: list[Row] = []
    for seed in seeds_of(args):
        for name in select(list(CASES), args.only):
            rows.append(train(args, name, seed))
            yield rows[-1]
    if args.plot:
        plot(rows, args.plot)


def train(args: argparse.Namespace, name: str, seed: int) -> Row:
    epsilon = CASES[name]
    is_sites = name.startswith("sites")
    unit, clip = ("site", SITE_CLIP) if is_sites else ("sample", CLIP)
    words = [
        "workload=flow",
        f"seed={seed}",
        "eval.every=0",
        *(OF_SITES if is_sites else ["sites=2"]),
    ]
    words += PRIVATE if epsilon >= 0 and not is_sites else []
    words += [f"privacy.epsilon={epsilon}", f"privacy.unit={unit}:{clip}"] if epsilon > 0 else []
    words += ["steps=40", "h=8"] if args.quick else []
    with tempfile.TemporaryDirectory() as made:
        config, run = run_simulated(words, folder=Path(made))
        found = evaluate(Path(made), NUM_EVALUATIONS)
        auc = attack(Path(made))
    return {
        "case": name,
        "epsilon": epsilon if epsilon > 0 else None,
        "clip": clip if epsilon > 0 else None,
        "steps": config.steps,
        "seed": seed,
        "fd": round(fmean(one["fd"] for one in found), 3),
        "fd_floor": round(found[0]["fd_floor"], 3),
        "spent": round(run.totals.epsilon, 3),
        "auc": round(auc, 4),
    }


@torch.no_grad()
def attack(folder: Path) -> float:
    """How often a run's moving average fits a sample of its sites better than a held-out one."""
    trained = load(folder)
    config, workload = trained.config, trained.workload()
    shards = [
        open_shard(config.data, i, config.num_sites, config.seed) for i in range(config.num_sites)
    ]
    members = Batch(*map(torch.cat, zip(*(shard.train.batch for shard in shards), strict=True)))
    others, own = (losses(workload, batch) for batch in (shards[0].held_out, members))
    return float(share_above(others, own))


def losses(workload: Any, batch: Batch) -> Tensor:
    """Of each sample, (samples,): the mean over draws."""
    generator = torch.Generator().manual_seed(0)
    total = torch.zeros(len(batch.x))
    for _ in range(NUM_DRAWS):
        noise = torch.randn(batch.x.shape, generator=generator)
        x, target = flow.interpolate(
            batch.x, noise, sigma := flow.draw_sigma(len(noise), generator)
        )
        error = workload.networks["velocity"](x, sigma) - target
        total += error.square().flatten(1).mean(1) / NUM_DRAWS
    return total


def accounted(name: str, rate: float, noise: float, steps: int, published: float) -> Row:
    """A published setting under Opacus's accountants."""
    accountants = require("opacus.accountants", "privacy")
    rdp, prv = accountants.RDPAccountant(), accountants.PRVAccountant()
    rdp.history = prv.history = [(noise, rate, steps)]
    orders = accountants.RDPAccountant.DEFAULT_ALPHAS
    moments = require("opacus.accountants.analysis.rdp", "privacy").compute_rdp(
        q=rate, noise_multiplier=noise, steps=steps, orders=orders
    )
    old = min(m - math.log(DELTA) / (a - 1) for m, a in zip(moments, orders, strict=True))
    found = {"old": old, "rdp": rdp.get_epsilon(DELTA), "prv": prv.get_epsilon(DELTA)}
    shown = {key: round(value, 3) for key, value in found.items()}
    rate = float(f"{rate:.3g}")
    return {"setting": name, "rate": rate, "noise": noise, "published": published, **shown}


def plot(rows: Sequence[Row], path: Path) -> None:
    """Distance over epsilon, means with their 95 % intervals over seeds."""
    figure = require("matplotlib.figure", "report").Figure(figsize=(4.4, 2.6), layout="constrained")
    axes, names = figure.subplots(), ["epsilon 1", "epsilon 4", "epsilon 8", "none"]
    values = [values_of(rows, "fd", case=name) for name in names]
    axes.errorbar(
        [name.removeprefix("epsilon ").replace("none", "∞") for name in names],
        [*map(fmean, values)],
        [*map(half_interval, values)],
        fmt="o-",
        capsize=4,
    )
    axes.set(xlabel="epsilon", ylabel="Fréchet distance", yscale="log")
    axes.set_yticks([3, 10, 30, 100], ["3", "10", "30", "100"])
    axes.minorticks_off()
    axes.grid(axis="y", alpha=0.3)
    figure.savefig(path, dpi=120)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    return means((row for row in rows if "case" in row), "case", "fd auc")
