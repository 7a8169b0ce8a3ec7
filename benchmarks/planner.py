"""Predicted beside measured utilisation, on the emulated wide area.

Three links, four settings each: the workload, the processes and the measurement are those of
`benchmarks/timed.py`, the predictions those of `fedwan plan` for its tensors. No point is among
those that the model's constants were taken from (docs/plan.md), and nothing is fitted to them.
`--quick`: one link.
"""

from __future__ import annotations

import argparse
import multiprocessing
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks import timed
from benchmarks.codecs import pix2pix_layout
from benchmarks.harness.table import Row, columns_of
from benchmarks.timed import STEP_S, Case
from fedwan.app import load_strategy
from fedwan.config import Config, LinkConfig, StreamConfig
from fedwan.planner.costs import Costs, modelled_link
from fedwan.planner.virtual import VirtualRun
from fedwan.recipes import resolve_strategy
from fedwan.state import Layout

LINKS = ((50.0, 40.0, 0.0), (200.0, 100.0, 0.0), (400.0, 60.0, 0.0005))
"""Mbit/s, ms, share lost."""
TOLERANCE = 0.15


def cases(args: argparse.Namespace) -> list[Case]:
    found = []
    for rate, rtt, loss in LINKS[1:2] if args.quick else LINKS:
        on = {"rate_mbit": rate, "rtt_ms": rtt, "loss": loss}
        found += [
            Case("streaming_diloco", "int4", 20, 2, rounds=16, skipped=6, **on),
            Case("streaming_diloco", "int8", 50, 2, rounds=7, skipped=3, **on),
            Case("diloco", "int4", 50, 2, rounds=5, skipped=1, **on),
            Case("diloco", "bf16", 20, 2, rounds=5, skipped=1, **on),
        ]
    return found


def predict(case: Case, layout: Layout) -> float:
    """Utilisation in virtual time, of the same rounds."""
    config = Config(strategy=case.strategy, sites=case.sites, h=case.h, steps=case.rounds * case.h)
    config.codec.up = config.codec.down = case.codec
    if case.streams:
        config.stream = StreamConfig(fragments=timed.NUM_FRAGMENTS, tau=case.tau)
    recipe = load_strategy(case.strategy)
    resolve_strategy(recipe, config, dict.fromkeys(("generator", "discriminator"), "adversarial"))
    settings = columns_of(case, "rate_mbit rtt_ms congestion pace_mbit")
    link = modelled_link(LinkConfig(**settings))
    course = VirtualRun(
        recipe.build(config), layout, case.sites, config.steps, STEP_S, link, Costs()
    ).play()
    return course.utilisation(case.h * STEP_S, case.skipped, case.rounds - 1)


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    """A row, predicted before it is measured."""
    # In a process of its own: one that has imported the strategies stays with their app, and what
    # is measured has a workload in an app of the benchmarks' own.
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        predicted = pool.submit(predict, case, pix2pix_layout()).result()
    row = timed.measure_case(args, case, 0)
    return {
        **{key: row[key] for key in "strategy codec h rate_mbit rtt_ms loss".split()},
        "predicted": round(predicted, 4),
        "measured": row["utilisation"],
        **{key: row[key] for key in "sites fragments tau".split()},
        "error": round(predicted / row["utilisation"] - 1, 3),
        "emulation": row["emulation"],
    }


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    near = sum(abs(row["error"]) <= TOLERANCE for row in rows)
    yield f"{near} of {len(rows)} predicted within {TOLERANCE:.0%} of what was measured"
