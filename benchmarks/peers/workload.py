"""One site's part of a workload: the very model, data, batches and inner optimiser of fedwan's.

`digits_flow` is fedwan's recipe `sites/flow.py` on its digits, `timed` a workload of pix2pix's
size with steps of exactly 0.1 s (`benchmarks/recipes`). Every system trains what `open_part` gives:
the same initial weights, the same shard, the same batches in the same order, the same noise.
"""

from __future__ import annotations

import statistics
from dataclasses import dataclass

import torch

from benchmarks.harness.stopwatch import STOPWATCH, Watched
from benchmarks.peers.spec import Spec
from fedwan.app import load_run, load_workload
from fedwan.config import Config, site_names
from fedwan.data.loader import Loader
from fedwan.data.shard import Shard, open_shard
from fedwan.rng import NamedGenerators
from fedwan.state import State, state_of
from fedwan.workloads.base import keep_local

__all__ = ["WORKLOADS", "Part", "config_of", "measure_local_step", "open_part"]

WORKLOADS = ("digits_flow", "timed")
LOCAL_STEPS = 50


@dataclass(frozen=True)
class Part:
    """What one site trains."""

    config: Config
    workload: Watched
    shard: Shard
    rng: NamedGenerators
    stream: Loader

    @property
    def state(self) -> State:
        """The live weights, by fedwan's names."""
        return state_of(self.workload.networks)

    @property
    def samples_per_step(self) -> int:
        """Over all sites."""
        return self.config.data.batch * self.config.sites

    def step(self) -> None:
        """One inner step on the next batch."""
        self.workload.step(next(self.stream), self.rng, keep_local)


def config_of(spec: Spec) -> Config:
    """The run as fedwan's configuration says it; to be called in the app's folder."""
    words = [
        f"workload={spec.workload}",
        f"sites={spec.sites}",
        f"steps={spec.steps}",
        f"seed={spec.seed}",
        "device=cpu",
        "threads=1",
        *([f"h={spec.h}"] if spec.h > 1 else ["strategy=sync"]),
        *spec.words,
    ]
    return load_run(None, words)


def open_part(spec: Spec, site: int, config: Config | None = None) -> Part:
    """A site's part, with torch on one thread; to be called in the app's folder.

    Args:
        spec: the run.
        site: which site, from 0.
        config: resolved, if it is at hand.
    """
    torch.set_num_threads(1)
    config = config or config_of(spec)
    workload = load_workload(spec.workload).build(config, "cpu")
    shard = open_shard(config.data, site, spec.sites, spec.seed)
    rng = NamedGenerators(spec.seed, site_names(config)[site])
    stream = shard.loader(config.data.batch, rng["data"])
    return Part(config, workload, shard, rng, stream)


def measure_local_step(spec: Spec, site: int) -> float:
    """Median seconds of a step without any exchange, on a copy: what a step computes.

    For a system that exchanges inside every step, whose own steps do not tell it from waiting.
    """
    if STOPWATCH.nominal_s is not None:  # the workload says it
        return STOPWATCH.nominal_s
    scratch = open_part(spec, site)
    for _ in range(LOCAL_STEPS):
        scratch.step()
    seconds = statistics.median(STOPWATCH.computed)
    STOPWATCH.forget()
    return seconds
