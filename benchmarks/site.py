"""Inside a site: what its ways to compute a step cost, and what a process holds.

pix2pix on `photo_edges` at one site, for an epoch: as it is, by two processes, in half precision,
accumulated, clipped, recomputed. Every variant computes parts of 16 samples, so that accumulation
and data parallel take larger batches and fewer steps. The product's own processes, under torchrun
where there are several; on a CPU they share its cores. Losses are means over the epoch: the
discriminator's, and the generator's with 100 times its L1. `--quick` takes a twentieth of an epoch,
at least two steps, and scales its time up. `--full` is the size of the source: 256 x 256 pixels,
57 million weights, batches of one, 400 pairs of smooth noise an epoch, of which an eighth is timed;
on one GPU without two processes.

`held_mb` is what a process holds of weights, gradients and moments between two steps, in 1e6 bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch

from benchmarks.gpu import pictures
from benchmarks.harness.fleet import run_fleet
from benchmarks.harness.table import Row

QUICK = 20
BATCH = 16
NUM_SAMPLES = 2496
"""Of `photo_edges` that a lone site trains on, to whole batches."""


class Variant(NamedTuple):
    name: str
    words: tuple[str, ...] = ()
    times: int = 1
    """The batch is so many times the others'."""


TWO = "site.processes=2"
CASES = (
    Variant("baseline"),
    Variant("data parallel, 2", (TWO,), times=2),
    Variant("gradients shared out, 2", (TWO, "site.partition=gradients"), times=2),
    Variant("weights shared out, 2", (TWO, "site.partition=weights"), times=2),
    Variant("AMP, bf16-mixed", ("site.precision=bf16-mixed",)),
    Variant("accumulation of 4", ("site.accumulate=4",), times=4),
    Variant(
        "clipping at norm 2", ("inner.generator.clip_norm=2", "inner.discriminator.clip_norm=2")
    ),
    Variant("recomputed blocks", ("site.recompute=true",)),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="at the source's size")


def cases(args: argparse.Namespace) -> Mapping[str, Variant]:
    """NCCL wants a GPU for every process."""
    few = args.full and torch.cuda.device_count() == 1
    return {v.name: v for v in CASES if not (few and TWO in v.words)}


def measure_case(args: argparse.Namespace, variant: Variant, seed: int) -> Row:
    batch = (1 if args.full else BATCH) * variant.times
    epoch = (400 if args.full else NUM_SAMPLES) // batch
    words = ["workload=pix2pix", "sites=1", "strategy=local_sgd", "eval.every=0", "eval.num=16"]
    if args.full:
        # Exchanges of 230 MB are not what is measured: two in all, the first of them unseen.
        h = max(1, epoch // 8)
        steps = 2 * h
        words += ["data.name=pairs", f"data.path={pictures()['pairs']}", "data.workers=4"]
        words += ["model.width=64", "model.depth=8"]
    else:
        h, steps = 1, max(2, epoch // QUICK) if args.quick else epoch
        words += ["data.name=photo_edges"]
    words += [f"h={h}", f"data.batch={batch}", f"steps={steps}", f"checkpoint.every={1000 * steps}"]
    threads = max(1, len(os.sched_getaffinity(0)) // 2) if TWO in variant.words else 0
    run = run_fleet([*words, *variant.words], threads=threads)
    # The first step is slower than any other.
    seconds = statistics.mean(row["compute_s"] for row in run.rounds[1:]) / h
    losses = {
        name: statistics.mean(row["losses"][name] for row in run.rounds)
        for name in run.rounds[0]["losses"]
    }
    is_on_gpu = torch.cuda.is_available()
    return {
        "variant": variant.name,
        "device": torch.cuda.get_device_name() if is_on_gpu else "cpu",
        "steps": steps,
        "epoch_s": round(seconds * epoch, 2),
        "held_mb": round(run.sites[0]["held_mb"], 2),
        "d_loss": round(losses["discriminator"], 4),
        "g_loss": round(losses["generator"] + run.config.model["l1"] * losses["l1"], 3),
    }
