"""What a machine of its own must show, every night: short measurements, each with its bounds.

The emulator's links, the codecs' speed, the planted faults, control variates where averaging fails,
the bytes of each strategy, and, where the peers' environment is there, the same training in two
independent programs. Exit code 1 if something is out of bounds.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks import codecs, doctor, quality, strategies, transport
from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, measure_all, read_arguments, select
from benchmarks.peers import compare
from benchmarks.wan import available
from fedwan.errors import FedwanError

Bounds = Iterator[tuple[str, float, float, float]]
"""Name, value, least, most."""


def rows_of(module: Any, *words: str) -> list[Row]:
    return list(measure_all(module, read_arguments(module, "check", ["--quick", *words])))


def check_transport() -> Bounds:
    """TCP gets a link's rate less its segments' headers, and the data plane as much."""
    (row,) = rows_of(transport, "--rate-mbit", "200", "--loss", "0", "--cc", "cubic")
    yield "TCP, of what is left", row["tcp_mbit"] / 200 / transport.TCP_SHARE, 0.7, 1.03
    yield "goodput beside TCP", row["ratio"], 0.7, math.inf
    yield "goodput, Mbit/s", row["goodput_mbit"], 0, 201 * transport.TCP_SHARE


def check_codecs() -> Bounds:
    """int8 and int4 are fast enough for any link, on one core."""
    for row in rows_of(codecs, "--only", "int"):
        for key, least in codecs.TARGETS.items():
            yield f"{row['codec']}, {key}", row[key], least, math.inf
        yield f"{row['codec']}, bits", row["bits_per_value"], 4, 8.3


def check_doctor() -> Bounds:
    """A planted fault is named at its site, and nothing else."""
    for case in doctor.CASES:
        if (case.workload, case.split) == ("flow", "iid"):
            row = doctor.measure_case(None, case, seed=2, rounds=6, h=16)
            if case.fault.kinds:
                yield f"{case.fault.name} is named", row["named"], 1, 1
            yield f"{case.fault.name}, nothing else", row["false_alarms"] == "none", 1, 1


def check_simulated() -> Bounds:
    """Bytes, absences, control variates: what runs of one process can show."""
    rows = rows_of(strategies, "--steps", "100", "--only", "sync")
    rows += rows_of(strategies, "--steps", "200", "--only", "async_diloco")
    rows += rows_of(strategies, "--steps", "100", "--only", "streaming_diloco, int4")
    found = {(row["strategy"], row["absent"]): row for row in rows}
    whole, coded = found["sync", False], found["streaming_diloco, int4", False]
    yield "late and dropped", coded["late"] + coded["dropped"], 0, 0
    yield "distance after an absence", found["async_diloco", True]["fd"], 0, 60
    # On ring8's small networks headers weigh more, and moments travel, too.
    yield "bytes of sync", whole["bytes_up"] / coded["bytes_up"], 100, math.inf
    (case,) = (c for c in quality.CASES if (c.data, c.strategy) == ("ring8", "scaffnew"))
    words = [*case.words(is_sync=False), "steps=1400"]
    # Averaging ends above 2, with no sample near the ring's far side.
    yield "two modes a site, the whole ring", describe(*run_simulated(words))["fd"], 0, 0.4


def check_peers() -> Bounds:
    """Torchft's DiLoCo and fedwan's are one algorithm in two programs."""
    words = ["--workload", "digits_flow", "--steps", "80", "--rtt-ms", "40"]
    systems = ["ddp", "torchft", "flower", "fedwan-diloco"]
    rows = rows_of(compare, "--systems", *systems, *words)
    found = {row["system"]: row for row in rows if row["link"] == "wan"}
    ours, theirs = found["fedwan-diloco"], found["torchft"]
    yield "distance beside torchft's", ours["fd"] / theirs["fd"], 0.9999, 1.0001
    # 4 exchanges of 2.1 MB by 2 sites, and headers, ours packed; DDP's 80.
    yield "bytes of torchft", theirs["bytes_up"], 16.9e6, 20e6
    yield "bytes of fedwan", ours["bytes_up"], 15e6, 20e6
    yield "bytes of DDP", found["ddp"]["bytes_up"] / theirs["bytes_up"], 15, math.inf


CHECKS: dict[str, Callable[[], Bounds]] = {
    "codecs": check_codecs,
    "doctor": check_doctor,
    "simulated": check_simulated,
    "transport": check_transport,
    "peers": check_peers,
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every check that this machine can make."""
    missed: list[str] = []
    checks = dict(CHECKS)
    if available() is not None:
        del checks["transport"]
    if available() is not None or not find_spec("torchft"):
        del checks["peers"]
    for check in select(checks, args.only):
        for name, value, least, most in check():
            holds = bool(least <= value <= most)
            missed += [] if holds else [name]
            bounds = {"least": least, "most": most, "check": name}
            yield {"holds": holds, "value": round(float(value), 4)} | bounds
    if missed:
        raise FedwanError(f"out of bounds: {'; '.join(missed)}")
