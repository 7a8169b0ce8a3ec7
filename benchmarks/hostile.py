"""One site of three lies, with a certificate and in every call: what comes of the run?

Tensors of pix2pix at a 64th of its width, steps of 0.05 s that sleep, as where a GPU computes,
quorum 2, in real processes over the data plane. The third site (`harness/hostile_site.py`) is a
member: it joins, sends heartbeats, and contributes NaN alone, so that the other two make every
round. Then the same run again, in which it also sends well-formed messages with hostile content to
every call, from 16 threads, as fast as they are answered, until the run is over; or so many
reports, of a run that measures quality; or keeps control streams, connections that say nothing, or
ones with a certificate that begin the headers of a call and do not end them.

`same`: the weights are those of the undisturbed run, bit for bit. `named`: the journal names the
hostile site in refusals, and no other. `strange`: answers UNKNOWN, which are exceptions that nobody
foresaw, and tracebacks in the coordinator's log. `round`, `memory`: median time of a round and the
coordinator's peak, over those of the undisturbed run; the hostile process takes its share of this
machine's cores. `--quick`: a tenth of the steps.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

from benchmarks.harness.fleet import FleetRun, run_fleet
from benchmarks.harness.table import Row

HOSTILE = "s3"
H = 20
TIMED = ("workload=timed", "model.width=1", "model.step_s=0.05", "eval.every=0")
MEASURED = ("workload=flow", "eval.every=100")


class Case(NamedTuple):
    name: str = ""
    messages: int = 0
    streams: int = 0
    connections: int = 0
    halves: int = 0
    reports: int = 0
    workload: Sequence[str] = TIMED

    def __str__(self) -> str:
        return self.name


CASES = (
    Case("messages", 10**9),
    Case("1,000 streams", streams=1000),
    Case("10,000 silent connections", connections=10_000),
    Case("1,000 half headers", halves=1000),
    Case("10,000 reports", reports=10_000, workload=MEASURED),
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=4000, help="of each run, H = 20")


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    steps = args.steps // (10 if args.quick else 1)
    before = _run(Case(workload=case.workload), steps, seed)
    now = _run(case, steps, seed)
    found = now.parties[HOSTILE]
    refusals = [row for row in now.journal if row["event"] == "rejected"]
    others = [row for row in refusals if row["site"] not in (HOSTILE, None)]
    for row in others[:5]:
        print(f"{row['site']} is named: {row['text']}", flush=True)
    return {
        "case": case.name,
        "messages": sum(found["sent"].values()),
        "refused": sum(found["answers"].values()) - found["answers"].get("OK", 0),
        "rejected": now.summary["rejected"],
        "same": now.summary["global_sha256"] == before.summary["global_sha256"],
        "named": bool(refusals) and not others,
        "strange": found["answers"].get("UNKNOWN", 0) + now.log.count("Traceback"),
        "round": round(_round_s(now) / _round_s(before), 2),
        "memory": round(_rss(now) / _rss(before), 2),
        "seconds": round(now.summary["wall_s"], 1),
        "sent": found["sent"],
        "answers": found["answers"],
    }


@cache
def _run(case: Case, steps: int, seed: int) -> FleetRun:
    words = [f"steps={steps}", f"h={H}", f"seed={seed}", "sites=3", *case.workload]
    words += ["round.quorum=2", "round.patience_s=20"]
    told = case.messages, case.streams, case.connections, case.halves, case.reports
    return run_fleet(words, others={HOSTILE: ("harness.hostile_site", *told)}, threads=1)


def _round_s(run: FleetRun) -> float:
    """Median, without the first two."""
    by_version = {row["version"]: float(row["round_s"]) for row in run.rounds}
    return statistics.median(list(by_version.values())[2:])


def _rss(run: FleetRun) -> float:
    return float(run.parties["coordinator"]["rss_mb"])
