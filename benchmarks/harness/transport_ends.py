"""The two ends of `transport.py`: the real data plane, each end in a process of its own.

    python -m benchmarks.harness.transport_ends FOLDER CONGESTION HOST
    python -m benchmarks.harness.transport_ends FOLDER CONGESTION ADDRESS CHANNELS

Payloads are those that `fedwan doctor link` sends: noise, by the calls, chunks, checksums and
mutual TLS of a run. A line of JSON on standard input orders a transfer, one on standard output says
how long it took.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.rpc import threads_per_site
from fedwan.link.server import MAX_NOISE_BYTES, DataPlane, Noise
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator


def serve(folder: Path, congestion: str, host: str) -> None:
    """The coordinator's end, until standard input closes."""
    identity = Identity.load(folder / "coordinator", "coordinator")
    hub: Any = None  # the data plane takes and gives noise by itself
    plane = DataPlane(hub, identity, host, 0, 8 + threads_per_site(0), 2.0, congestion)
    plane.start()
    print(plane.port, flush=True)
    sys.stdin.read()
    plane.stop(0.1)


def transfer(folder: Path, congestion: str, address: str, channels: int) -> None:
    """A site's end: transfers as they are ordered, until standard input closes."""
    identity = Identity.load(folder / "s1")
    link = GrpcLink(address, identity, channels=channels, congestion=congestion, compression="none")
    for line in sys.stdin:
        order = json.loads(line)
        num_bytes = min(order["num_bytes"], MAX_NOISE_BYTES)
        began = time.monotonic()
        if order["way"] == "up":
            link.upload(wire.UploadHeader(kind=wire.UploadHeader.MEASUREMENT), Noise(num_bytes))
        else:
            kind = wire.DownloadRequest.MEASUREMENT
            link.download(wire.DownloadRequest(kind=kind, version=num_bytes))
        mbit = num_bytes * 8e-6 / (time.monotonic() - began)
        print(json.dumps({"mbit": mbit, "channels": link.num_channels}), flush=True)
    link.close()


if __name__ == "__main__":
    folder, congestion, address, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        transfer(Path(folder), congestion, address, int(rest[0]))
    else:
        serve(Path(folder), congestion, address)
