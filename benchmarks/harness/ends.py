"""Two ends of a data plane in an emulated wide area, each a process of its own, and plain TCP.

    python -m benchmarks.harness.ends FOLDER CONGESTION HOST
    python -m benchmarks.harness.ends FOLDER CONGESTION ADDRESS PACKS

The first is the coordinator's end, the second a site's. Payloads are noise, made as it is read. A
line of JSON on the site's standard input orders a transfer, one on its standard output says how
long it took. What the coordinator's end takes goes to a file or is thrown away, so that neither end
holds it.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import Process, module, peak_rss_mb
from benchmarks.wan import Place, Star
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import UploadReception
from fedwan.link.client import GrpcLink
from fedwan.link.server import DataPlane, Noise
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator

TCP_SHARE = 1448 / 1500
"""What of a link's rate is left for payload under the headers of TCP and IP."""


@dataclass
class Ends:
    coordinator: Any
    """Its process. Its lines are shares of a contribution that have come, and in the end its peak
    memory, in MB."""
    site: Any
    port: str

    def order(self, way: str, num_bytes: int) -> None:
        """Have noise sent `up`, `down`, or as a `contribution`."""
        print(json.dumps([way, num_bytes]), file=self.site.stdin, flush=True)

    def result(self) -> tuple[float, int, float]:
        """Seconds of the transfer, channels that it had, and the site's peak memory, in MB."""
        if not (line := self.site.stdout.readline()):
            raise FedwanError("an end of the benchmark failed; its error stands above")
        seconds, channels, rss_mb = json.loads(line)
        return seconds, channels, rss_mb


@contextmanager
def opened(star: Star, congestion: str = "auto", packs: bool = True) -> Iterator[Ends]:
    host, pipes = star.coordinator.address, {"stdin": -1, "stdout": -1, "text": True}
    with tempfile.TemporaryDirectory() as folder:
        pki.federation(Path(folder), [host], ["s1"])
        words = module("harness.ends", folder, congestion)
        server: Any = Process("server", [*words, host], star.coordinator).start(**pipes)
        port = server.stdout.readline().strip()
        words += [f"{host}:{port}", str(int(packs))]
        site: Any = Process("site", words, star.sites[0]).start(**pipes)
        try:
            yield Ends(server, site, port)
        finally:
            for child in (site, server):
                child.communicate(timeout=30)


class _Hub:
    """Takes one contribution, into a file; noise the data plane takes and gives by itself."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reception: UploadReception | None = None

    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception:
        if self.reception is None:
            self.reception = UploadReception(header, self._folder)
            threading.Thread(target=self._tell, args=(self.reception,), daemon=True).start()
        return self.reception

    def close_stripe(self, site: str, header: wire.UploadHeader) -> wire.Receipt:
        missing = self.reception.missing()
        status = wire.Receipt.INCOMPLETE if missing else wire.Receipt.ACCEPTED
        return wire.Receipt(status=status, missing=missing)

    def _tell(self, reception: UploadReception) -> None:
        """A line for every hundredth that has come."""
        header, said = reception.header, -1
        while said < 100:
            missing = len(reception.missing())
            share = 1 - missing * header.chunk_bytes / header.num_bytes if missing else 1.0
            if int(100 * share) > said:
                said = int(100 * share)
                print(share, flush=True)
            time.sleep(0.1)


def serve(folder: Path, congestion: str, host: str) -> None:
    """The coordinator's end, until standard input closes."""
    hub: Any = _Hub(folder)
    identity = Identity.load(folder / "coordinator", "coordinator")
    plane = DataPlane(hub, identity, host, 0, congestion=congestion)
    plane.start()
    print(plane.port, flush=True)
    sys.stdin.read()
    plane.stop(0.1)
    print(peak_rss_mb(), flush=True)


def transfer(link: GrpcLink) -> None:
    """A site's end: transfers as they are ordered, until standard input closes."""
    for line in sys.stdin:
        way, num_bytes = json.loads(line)
        began = time.monotonic()
        if way == "down":
            kind = wire.DownloadRequest.MEASUREMENT
            link.download(wire.DownloadRequest(kind=kind, version=num_bytes))
        else:
            of = wire.UploadHeader
            header = of(kind=of.MEASUREMENT if way == "up" else of.CONTRIBUTION, checksum=1)
            link.upload(header, Noise(num_bytes))
        answer = [time.monotonic() - began, link.num_channels, peak_rss_mb()]
        print(json.dumps(answer), flush=True)
    link.close()


# One plain flow ---------------------------------------------------------------------------------

_SERVER = """
import socket, sys, time
address, seconds, skipped = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
with socket.create_server((address, 5201)) as listener:
    print("listening", flush=True)
    flow, _ = listener.accept()
block, num_bytes, began, last = bytearray(1 << 20), 0, time.monotonic() + skipped, 0.0
while size := flow.recv_into(block):
    last = time.monotonic()
    if began <= last <= began + seconds:
        num_bytes += size
print(num_bytes * 8 / 1e6 / max(1e-9, min(last - began, seconds)))
"""
_CLIENT = """
import socket, sys, time
address, seconds, congestion = sys.argv[1], float(sys.argv[2]), sys.argv[3]
block, flow = bytes(1 << 20), socket.socket()
if congestion:
    flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
flow.connect((address, 5201))
until = time.monotonic() + seconds
while time.monotonic() < until:
    flow.sendall(block)
flow.close()
"""


def tcp_mbit(
    receiver: Place, sender: Place, seconds: float, skipped_s: float = 1, congestion: str = ""
) -> float:
    """Mbit/s of payload that one plain TCP flow brings over, after its first `skipped_s`."""
    words = [sys.executable, "-c", _SERVER, receiver.address, f"{seconds}", f"{skipped_s}"]
    server: Any = receiver.popen(words, stdout=subprocess.PIPE, text=True)
    server.stdout.readline()  # it listens
    words = [sys.executable, "-c", _CLIENT, receiver.address, f"{seconds + skipped_s}", congestion]
    if sender.popen(words).wait(seconds + skipped_s + 30):
        raise FedwanError("a plain TCP flow failed; its error stands above")
    return float(server.communicate(timeout=30)[0])


if __name__ == "__main__":
    folder, congestion, address, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        identity = Identity.load(Path(folder) / "s1")
        transfer(GrpcLink(address, identity, congestion=congestion, packs=rest == ["1"]))
    else:
        serve(Path(folder), congestion, address)
