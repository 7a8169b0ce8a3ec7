"""Goodput of the data plane beside one plain TCP flow, on the same emulated link, in turns.

A site uploads payloads of about 8 s, 256 MiB at most, to a coordinator, both real processes in
network namespaces (`wan.py`). Both sides' figures are bytes of payload over wall time, slow start
included; the flow's connection is new, the data plane's stand as they do between two rounds. Eight
transfers of a third of that time come before those that count. Each figure is the median of three.
`--quick`: 4 s instead of 8, once.

Row: link rate_mbit rtt_ms loss cc channels goodput_mbit tcp_mbit ratio emulation way
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import time
from typing import NamedTuple

from benchmarks.harness.ends import Ends, opened, tcp_mbit
from benchmarks.harness.table import Row, columns_of
from benchmarks.wan import Star, WanLink
from fedwan.link.server import MAX_NOISE_BYTES

RTT_MS = 100.0
WARM_UPS = 8
LEAST_BYTES = 8 << 20
PAUSE_S = 1.2
"""Idle time before a transfer, as between two rounds."""


class Case(NamedTuple):
    link: WanLink
    congestion: str


def transfer(ends: Ends, way: str, seconds: float, rate_mbit: float) -> tuple[float, int]:
    """Of so many seconds at a rate: the rate that it had, and its channels."""
    time.sleep(PAUSE_S)
    num_bytes = int(seconds * rate_mbit * 1e6 / 8)
    num_bytes = min(max(LEAST_BYTES, num_bytes), MAX_NOISE_BYTES)
    ends.order(way, num_bytes)
    took_s, channels, _ = ends.result()
    return num_bytes * 8e-6 / took_s, channels


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    ours: list[float] = []
    theirs: list[float] = []
    seconds = args.seconds or (4 if args.quick else 8)
    with Star(1, case.link) as star, opened(star, case.congestion, packs=False) as ends:
        receiver, sender = star.coordinator, star.sites[0]
        if args.way == "down":
            receiver, sender = sender, receiver
        rate = case.link.rate_mbit / 4
        for _ in range(WARM_UPS):
            rate, _ = transfer(ends, args.way, seconds, rate / 3)
        for _ in range(1 if args.quick else 3):
            theirs.append(tcp_mbit(receiver, sender, seconds, 0, case.congestion))
            rate, channels = transfer(ends, args.way, seconds, rate)
            ours.append(rate)
    goodput, tcp = statistics.median(ours), statistics.median(theirs)
    return {
        "link": f"{case.link.rate_mbit:g} Mbit/s, {case.link.rtt_ms:g} ms",
        **columns_of(case.link, "rate_mbit rtt_ms loss"),
        "cc": case.congestion,
        "channels": channels,
        "goodput_mbit": round(goodput, 1),
        "tcp_mbit": round(tcp, 1),
        "ratio": round(goodput / tcp, 3),
        "emulation": star.emulation,
        "way": args.way,
        "all_goodput_mbit": [round(value, 1) for value in ours],
        "all_tcp_mbit": [round(value, 1) for value in theirs],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0, help="of a transfer that counts")
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=(200.0, 1000.0))
    parser.add_argument("--loss", type=float, nargs="+", default=(0.0, 0.01, 0.1), help="percent")
    parser.add_argument("--cc", nargs="+", default=("cubic", "bbr"), help="or system")
    parser.add_argument("--way", choices=["up", "down"], default="up")


def cases(args: argparse.Namespace) -> list[Case]:
    losses = [loss / 100 for loss in args.loss]
    links = [WanLink(rate, RTT_MS, loss) for rate in args.rate_mbit for loss in losses]
    return list(itertools.starmap(Case, itertools.product(links, args.cc)))
