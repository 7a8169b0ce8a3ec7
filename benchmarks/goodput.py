"""What is left of a run's work while its processes are killed again and again.

`timed`, steps of 0.1 s, H = 50, int4, a link of 100 Mbit/s and 100 ms each: a coordinator and
sites as services, in a network and on a disk of their own; four of pix2pix's size, or `--sites` of
them with as many values together, which two processors carry. A process is killed at random
moments, so many an hour of all sites; the coordinator is started again as soon as it has ended.
Goodput is the weight of the contributions that were merged in a second (1 for H steps), over that
of the run that nothing disturbed, counted from the third version on. Where there is a `quorum`, a
round goes on without an eighth of the sites, one at least. Needs root. `--quick`: two fifths of the
time. `--hour`: an hour, in which the coordinator is killed six times.
"""

from __future__ import annotations

import argparse
import random
import shutil
import tempfile
import time
from functools import cache
from pathlib import Path
from typing import NamedTuple

from benchmarks.harness.federation import RECIPE, Services, kill
from benchmarks.harness.table import Row, columns_of

FIRST = 3
DISK = "size=10g"
UNDISTURBED_S = 90.0
COORDINATOR = "flwr-serverapp"


class Case(NamedTuple):
    strategy: str
    sites: int
    quorum: int
    killed: str
    per_hour: float
    seconds: float

    @property
    def words(self) -> list[str]:
        words = "workload=timed h=50 steps=100000 codec.up=int4 codec.down=int4 eval.every=0"
        words += f" strategy={self.strategy} sites={self.sites} round.quorum={self.quorum}"
        words += f" model.width={round(64 * (4 / self.sites) ** 0.5)}"
        if self.strategy == "streaming_diloco":
            words += " stream.fragments=10 stream.tau=40"
        return f"{words} link.rate_mbit=100 link.rtt_ms=100".split()


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--hour", action="store_true", help="six kills of the coordinator an hour")
    parser.add_argument("--sites", type=int, default=4, help="how many; 4 if left out")


def cases(args: argparse.Namespace) -> list[Case]:
    strategies, sites = ("diloco", "streaming_diloco"), args.sites
    if args.hour:
        return [Case(strategy, sites, 0, COORDINATOR, 6, 3600) for strategy in strategies]
    found = []
    for strategy in strategies:
        for quorum in (0, sites - max(1, sites // 8)):
            found.append(Case(strategy, sites, quorum, RECIPE, 125, 300))
        found.append(Case(strategy, sites, 0, COORDINATOR, 60, 240))
    return found


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    share = 0.4 if args.quick else 1.0  # of windows that hold some rounds
    _, _, undisturbed = _rate(case._replace(killed="", per_hour=0, seconds=UNDISTURBED_S * share))
    faults, seconds, rate = _rate(case._replace(seconds=case.seconds * share))
    return {
        **columns_of(case, "strategy sites quorum"),
        "killed": "coordinator" if case.killed == COORDINATOR else "site",
        "per_hour": case.per_hour,
        "faults": faults,
        "seconds": round(seconds, 1),
        "contributions_per_s": round(rate, 3),
        "goodput": round(rate / undisturbed, 3),
        "lost_s": round((1 - rate / undisturbed) * seconds / max(1, faults), 2),
    }


@cache  # several cases are compared with one that nothing disturbs
def _rate(case: Case) -> tuple[int, float, float]:
    """Faults caused, seconds, and the weight of contributions merged in one of them."""
    # The same moments for every strategy and quorum.
    rng, faults = random.Random(f"{case.killed} {case.per_hour}"), 0
    folder = Path(tempfile.mkdtemp(prefix="fedwan-goodput-")) / "run"
    names = [f"s{number}" for number in range(1, case.sites + 1)]
    run = Services(folder, names, case.words, DISK)
    try:
        run.start()
        run.reach(FIRST)
        began = time.monotonic()
        while (now := time.monotonic()) < began + case.seconds:
            pause = rng.expovariate(case.per_hour / 3600) if case.per_hour else case.seconds
            left = began + case.seconds - now
            time.sleep(min(pause, left))
            if pause < left:
                kill(run.find(rng, case.killed))
                faults += 1
            if case.killed == COORDINATOR and faults:
                run.reach(run.version() + 1)  # started again as soon as it has ended
        run.reach(run.version() + 1)
        return faults, *_merged(run)
    finally:
        run.close()
        shutil.rmtree(folder.parent)


def _merged(run: Services) -> tuple[float, float]:
    """Seconds from the third version to the last, and the weight merged in one of them."""
    rows = run.journal()
    ends = [place for place, row in enumerate(rows) if row["event"] == "version"]
    first, last = ends[FIRST - 1], ends[-1]
    merged = {  # once, where a version was made twice
        (row["fragment"], row["version"], row["site"]): row["weight"]
        for row in rows[first:last]
        if row["event"] == "contribution"
    }
    seconds = rows[last]["t"] - rows[first]["t"]
    return seconds, sum(merged.values()) / seconds
