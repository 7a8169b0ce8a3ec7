"""Predicted beside measured utilisation, on the emulated wide area.

Three links, four settings each: the workload, the processes and the measurement are those of
`benchmarks/timed.py`, the predictions those of `fedwan plan` for its tensors. No point is among
those that the model's constants were taken from (docs/plan.md), and nothing is fitted to them.
`--quick`: one link.

`--simulator` times the simulator alone: sites of different speeds, which fail and
return, rounds that close with a quorum.

Row: strategy codec h rate_mbit rtt_ms loss predicted measured; sites fragments tau error besides
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor

from benchmarks.harness.table import Row, columns_of, select
from benchmarks.recipes.timed import Layers, patchgan_shapes, unet_shapes
from benchmarks.timed import STEP_S, Case, measure_case
from fedwan.app import load_strategy
from fedwan.config import Config, LinkConfig, StreamConfig
from fedwan.planner.links import modelled_link
from fedwan.planner.question import synthetic_layout
from fedwan.planner.virtual import run_virtually
from fedwan.planner.virtual_site import SiteModel, draw_outages
from fedwan.recipes import resolve_strategy
from fedwan.state import Layout, layout_of

WIDTH = 64
LINKS = ((50.0, 40.0, 0.0), (200.0, 100.0, 0.0), (400.0, 60.0, 0.0005))
"""Mbit/s, ms, share lost."""
TOLERANCE = 0.15


def cases(is_quick: bool) -> list[Case]:
    """Four settings on every link; one link in quick form."""
    found: list[Case] = []
    for rate, rtt, loss in LINKS[1:2] if is_quick else LINKS:
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
    words = dict(word.split("=") for word in case.words if word.startswith("stream."))
    if words:
        fragments, tau = int(words["stream.fragments"]), int(words["stream.tau"])
        config.stream = StreamConfig(fragments=fragments, tau=tau)
    recipe = load_strategy(case.strategy)
    resolve_strategy(recipe, config, dict.fromkeys(("generator", "discriminator"), "adversarial"))
    settings = columns_of(case, "rate_mbit rtt_ms loss congestion pace_mbit")
    link = modelled_link(LinkConfig(**settings))
    site = SiteModel(STEP_S, link)
    strategy = recipe.build(config)
    course = run_virtually(strategy, layout, [site] * case.sites, config.steps)
    return course.utilisation([STEP_S] * case.sites, case.h, case.skipped, case.rounds - 1)


def pix2pix_layout() -> Layout:
    """Of the timed workload."""
    shapes = {"generator": unet_shapes(WIDTH), "discriminator": patchgan_shapes(WIDTH)}
    return layout_of({network: Layers(layers) for network, layers in shapes.items()})


def predict_apart(cases: Sequence[Case]) -> list[float]:
    """Each case's prediction, before any is measured.

    In a process of its own: one that has imported the strategies stays with their app, and what is
    measured has a workload in an app of the benchmarks' own.
    """
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return list(pool.map(_predict_pix2pix, cases))


def _predict_pix2pix(case: Case) -> float:
    return predict(case, pix2pix_layout())


def compare(case: Case, predicted: float) -> Row:
    """One point, as a row."""
    row = measure_case(case)
    measured = row["utilisation"]
    return {
        **columns_of(case, "strategy codec h rate_mbit rtt_ms loss"),
        "predicted": round(predicted, 4),
        "measured": measured,
        "sites": case.sites,
        "fragments": row["fragments"],
        "tau": case.tau,
        "error": round(predicted / measured - 1, 3),
        "emulation": row["emulation"],
    }


def simulate(num_sites: int, num_rounds: int, seed: int = 0) -> Row:
    """The simulator's own time, for a run in which much goes wrong."""
    h = 20
    config = Config(strategy="diloco", sites=num_sites, h=h, steps=num_rounds * h)
    config.codec.up = config.codec.down = "int4"
    config.round.quorum = max(1, 9 * num_sites // 10)
    config.round.patience_s = 30.0
    recipe = load_strategy(config.strategy)
    resolve_strategy(recipe, config, {"model": "regression"})
    link = modelled_link(LinkConfig(rate_mbit=1000.0, rtt_ms=50.0))
    horizon_s = 100.0 * num_rounds
    draw = random.Random(seed)
    sites = [
        SiteModel(
            draw.uniform(0.09, 0.11),
            link,
            draw_outages(seed, index, horizon_s, mean_up_s=20_000.0, mean_down_s=120.0),
        )
        for index in range(num_sites)
    ]
    began, cpu = time.perf_counter(), time.process_time()
    course = run_virtually(recipe.build(config), synthetic_layout(10_000_000), sites, config.steps)
    return {
        "sites": num_sites,
        "rounds": len(course.rounds),
        "contributions": course.contributions,
        "dropped": course.dropped,
        "rejoins": course.rejoins,
        "virtual_s": round(course.wall_s, 1),
        "wall_s": round(time.perf_counter() - began, 2),
        "cpu_s": round(time.process_time() - cpu, 2),
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--simulator", action="store_true", help="time the simulator instead")
    parser.add_argument("--sites", type=int, default=1000, help="of the simulator")
    parser.add_argument("--rounds", type=int, default=1000, help="of the simulator")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every case, or the simulator's own time."""
    if args.simulator:
        yield simulate(args.sites, args.rounds)
        return
    wanted = select({str(case): case for case in cases(args.quick)}, args.only)
    for case, predicted in zip(wanted, predict_apart(wanted), strict=True):
        yield compare(case, predicted)


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """How many points the prediction comes near to."""
    errors = [abs(row["error"]) for row in rows if "error" in row]
    near = sum(error <= TOLERANCE for error in errors)
    if errors:
        yield f"{near} of {len(errors)} predicted within {TOLERANCE:.0%} of what was measured"
