"""A configured run in one process, for benchmarks that compare qualities and not links."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from fedwan.simulate import Absence, SimulatedRun, SimulatedSite, simulate

from fedwan.app import load_strategy, load_workload
from fedwan.config import Config, site_names
from fedwan.data.shard import Shard, open_shard
from fedwan.workloads.base import Workload

__all__ = ["run_simulated"]


def run_simulated(
    config: Config,
    wrap: Callable[[int, Workload], Workload] = lambda _, workload: workload,
    absences: Mapping[str, Absence] | None = None,
    wrap_shard: Callable[[int, Shard], Shard] = lambda _, shard: shard,
    folder: Path | None = None,
) -> SimulatedRun:
    """The real engine, round loop, codecs and strategy over loopback links.

    Args:
        config: resolved.
        wrap: gets a site's number, counted from 0, and its workload; returns the one to use.
        absences: by site; see `fedwan.simulate`.
        wrap_shard: as `wrap`, for a site's data.
        folder: for checkpoints, which are kept there; None throws them away.
    """
    recipe = load_workload(config.workload)

    def build(index: int) -> Workload:
        return wrap(index, recipe.build(config, "cpu"))

    sites = {
        name: SimulatedSite(
            build(index),
            wrap_shard(index, open_shard(config.data, index, config.sites, config.seed)),
            rebuild=partial(build, index),
        )
        for index, name in enumerate(site_names(config))
    }
    with tempfile.TemporaryDirectory() as made:
        return simulate(
            sites,
            load_strategy(config.strategy).build(config),
            folder or Path(made),
            num_steps=config.steps,
            batch=config.data.batch,
            seed=config.seed,
            ema_half_life=config.ema.half_life,
            absences=absences,
            inner=config.inner,
        )
