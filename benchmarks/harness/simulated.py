"""Whole runs in one process, for tables that compare qualities and not links."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.table import Row
from fedwan.app import load_run, load_workload
from fedwan.config import Config, site_names
from fedwan.data.shard import Shard, open_shard
from fedwan.link.base import Link
from fedwan.rng import derive_seed
from fedwan.simulation import Absence, SimulatedRun, simulate
from fedwan.site.group import Group
from fedwan.site.recipe import train
from fedwan.site.site import Membership
from fedwan.weights import load
from fedwan.workloads.settings import networks_of


def run_simulated(
    words: Sequence[str],
    wrap: Callable[[int, Any, Shard], tuple[Any, Shard]] = lambda _, *given: given,
    absences: Mapping[str, Absence] | None = None,
    folder: Path | None = None,
    wrap_link: Callable[[str, Link], Link] = lambda _, link: link,
) -> tuple[Config, SimulatedRun]:
    """The real engine, round loop, codecs and strategy over loopback links.

    Args:
        words: settings, `key=value`.
        wrap: gets a site's number, from 0, its workload and its data; returns those to use.
        absences: by site, the shares of the run at which it dies and returns.
        folder: keeps the checkpoints.
        wrap_link: gets a site's name and its link.
    """
    torch.set_num_threads(1)  # the sites' threads share the cores
    config = load_run(None, list(words))
    recipe = load_workload(config.workload)
    names = site_names(config)

    def take_part(member: Membership) -> None:
        index = names.index(member.name)
        shard = open_shard(config.data, index, config.num_sites, config.seed)
        workload, shard = wrap(index, recipe.build(config, "cpu"), shard)
        train(member, Group(), workload, shard, networks_of(recipe, config))

    with tempfile.TemporaryDirectory() as made:
        at = folder or Path(made)
        run = simulate(config, at, train=take_part, wrap=wrap_link, absences=absences)
    return config, run


def describe(config: Config, run: SimulatedRun) -> Row:
    """What tables tell of a run; each takes the columns that it has."""
    totals = run.totals
    # Each fragment's contributions count the samples behind it.
    first = [row for row in run.records if row["kind"] == "round" and row["fragment"] == 0]
    return {
        "up": config.codec.up,
        "down": config.codec.down,
        "h": config.h,
        "steps": config.steps,
        "seed": config.seed,
        "samples": totals.samples,
        "fd": round(totals.quality["fd"], 3),
        "fd_floor": round(totals.quality["fd_floor"], 3),
        "modes": totals.quality.get("modes"),
        "bytes_up": totals.bytes_up,
        "bytes_down": totals.bytes_down,
        "site_steps": sum(row["samples"] for row in first) / config.data.batch,
        "late": totals.late,
        "dropped": totals.dropped,
        "staleness": round(totals.staleness / max(1, totals.contributions), 2),
        "findings": [row for row in run.records if row.get("event") == "finding"],
    }


@torch.no_grad()
def evaluate(folder: Path, num: int) -> list[dict[str, Any]]:
    """Quality of a run's moving average with `num` sets of samples; two, if nothing is drawn."""
    trained = load(folder)
    config, workload = trained.config, trained.workload()
    held_out = open_shard(config.data, 0, config.num_sites, config.seed).held_out
    seeds = [derive_seed(config.seed, "evaluate", index) for index in range(num)]
    rows = [workload.evaluate(held_out, seed) for seed in seeds[:2]]
    if rows[0] != rows[1]:  # otherwise nothing is drawn, as by pix2pix
        rows += [workload.evaluate(held_out, seed) for seed in seeds[2:]]
    return rows
