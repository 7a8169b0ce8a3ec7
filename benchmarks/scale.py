"""A round by number of sites: time, and what it costs the coordinator, from 2 sites to 64.

The coordinator is the product's service in a process of its own: mutual TLS, spooled contributions,
merging, outer Nesterov steps, coded updates. Sites are light: one process hosts all, each with a
thread, a certificate and connections of its own. All send the same contribution, coded once, and
throw updates away, undecoded. Nothing is packed on the way. Everything shares this
machine's cores, so that at many sites the time of a round is the machine's: the sites' processor
time stands in the row, too.

A round lasts from one update, when the first site has it, to the next; medians over the rounds that
count. Processor seconds, bytes (both directions, all sites) and chunks' framing are a round's;
memory is the peak until the last round's end, and of the coordinator also the peak after that, when
all sites fetch the whole weights at once, and throw them away as they come.
`--quick`: only 4 and 16 sites.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import threading
import time
import traceback
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from itertools import pairwise
from pathlib import Path

import psutil
import torch

from benchmarks.harness.fleet import ALL_SITES, COORDINATOR, peak_rss_mb, run_fleet, save_json
from benchmarks.harness.party import await_ticket, greeting, used
from benchmarks.harness.table import Row
from fedwan.app import load_strategy
from fedwan.config import from_json, site_names
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from fedwan.link.client import GrpcLink
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.site.stub import CoordinatorStub

SIZES = (2, 4, 8, 16, 32, 64)
MODEL_MB = 200
"""In fp32."""
CODEC = "int4"
ROUNDS = 6
WARM_UP = 2
"""Of these, not measured."""


def cases(args: argparse.Namespace) -> Mapping[str, int]:
    return {f"{num} sites": num for num in ((4, 16) if args.quick else SIZES)}


def measure_case(args: argparse.Namespace, sites: int, seed: int) -> Row:
    words = ["workload=weights", f"model.num_bytes={MODEL_MB * 10**6}", "strategy=diloco", "h=1"]
    words += [f"sites={sites}", f"steps={ROUNDS}", "eval.every=0", "checkpoint.every=1000000"]
    words += [f"codec.up={CODEC}", f"codec.down={CODEC}"]
    run = run_fleet(words, others={ALL_SITES: ["scale"]})
    coordinator, found = run.parties[COORDINATOR], run.parties[ALL_SITES]
    times, coordinator_cpu_s, sites_cpu_s = zip(*found["marks"], strict=True)
    sites_rss_mb, coordinator_rss_mb = found["peaks_mb"]
    return {
        "sites": sites,
        "codec": CODEC,
        "model_mb": float(MODEL_MB),
        "channels": found["channels"],
        "round_ms": round(
            statistics.median(1e3 * (b - a) for a, b in pairwise(times[WARM_UP - 1 :])), 1
        ),
        "coordinator_cpu_s": round(_growth(coordinator_cpu_s), 3),
        "coordinator_rss_mb": round(coordinator_rss_mb),
        "fetched_rss_mb": round(coordinator["rss_mb"]),
        "sites_cpu_s": round(_growth(sites_cpu_s), 3),
        "sites_rss_mb": round(sites_rss_mb),
        "round_mb": round(_growth(found["num_bytes"]) / 1e6, 2),
    }


def _growth(values: Sequence[float]) -> float:
    """In a round of those that count; there is a value after each round."""
    return (values[-1] - values[WARM_UP - 1]) / (ROUNDS - WARM_UP)


# The light sites ----------------------------------------------------------------------------------


class Host:
    def __init__(self, folder: Path) -> None:
        self._folder, self._ticket = folder, await_ticket(folder)
        self.config = from_json(self._ticket["config"])
        self._hello, replica = greeting(self._ticket)
        self._replica, self._weights = replica, replica.base
        draw = torch.Generator().manual_seed(1)
        delta = {n: 1e-3 * torch.randn(w.shape, generator=draw) for n, w in self._weights.items()}
        up = load_strategy(self.config.strategy).build(self.config).up
        self._payload, _ = up.encode(delta, {}, replica.layout)
        self._lock = threading.Lock()
        self._all_here = threading.Barrier(self.config.num_sites)
        self.rss_mb = 0.0, 0.0
        """Peak memory until the last round's end, of the sites and of the coordinator."""
        self._num_updates = 0
        self._num_rounds = self.config.steps // self.config.h
        self.marks: list[tuple[float, float, float]] = []
        """After each round: the time, and processor seconds of the coordinator and of the sites."""
        self.num_bytes = [0] * self._num_rounds
        """Both directions, all sites, since the beginning; after each round."""
        self.channels = 0
        """Of each site."""

    def _count_update(self, version: int, link: GrpcLink) -> None:
        """A site has the update of a round; the first one to have it marks the round's end."""
        with self._lock:
            # Site by site: others may have begun the next round.
            self.num_bytes[version] += link.bytes_up + link.bytes_down
            self.channels = link.num_channels
            if self._num_updates % self.config.num_sites == 0:
                cpu_s = sum(psutil.Process(self._ticket["pid"]).cpu_times()[:2])
                self.marks.append((time.monotonic(), cpu_s, used()["cpu_s"]))
            self._num_updates += 1

    def take_part(self, name: str) -> None:
        identity = Identity.load(self._folder / "pki" / name)
        # Packed or not by how busy the cores are, bytes would not compare.
        link = GrpcLink(self._ticket["address"], identity, self.config.link, packs=False)
        stub = CoordinatorStub(link, self._ticket["run_id"], self._replica)
        hello = wire.Hello(site=name, session=uuid.uuid4().hex)
        hello.MergeFrom(self._hello)
        while (welcome := link.join(hello)).is_waiting:
            time.sleep(0.1)
        if welcome.send_initial:
            stub.send_initial(self._weights)
        for version in range(self._num_rounds):
            work = wire.Work(step=version + 1, steps=1, samples=1)
            header = wire.UploadHeader(version=version, work=work)
            receipt = stub.upload(self._payload, header)
            if receipt.status != wire.Receipt.ACCEPTED:
                raise RuntimeError(f"{name}'s contribution was not accepted: {receipt}")
            if stub.fetch_update(0, version + 1, lambda: None).payload is None:
                raise RuntimeError(f"{name} was too late for version {version + 1}")
            self._count_update(version, link)
        self._fetch_whole(link)
        # Answer the question about quality until the coordinator says stop.
        while (signal := link.signals.get()).kind != wire.CoordinatorSignal.STOP:
            if signal.kind == wire.CoordinatorSignal.EVALUATE:
                figures = '{"fd": 0.0, "fd_floor": 0.0}'
                stub.report(wire.QualityReport(version=self._num_rounds, figures_json=figures))
        link.leave(wire.Farewell())
        link.close()

    def _fetch_whole(self, link: GrpcLink) -> None:
        """The weights, once all sites are here."""
        if self._all_here.wait() == 0:
            self.rss_mb = peak_rss_mb(), peak_rss_mb(self._ticket["pid"])
            Buffer.write = lambda *_: None  # type: ignore[method-assign]
        self._all_here.wait()
        asked = wire.DownloadRequest(
            kind=wire.DownloadRequest.GLOBAL, run_id=self._ticket["run_id"]
        )
        assert link.download(asked).payload is not None, "the run is not over yet"


if __name__ == "__main__":
    folder, role = Path(sys.argv[1]), sys.argv[2]
    os.chdir(folder / "app")
    tune_allocator()  # as both services do
    host = Host(folder)
    names = site_names(host.config)
    with ThreadPoolExecutor(len(names)) as pool:
        for future in as_completed(pool.submit(host.take_part, name) for name in names):
            if error := future.exception():
                traceback.print_exception(error)
                os._exit(1)  # the others would wait for this one
    result = {"marks": host.marks, "num_bytes": host.num_bytes, "channels": host.channels}
    result["peaks_mb"] = host.rss_mb
    save_json(folder / f"{role}.json", result | used())
