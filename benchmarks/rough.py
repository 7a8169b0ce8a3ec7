"""A contribution of 4 GB on a rough link: three resets of every connection, and 60 s of silence.

One site uploads to one coordinator, both real processes in network namespaces (`wan.py`), mutual
TLS, the product's defaults; the payload is made as it is read and arrives in a file, so that
neither end holds it. Resets come at a tenth, a half and nine tenths of the way, silence at three
tenths. The wire's own time is that of the payload's bytes at the link's rate, headers of TCP and IP
included, and of the silence. `--quick`: 0.4 GB and 6 s.

Row: gb rate_mbit rtt_ms resets silence_s seconds wire_s ratio site_rss_mb coordinator_rss_mb
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import Process, module, peak_rss_mb
from benchmarks.harness.table import Row
from benchmarks.transport import TCP_SHARE
from benchmarks.wan import Star, WanLink
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import UploadReception
from fedwan.link.client import GrpcLink
from fedwan.link.server import DataPlane, Noise
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator

RTT_MS = 100.0
RESETS = (0.1, 0.5, 0.9)
SILENCE = 0.3


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--rate-mbit", type=float, default=100.0)


def measure(args: argparse.Namespace) -> Iterator[Row]:
    gb, silence_s = (0.4, 6.0) if args.quick else (4.0, 60.0)
    wire_s = gb * 8e3 / (args.rate_mbit * TCP_SHARE) + silence_s
    with Star(1, WanLink(args.rate_mbit, RTT_MS)) as star, tempfile.TemporaryDirectory() as folder:
        host, pipes = star.coordinator.address, {"stdin": -1, "stdout": -1, "text": True}
        pki.federation(Path(folder), [host], ["s1"])
        words = module("rough", folder, host)
        server: Any = Process("server", words, star.coordinator).start(**pipes)
        port = server.stdout.readline().strip()
        site: Any = Process("site", [*words, port, str(int(gb * 1e9))], star.sites[0]).start(
            **pipes
        )
        faults = sorted([*((share, "reset") for share in RESETS), (SILENCE, "silence")])
        try:
            while line := server.stdout.readline():
                share = float(line)
                if faults and share >= faults[0][0]:
                    if faults.pop(0)[1] == "silence":
                        star.silence(silence_s)
                    else:
                        cut = ["ss", "-K", "-t", f"( sport = :{port} )"]
                        star.coordinator.run(cut, check=True, stdout=-3)
                if share >= 1:
                    break
            if not (line := site.stdout.readline()):
                raise FedwanError("the site failed; its error stands above")
            seconds, site_mb = json.loads(line)
            print(file=server.stdin, flush=True)
            coordinator_mb = float(server.stdout.readlines()[-1])
        finally:
            for child in (site, server):
                child.communicate(timeout=30)
    yield {
        "gb": gb,
        "rate_mbit": args.rate_mbit,
        "rtt_ms": RTT_MS,
        "resets": len(RESETS),
        "silence_s": silence_s,
        "seconds": round(seconds, 1),
        "wire_s": round(wire_s, 1),
        "ratio": round(seconds / wire_s, 3),
        "site_rss_mb": round(site_mb),
        "coordinator_rss_mb": round(coordinator_mb),
    }


class _Hub:
    """Takes the one upload, into a file."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.reception: UploadReception | None = None

    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception:
        if self.reception is None:
            self.reception = UploadReception(header, self._folder)
        return self.reception

    def close_stripe(self, site: str, header: wire.UploadHeader) -> wire.Receipt:
        assert self.reception is not None
        missing = self.reception.missing()
        status = wire.Receipt.INCOMPLETE if missing else wire.Receipt.ACCEPTED
        return wire.Receipt(status=status, missing=missing)


def serve(folder: Path, host: str) -> None:
    """The coordinator's end: a line for every hundredth that has come, then its peak memory."""
    hub: Any = _Hub(folder)
    identity = Identity.load(folder / "coordinator", "coordinator")
    plane = DataPlane(hub, identity, host, 0)
    plane.start()
    print(plane.port, flush=True)
    threading.Thread(target=_tell, args=(hub,), daemon=True).start()
    sys.stdin.readline()
    plane.stop(0.1)
    print(peak_rss_mb(), flush=True)


def _tell(hub: _Hub) -> None:
    said = -1
    for _ in itertools.count():
        time.sleep(0.1)
        if (reception := hub.reception) is not None:
            header, missing = reception.header, len(reception.missing())
            share = 1 - missing * header.chunk_bytes / header.num_bytes if missing else 1.0
            if int(100 * share) > said:
                said = int(100 * share)
                print(share, flush=True)


def upload(folder: Path, address: str, num_bytes: int) -> None:
    """The site's end: seconds of the upload, and peak memory."""
    link = GrpcLink(address, Identity.load(folder / "s1"))
    header = wire.UploadHeader(kind=wire.UploadHeader.CONTRIBUTION, num_bytes=num_bytes, checksum=1)
    began = time.monotonic()
    link.upload(header, Noise(num_bytes))
    print(json.dumps([time.monotonic() - began, peak_rss_mb()]), flush=True)
    link.close()


if __name__ == "__main__":
    place, host, *rest = sys.argv[1:]
    tune_allocator()  # as both services do
    if rest:
        upload(Path(place), f"{host}:{rest[0]}", int(rest[1]))
    else:
        serve(Path(place), host)
