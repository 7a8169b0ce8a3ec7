"""Inside a site: what its ways to compute a step cost, and what a process holds.

pix2pix on `photo_edges` at one site, for an epoch: as it is, by two processes, in half precision,
accumulated, clipped, recomputed. Every variant computes parts of 16 samples, so that accumulation
and data parallel take larger batches and fewer steps. The product's own processes, under torchrun
where there are several; on a CPU they share its cores. Losses are means over the epoch: the
discriminator's, and the generator's with 100 times its L1. `--quick` takes a twentieth of an epoch,
at least two steps, and scales its time up.

`held_mb` is what a process holds of weights, gradients and moments between two steps, in 1e6 bytes.
"""

from __future__ import annotations

import argparse
import os
import statistics
from collections.abc import Mapping
from typing import NamedTuple

import torch

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


def _of_two(partition: str) -> Variant:
    name = {"none": "data parallel, 2"}.get(partition, f"{partition} shared out, 2")
    return Variant(name, ("site.processes=2", f"site.partition={partition}"), times=2)


CASES = (
    Variant("baseline"),
    *map(_of_two, ("none", "gradients", "weights")),
    Variant("AMP, bf16-mixed", ("site.precision=bf16-mixed",)),
    Variant("weights in bf16", ("site.precision=bf16-true",)),
    Variant("accumulation of 4", ("site.accumulate=4",), times=4),
    Variant(
        "clipping at norm 2", ("inner.generator.clip_norm=2", "inner.discriminator.clip_norm=2")
    ),
    Variant("recomputed blocks", ("site.recompute=true",)),
)


def cases(args: argparse.Namespace) -> Mapping[str, Variant]:
    return {variant.name: variant for variant in CASES}


def measure_case(args: argparse.Namespace, variant: Variant, seed: int) -> Row:
    batch = BATCH * variant.times
    epoch = NUM_SAMPLES // batch
    steps = max(2, epoch // QUICK) if args.quick else epoch
    words = ["workload=pix2pix", "sites=1", "strategy=local_sgd", "eval.every=0", "eval.num=16"]
    words += ["data.name=photo_edges", f"data.batch={batch}", "h=1"]
    words += [f"steps={steps}", f"checkpoint.every={1000 * steps}"]
    if "site.processes=2" in variant.words:
        words.append(f"threads={max(1, len(os.sched_getaffinity(0)) // 2)}")
    run = run_fleet([*words, *variant.words])
    # The first step is slower than any other.
    seconds = statistics.mean(row["compute_s"] for row in run.rounds[1:])
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
