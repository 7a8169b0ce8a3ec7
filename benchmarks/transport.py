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
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import Process, module
from benchmarks.harness.table import Row, columns_of
from benchmarks.wan import Star, WanLink, tcp_mbit
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.server import MAX_NOISE_BYTES, DataPlane, Noise
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator

RTT_MS = 100.0
WARM_UPS = 8
LEAST_BYTES = 8 << 20
PAUSE_S = 1.2
"""Idle time before a transfer that counts, as between two rounds."""
TCP_SHARE = 1448 / 1500
"""What of a link's rate is left for payload under the headers of TCP and IP."""


@dataclass(frozen=True)
class Case:
    link: WanLink
    congestion: str
    way: str
    channels: int
    seconds: float
    repeats: int

    def num_bytes(self, rate_mbit: float) -> int:
        return max(LEAST_BYTES, int(self.seconds * rate_mbit * 1e6 / 8))


@contextmanager
def opened(star: Star, case: Case) -> Iterator[Callable[[int], tuple[float, int]]]:
    """The two ends, in a star: what transfers so many bytes, and says Mbit/s and channels."""
    host, pipes = star.coordinator.address, {"stdin": -1, "stdout": -1, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        pki.federation(Path(folder), [host], ["s1"])
        words = module("transport", folder, case.congestion)
        server: Any = Process("server", [*words, host], star.coordinator).start(**pipes)
        words += [f"{host}:{server.stdout.readline().strip()}", str(case.channels)]
        site: Any = Process("site", words, star.sites[0]).start(**pipes)

        def transfer(num_bytes: int) -> tuple[float, int]:
            print(json.dumps([case.way, num_bytes]), file=site.stdin, flush=True)
            if not (line := site.stdout.readline()):
                raise FedwanError("an end of the benchmark failed; its error stands above")
            mbit, channels = json.loads(line)
            return mbit, channels

        try:
            yield transfer
        finally:
            for child in (site, server):
                child.communicate(timeout=30)


def flow_mbit(star: Star, case: Case) -> float:
    receiver, sender = star.coordinator, star.sites[0]
    if case.way == "down":
        receiver, sender = sender, receiver
    return tcp_mbit(receiver, sender, case.seconds, 0, case.congestion)


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    ours: list[float] = []
    theirs: list[float] = []
    with Star(1, case.link) as star, opened(star, case) as transfer:
        rate = case.link.rate_mbit / 4
        for _ in range(WARM_UPS):
            time.sleep(PAUSE_S)
            rate, _ = transfer(case.num_bytes(rate / 3))
        for _ in range(case.repeats):
            theirs.append(flow_mbit(star, case))
            time.sleep(PAUSE_S)
            rate, channels = transfer(case.num_bytes(rate))
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
        "way": case.way,
        "all_goodput_mbit": [round(value, 1) for value in ours],
        "all_tcp_mbit": [round(value, 1) for value in theirs],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0, help="of a transfer that counts")
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=(200.0, 1000.0))
    parser.add_argument("--loss", type=float, nargs="+", default=(0.0, 0.01, 0.1), help="percent")
    parser.add_argument("--cc", nargs="+", default=("cubic", "bbr"), help="or system")
    parser.add_argument("--way", choices=["up", "down"], default="up")
    parser.add_argument("--channels", type=int, default=0, help="0: what the product settles on")


def cases(args: argparse.Namespace) -> Mapping[str, Case]:
    seconds, repeats = (4, 1) if args.quick else (8, 3)
    found = [
        Case(link, cc, args.way, args.channels, args.seconds or seconds, repeats)
        for rate in args.rate_mbit
        for link in [WanLink(rate, RTT_MS, loss / 100) for loss in args.loss]
        for cc in args.cc
    ]
    return {str(case): case for case in found}


# The two ends, each in a process of its own: `FOLDER CONGESTION HOST` is the coordinator's,
# `FOLDER CONGESTION ADDRESS CHANNELS` the site's. Payloads are as in `fedwan doctor link`. A line
# of JSON on standard input orders a transfer, one on standard output says how long it took.


def serve(folder: Path, congestion: str, host: str) -> None:
    """The coordinator's end, until standard input closes."""
    identity = Identity.load(folder / "coordinator", "coordinator")
    hub: Any = None  # the data plane takes and gives noise by itself
    plane = DataPlane(hub, identity, host, 0, congestion=congestion)
    plane.start()
    print(plane.port, flush=True)
    sys.stdin.read()
    plane.stop(0.1)


def transfer(folder: Path, congestion: str, address: str, channels: int) -> None:
    """A site's end: transfers as they are ordered, until standard input closes."""
    identity = Identity.load(folder / "s1")
    link = GrpcLink(address, identity, channels=channels, congestion=congestion, packs=False)
    for line in sys.stdin:
        way, asked = json.loads(line)
        num_bytes = min(asked, MAX_NOISE_BYTES)
        began = time.monotonic()
        if way == "up":
            link.upload(wire.UploadHeader(kind=wire.UploadHeader.MEASUREMENT), Noise(num_bytes))
        else:
            kind = wire.DownloadRequest.MEASUREMENT
            link.download(wire.DownloadRequest(kind=kind, version=num_bytes))
        mbit = num_bytes * 8e-6 / (time.monotonic() - began)
        print(json.dumps([mbit, link.num_channels]), flush=True)
    link.close()


if __name__ == "__main__":
    folder, congestion, address, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        transfer(Path(folder), congestion, address, int(rest[0]))
    else:
        serve(Path(folder), congestion, address)
