"""Goodput of the data plane beside one plain TCP flow, on the same emulated link, in turns.

A site uploads payloads of about 8 s, 256 MiB at most, to a coordinator, both real processes in
network namespaces (`wan.py`). Both sides' figures are bytes of payload over wall time, slow start
included; the flow brings as many, over a new connection, the data plane's stand as they do between
two rounds. Eight transfers of a third of that time come before those that count. Each figure is the
median of three.
`--quick`: 4 s instead of 8, once.
"""

from __future__ import annotations

import argparse
import itertools
import json
import socket
import statistics
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.harness.fleet import Process, module, peak_rss_mb
from benchmarks.harness.table import Row, columns_of
from benchmarks.wan import Star, WanLink
from fedwan.config import Config, LinkConfig
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Proof
from fedwan.link.buffer import UploadReception
from fedwan.link.client import GrpcLink
from fedwan.link.server import MAX_NOISE_BYTES, DataPlane, Noise
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator

TCP_SHARE = 1448 / 1500
"""What of a link's rate is left for payload under the headers of TCP and IP."""
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
        rate = case.link.rate_mbit / 4
        for _ in range(WARM_UPS):
            rate, _ = transfer(ends, "up", seconds, rate / 3)
        for _ in range(1 if args.quick else 3):
            theirs.append(transfer(ends, "tcp", seconds, rate)[0])
            rate, channels = transfer(ends, "up", seconds, rate)
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
        "all_goodput_mbit": [round(value, 1) for value in ours],
        "all_tcp_mbit": [round(value, 1) for value in theirs],
    }


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--seconds", type=float, default=0, help="of a transfer that counts")
    parser.add_argument("--rate-mbit", type=float, nargs="+", default=(200.0, 1000.0))
    parser.add_argument("--loss", type=float, nargs="+", default=(0.0, 0.01, 0.1), help="percent")
    parser.add_argument("--cc", nargs="+", default=("cubic", "bbr"), help="or system")


def cases(args: argparse.Namespace) -> list[Case]:
    losses = [loss / 100 for loss in args.loss]
    links = [WanLink(rate, RTT_MS, loss) for rate in args.rate_mbit for loss in losses]
    return list(itertools.starmap(Case, itertools.product(links, args.cc)))


# The two ends, each a process of its own: `FOLDER CONGESTION HOST` is the coordinator's, `FOLDER
# CONGESTION ADDRESS PLAIN PACKS` a site's. Payloads are noise, made as it is read. A line of JSON
# on the site's standard input orders a transfer, one on its standard output says how long it took.
# What the coordinator's end takes goes to a file or nowhere, so that neither end holds it.


FAILED = "an end of the benchmark failed; its error stands above"


@dataclass
class Ends:
    coordinator: Any
    """Its process, whose last word is its peak memory, in MB."""
    site: Any
    port: str

    def order(self, way: str, num_bytes: int) -> None:
        """Have noise sent `up`, as a `contribution`, or over plain `tcp`."""
        print(json.dumps([way, num_bytes]), file=self.site.stdin, flush=True)

    def result(self) -> tuple[float, int, float]:
        """Seconds of the transfer, channels that it had, and the site's peak memory, in MB."""
        if not (line := self.site.stdout.readline()):
            raise FedwanError(FAILED)
        seconds, channels, rss_mb = json.loads(line)
        return seconds, channels, rss_mb

    def require_alive(self) -> None:
        if self.site.poll() is not None or self.coordinator.poll() is not None:
            raise FedwanError(FAILED)


@contextmanager
def opened(star: Star, congestion: str = "auto", packs: bool = True) -> Iterator[Ends]:
    host, pipes = star.coordinator.address, {"stdin": -1, "stdout": -1, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        pki.federation(Path(folder), [host], ["s1"])
        words = module("transport", folder, congestion)
        server: Any = Process("server", [*words, host], star.coordinator).start(**pipes)
        port, plain = server.stdout.readline().split()
        words += [f"{host}:{port}", plain, str(int(packs))]
        site: Any = Process("site", words, star.sites[0]).start(**pipes)
        try:
            yield Ends(server, site, port)
        finally:
            for child in (site, server):
                child.communicate(timeout=30)


class _Hub:
    """Takes one contribution, into a file; noise the data plane takes by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reception: UploadReception | None = None

    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception:
        self.reception = self.reception or UploadReception(header, self._folder)
        return self.reception

    def close_stripe(
        self, site: str, header: wire.UploadHeader, proof: Proof | None = None
    ) -> wire.Receipt:
        missing = self.reception.missing()
        status = wire.Receipt.INCOMPLETE if missing else wire.Receipt.ACCEPTED
        return wire.Receipt(status=status, missing=missing)


def serve(folder: Path, congestion: str, host: str) -> None:
    """The coordinator's end, until standard input closes."""
    hub: Any = _Hub(folder)
    identity = Identity.load(folder / "coordinator", "coordinator")
    link = LinkConfig(f"{host}:0", congestion=congestion)
    plane = DataPlane(hub, identity, Config(sites=1, link=link))
    plane.start()
    listener = socket.create_server((host, 0))
    threading.Thread(target=_serve_plain, args=(listener,), daemon=True).start()
    print(plane.port, listener.getsockname()[1], flush=True)
    sys.stdin.read()
    plane.stop(0.1)
    print(peak_rss_mb(), flush=True)


def serve_orders(link: GrpcLink, plain: tuple[str, int], congestion: str) -> None:
    """A site's end: transfers as they are ordered, until standard input closes."""
    for line in sys.stdin:
        way, num_bytes = json.loads(line)
        began = time.monotonic()
        if way == "tcp":
            _send_plain(plain, congestion, num_bytes)
        else:
            of = wire.UploadHeader
            header = of(kind=of.MEASUREMENT if way == "up" else of.CONTRIBUTION, checksum=1)
            link.upload(header, Noise(num_bytes))
        answer = [time.monotonic() - began, link.num_channels, peak_rss_mb()]
        print(json.dumps(answer), flush=True)
    link.close()


# One plain flow ---------------------------------------------------------------------------------


def _serve_plain(listener: socket.socket) -> None:
    """Take what a site sends over each new connection."""
    block = bytearray(1 << 20)
    while True:
        flow, _ = listener.accept()
        with flow:
            while flow.recv_into(block):
                pass


def _send_plain(address: tuple[str, int], congestion: str, num_bytes: int) -> None:
    """Send zeros until the other end has had all of them, which closes its way then."""
    with socket.create_connection(address) as flow:
        if congestion not in ("auto", "system"):
            flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
        block = bytes(1 << 20)
        for at in range(0, num_bytes, len(block)):
            flow.sendall(block[: num_bytes - at])
        flow.shutdown(socket.SHUT_WR)
        flow.recv(1)


if __name__ == "__main__":
    folder, congestion, address, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        identity = Identity.load(Path(folder) / "s1")
        settings = LinkConfig(congestion=congestion)
        link = GrpcLink(address, identity, settings, packs=rest[1] == "1")
        serve_orders(link, (address.partition(":")[0], int(rest[0])), congestion)
    else:
        serve(Path(folder), congestion, address)
