"""What a machine of its own must show, every night: short measurements, each with its bounds.

The emulator's links, the codecs' speed, the planted faults, control variates where averaging fails,
the bytes of each strategy, and, where the peers' environment is there, the same training in two
independent programs. Exit code 1 if something is out of bounds.

Row: check value least most holds
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from typing import Any

from benchmarks import codecs, doctor, quality, site, strategies, transport, unequal
from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, mean_of, measure_all, read_arguments, select
from benchmarks.wan import Star, WanLink, available, tcp_mbit
from fedwan.errors import FedwanError

PING = """
import contextlib, socket, statistics, sys, time
times = []
for _ in range(11):
    began = time.monotonic()
    with contextlib.suppress(ConnectionRefusedError):
        socket.create_connection((sys.argv[1], 9), timeout=3)
    times.append(1e3 * (time.monotonic() - began))
print(statistics.median(times))
"""
"""Median ms that TCP takes to be refused, which is a round trip."""
Bounds = Iterator[tuple[str, float, float, float]]
"""Name, value, least, most."""


def rows_of(module: Any, *words: str) -> list[Row]:
    return list(measure_all(module, read_arguments(module, "check", words)))


def check_wan() -> Bounds:
    """A link's round trip is its own, and TCP gets the rate less its segments' headers."""
    for rate, rtt_ms, seconds in ((50, 4, 1), (500, 20, 3)):
        with Star(1, WanLink(rate, rtt_ms)) as star:
            hub, place = star.coordinator, star.sites[0]
            ping = place.run([sys.executable, "-c", PING, hub.address], stdout=-1, text=True).stdout
            yield f"round trip of {rtt_ms} ms", float(ping), rtt_ms - 0.7, rtt_ms + 3
            for way, ends in (("up", (hub, place)), ("down", (place, hub))):
                share = tcp_mbit(*ends, seconds) / rate / transport.TCP_SHARE
                yield f"TCP {way} at {rate} Mbit/s, of what is left", share, 0.85, 1.03
                if way == "up":  # afterwards it carries acknowledgements
                    counts = star.counts(0)["up"]
        yield "bytes of a packet", counts["bytes"] / counts["packets"], 1300, 1500
    with Star(1, WanLink(0, 0, loss=0.2)) as star:
        tcp_mbit(star.coordinator, star.sites[0], 2)
        counts = star.counts(0)["up"]
    yield "lost of a fifth", counts["lost"] / counts["packets"], 0.1, 0.3


def check_transport() -> Bounds:
    """The data plane fills a link as one flow does."""
    words = ["--quick", "--rate-mbit", "200", "--loss", "0"]
    for way in ("up", "down"):
        (row,) = rows_of(transport, *words, "--way", way, "--cc", "cubic")
        yield f"goodput {way} beside TCP", row["ratio"], 0.7, math.inf
        yield f"goodput {way}, Mbit/s", row["goodput_mbit"], 0, 201 * transport.TCP_SHARE


def check_codecs() -> Bounds:
    """int8 and int4 are fast enough for any link, on one core."""
    for row in rows_of(codecs, "--quick", "--only", "int"):
        for key, least in codecs.TARGETS.items():
            yield f"{row['codec']}, {key}", row[key], least, math.inf
        yield f"{row['codec']}, bits", row["bits_per_value"], 4, 8.3


def check_doctor() -> Bounds:
    """A planted fault is named at its site, and nothing else."""
    for case in doctor.CASES:
        if (case.workload, case.split) == ("flow", "iid"):
            row = doctor.run_case(case, seed=2, rounds=6, h=16)
            yield f"{case.fault.name} is named", row["named"] is not False, 1, 1
            yield f"{case.fault.name}, nothing else", row["false_alarms"] == "none", 1, 1


def check_simulated() -> Bounds:
    """Bytes, absences, slow sites, control variates: what runs of one process can show."""
    row = strategies.measure_steps("flow", "diloco", 0, 100, is_disturbed=False)
    yield "late and dropped", row["late"] + row["dropped"], 0, 0
    absent = strategies.measure_steps("flow", "async_diloco", 0, 200, is_disturbed=True)
    yield "distance after an absence", absent["fd"], 0, 60
    slow = unequal.measure_steps("flow", "diloco", 0, 40)
    yield "seconds behind a barrier", slow["wall_s"], 40 * 4 * unequal.STEP_S, math.inf
    # On ring8's small networks headers weigh more, and moments travel, too.
    sync, coded = (
        strategies.measure_steps("flow", case, 0, 100, is_disturbed=False)["bytes_up"]
        for case in ("sync", "streaming_diloco, int4")
    )
    yield "bytes of sync", sync / coded, 100, math.inf
    (case,) = (c for c in quality.CASES if (c.data, c.strategy) == ("ring8", "scaffnew"))
    words = [*case.words(is_sync=False), "steps=1400"]
    # Averaging ends above 2, with no sample near the ring's far side.
    yield "two modes a site, the whole ring", describe(*run_simulated(words))["fd"], 0, 0.4


def check_site() -> Bounds:
    """Every variant trains, and takes no more than it should."""
    rows = rows_of(site, "--quick")
    for row in rows:
        yield f"epoch, {row['variant']}", row["epoch_s"], 0.01, math.inf
    plain, again = (mean_of(rows, "g_loss", variant=v) for v in ("baseline", "recomputed blocks"))
    yield "recomputed, the same loss", again / plain, 1, 1


def check_peers() -> Bounds:
    """Torchft's DiLoCo and fedwan's are one algorithm in two programs."""
    from benchmarks.peers import compare

    words = ["--workload", "digits_flow", "--steps", "80", "--points", "4", "--rtt-ms", "40"]
    rows = rows_of(compare, "--quick", "--systems", "ddp,torchft,flower,fedwan-diloco", *words)
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
    "site": check_site,
    "wan": check_wan,
    "transport": check_transport,
    "peers": check_peers,
}


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every check that this machine can make."""
    missed: list[str] = []
    checks = dict(CHECKS)
    if available() is not None:
        del checks["wan"], checks["transport"]
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
