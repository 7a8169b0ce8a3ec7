"""A round by number of sites: time, and what it costs the coordinator, from 2 sites to 64.

    python benchmarks/scale.py [--quick] [--json PATH]

The coordinator is a process of its own with the services' engine: mutual TLS, spooled
contributions, merging, outer Nesterov steps, coded updates. Sites are light (`light_sites.py`): one
process hosts all, each with a certificate and connections of its own; they send real payloads, but
compute nothing and throw updates away. Nothing is packed on the way. Everything shares this
machine's cores, so that at many sites the time of a round is the machine's: the sites' processor
time stands in the row, too.

A round lasts from one published update to the next; medians over the rounds that count. Processor
seconds, bytes (both directions, all sites) and chunks' framing are a round's; memory is the whole
run's peak.

Row: sites codec model_mb channels round_ms coordinator_cpu_s coordinator_rss_mb sites_cpu_s
sites_rss_mb round_mb
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.light_sites import RUN_ID, Marks, run_sites, site_names  # noqa: E402
from benchmarks.party import save_json  # noqa: E402
from benchmarks.rows import print_row, write_rows  # noqa: E402
from benchmarks.scale_plot import draw  # noqa: E402

SIZES = (2, 4, 8, 16, 32, 64)
QUICK_SIZES = (4, 16)
CODEC = "int4"
MODEL_MB = 200.0
NUM_ROUNDS = 6
WARM_UP = 2
"""Rounds that are not measured."""
LIMIT_S = 900.0
"""A run that takes longer has failed."""


@dataclass(frozen=True)
class Case:
    """One run."""

    sites: int
    model_mb: float = MODEL_MB
    rounds: int = NUM_ROUNDS
    channels: int = 0


def serve(folder: Path, case: Case) -> dict[str, Any]:
    """The coordinator: serve a run to its end; the port goes into a file for the sites."""
    from fedwan.coordinator.desk import Desk
    from fedwan.coordinator.plan import Plan

    from fedwan import codecs, outer
    from fedwan.config import LinkConfig
    from fedwan.coordinator.intake import Intake
    from fedwan.coordinator.policy import barrier
    from fedwan.coordinator.registry import Registry
    from fedwan.coordinator.rounds import Rounds
    from fedwan.coordinator.server_step import step_outer
    from fedwan.coordinator.service import SILENT_HEARTBEATS, SPARE_THREADS
    from fedwan.fragments import whole
    from fedwan.link.client import CHUNK_BYTES, HEARTBEAT_S
    from fedwan.link.server import DataPlane, threads_per_site
    from fedwan.link.tls import Identity
    from fedwan.strategy import Strategy

    link, names, codec = LinkConfig(), site_names(case.sites), getattr(codecs, CODEC)()
    step = step_outer({"model": outer.nesterov(0.5, 0.5)})
    strategy = Strategy("delta", 1, whole, step, codec, codec, barrier(case.sites))
    registry = Registry(names, SILENT_HEARTBEATS * HEARTBEAT_S)
    intake = Intake(codec, 0.0, folder / "spool")
    desk = Desk(RUN_ID, registry, intake, whole, lambda *event: None, CHUNK_BYTES)
    identity = Identity.load(folder / "pki" / "coordinator", "coordinator")
    num_threads = case.sites * threads_per_site(case.channels) + SPARE_THREADS
    plane = DataPlane(
        *(desk, identity, "127.0.0.1", 0, num_threads, HEARTBEAT_S),
        congestion=link.congestion,
        num_sites=case.sites,
    )
    plane.start()
    save_json(folder / "port.json", plane.port)
    marks = Marks()

    def record(row: dict[str, Any]) -> None:
        # A row per site comes as soon as an update is out; the first one marks the time.
        if row["kind"] == "round" and row["version"] > len(marks):
            marks.add()

    plan = Plan(tuple(names), case.rounds, 1, 1e3, case.rounds + 1, 0, 60.0, folder / "checkpoint")
    loop = Rounds(plan, strategy, desk, record, lambda *_: None)
    # The final checkpoint is no part of a round.
    loop.checkpoint = lambda model: None  # type: ignore[method-assign]
    loop.run()
    plane.stop()
    return marks.result()


def measure(case: Case) -> dict[str, Any]:
    """One row: a run of its own, in processes of its own."""
    from fedwan.link import pki

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pki.init(folder / "pki", ["127.0.0.1"])
        for site in site_names(case.sites):
            pki.issue(folder / "pki", site)
        words = [f"--{key}={value}" for key, value in vars(case).items()]
        command = [sys.executable, __file__, f"--folder={name}", *words, "--role"]
        _await_all([subprocess.Popen([*command, role]) for role in ("coordinator", "sites")])
        coordinator, sites = (Marks.load(folder / f"{r}.json") for r in ("coordinator", "sites"))
    num_rounds = case.rounds - WARM_UP
    times = coordinator["times"][WARM_UP - 1 :]
    return {
        "sites": case.sites,
        "codec": CODEC,
        "model_mb": case.model_mb,
        "channels": sites["channels"],
        "round_ms": round(statistics.median(1e3 * (b - a) for a, b in pairwise(times)), 1),
        "coordinator_cpu_s": round(_growth(coordinator["cpu_s"]) / num_rounds, 3),
        "coordinator_rss_mb": round(coordinator["rss_mb"]),
        "sites_cpu_s": round(_growth(sites["cpu_s"]) / num_rounds, 3),
        "sites_rss_mb": round(sites["rss_mb"]),
        "round_mb": round(_growth(sites["num_bytes"]) / num_rounds / 1e6, 2),
    }


def _growth(values: Sequence[float]) -> float:
    """Over the rounds that count; there is a value after each round."""
    return values[-1] - values[WARM_UP - 1]


def _await_all(children: list[subprocess.Popen[bytes]]) -> None:
    """Wait for all; if one fails, end the others, which would wait for it."""
    deadline = time.monotonic() + LIMIT_S
    try:
        # All are polled each time: the first may wait for one that has failed.
        while None in (codes := [child.poll() for child in children]):
            if any(codes) or time.monotonic() > deadline:
                break
            time.sleep(0.05)
        if any(child.returncode != 0 for child in children):
            raise SystemExit(
                f"a process of the benchmark failed, or took over {LIMIT_S:g} s; "
                "its error stands above"
            )
    finally:
        for child in children:
            child.kill()
            child.wait()


def main() -> None:
    """Measure every size, print a table, write rows and a picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--json", type=Path, help="write rows to this file, a picture beside it")
    parser.add_argument("--quick", action="store_true", help="only 4 and 16 sites")
    parser.add_argument("--sites", type=int, nargs="+", help="numbers of sites")
    parser.add_argument("--model-mb", "--model_mb", type=float, default=MODEL_MB, help="in fp32")
    parser.add_argument("--channels", type=int, default=0, help="as link.channels")
    parser.add_argument("--rounds", type=int, default=NUM_ROUNDS, help="2 of them not measured")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.rounds <= WARM_UP:
        parser.error(f"--rounds={args.rounds} leaves none to measure; take {WARM_UP + 1} or more")
    sizes = args.sites or (QUICK_SIZES if args.quick else SIZES)
    cases = [Case(num, args.model_mb, args.rounds, args.channels) for num in sizes]
    if args.role:
        from fedwan.memory import tune_allocator

        tune_allocator()  # as both services do
        play = serve if args.role == "coordinator" else run_sites
        save_json(args.folder / f"{args.role}.json", play(args.folder, cases[0]))
        return
    rows: list[dict[str, Any]] = []
    for case in cases:
        rows.append(measure(case))
        print_row(rows[-1], is_first=len(rows) == 1)
    if args.json:
        write_rows(args.json, rows)
        draw(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
