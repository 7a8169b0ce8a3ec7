"""The two ends of `transport.py`: the real data plane, each end in a process of its own.

    python -m benchmarks.harness.transport_ends FOLDER CONGESTION HOST
    python -m benchmarks.harness.transport_ends FOLDER CONGESTION ADDRESS CHANNELS

The coordinator's hub checks that every chunk of an upload arrives and keeps none; everything else,
from the payload's `read` to the server's receipt, is the product: chunks, checksums, gRPC, mutual
TLS. A line of JSON on standard input orders a transfer, one on standard output says how long it
took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from fedwan.codecs.payload import Bytes
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Signals
from fedwan.link.channels import threads_per_site
from fedwan.link.client import GrpcLink
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator

SITE = "s1"
BLOCK_BYTES = 16 << 20
CHUNK_BYTES = 1 << 20


class Repeated:
    """A payload of any length, made of one block of noise again and again."""

    def __init__(self, num_bytes: int) -> None:
        self.num_bytes = num_bytes
        self._block = memoryview(np.random.default_rng(0).bytes(BLOCK_BYTES + CHUNK_BYTES))

    def read(self, offset: int, size: int) -> Bytes:
        """A view of the block."""
        at = offset % BLOCK_BYTES
        return self._block[at : at + size]


class Intake:
    """An upload on its way in: which chunks have come, in a block that is written again."""

    def __init__(self, header: wire.UploadHeader) -> None:
        self._size = header.chunk_bytes
        self.missing = set(range(-(-header.num_bytes // header.chunk_bytes)))
        self._block = memoryview(bytearray(BLOCK_BYTES + CHUNK_BYTES))

    def write(self, offset: int, data: Bytes) -> None:
        """Copy a chunk, as a buffer would."""
        at = offset % BLOCK_BYTES
        self._block[at : at + len(data)] = data
        self.missing.discard(offset // self._size)


class Sink:
    """A hub that takes every upload, and has as many bytes to download as a version says."""

    def __init__(self) -> None:
        self._intakes: dict[int, Intake] = {}

    def join(self, site: str, hello: wire.Hello) -> wire.Welcome:
        """Everybody is welcome."""
        return wire.Welcome()

    def attach(self, site: str, session: str) -> Signals:
        """Nothing is ever said."""
        return Signals()

    def heard(self, *_: Any) -> None:
        """Noted nowhere."""

    detach = report = leave = heard

    def open_upload(self, site: str, header: wire.UploadHeader) -> Intake:
        """One for every version."""
        return self._intakes.setdefault(header.version, Intake(header))

    def close_stripe(self, site: str, header: wire.UploadHeader) -> wire.Receipt:
        """Accepted once nothing is missing."""
        missing = sorted(self._intakes[header.version].missing.copy())
        status = wire.Receipt.INCOMPLETE if missing else wire.Receipt.ACCEPTED
        return wire.Receipt(status=status, missing=missing)

    def download(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """Noise."""
        header = wire.DownloadHeader(
            status=wire.DownloadHeader.READY, num_bytes=request.version, chunk_bytes=CHUNK_BYTES
        )
        return Delivery(header, Repeated(request.version))


def serve(folder: Path, congestion: str, host: str) -> None:
    """The coordinator's end, until standard input closes."""
    identity = Identity.load(folder / "coordinator", "coordinator")
    plane = DataPlane(Sink(), identity, host, 0, 8 + threads_per_site(0), 2.0, congestion)
    plane.start()
    print(plane.port, flush=True)
    sys.stdin.read()
    plane.stop(0.1)


def transfer(folder: Path, congestion: str, address: str, channels: int) -> None:
    """A site's end: transfers as they are ordered, until standard input closes."""
    identity = Identity.load(folder / SITE)
    link = GrpcLink(address, identity, channels=channels, congestion=congestion)
    link.join(wire.Hello(site=SITE, session="benchmark"))
    for number, line in enumerate(sys.stdin):
        order = json.loads(line)
        began = time.monotonic()
        if order["way"] == "up":
            receipt = link.upload(wire.UploadHeader(version=number), Repeated(order["num_bytes"]))
            assert receipt.status == wire.Receipt.ACCEPTED
        else:
            request = wire.DownloadRequest(version=order["num_bytes"])
            assert link.download(request).payload is not None
        seconds = time.monotonic() - began
        print(json.dumps({"seconds": seconds, "channels": link.num_channels}), flush=True)
    link.close()


if __name__ == "__main__":
    folder, congestion, address, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        transfer(Path(folder), congestion, address, int(rest[0]))
    else:
        serve(Path(folder), congestion, address)
