"""Many sites in one process, for `scale.py`: real connections and payloads, no training.

    python -m benchmarks.harness.light_sites FOLDER ROLE

Each site has a thread, a certificate and a link of its own. All send the same contribution, coded
once and only read from then on, and throw away the updates that come, undecoded.
"""

from __future__ import annotations

import os
import sys
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.harness.fleet import save_json
from benchmarks.harness.party import await_ticket, greeting, used
from fedwan.app import load_strategy
from fedwan.config import from_json, site_names
from fedwan.link import wire_pb2 as wire
from fedwan.link.client import GrpcLink
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.site.stub import CoordinatorStub

POLL_S = 2.0
WAIT_S = 0.1


class Host:
    def __init__(self, folder: Path) -> None:
        self._folder, self._ticket = folder, await_ticket(folder)
        self.config = from_json(self._ticket["config"])
        self._hello, replica = greeting(self._ticket)
        self._layout, self._weights = replica.layout, replica.base
        draw = torch.Generator().manual_seed(1)
        delta = {n: 1e-3 * torch.randn(w.shape, generator=draw) for n, w in self._weights.items()}
        up = load_strategy(self.config.strategy).build(self.config).up
        self._payload, _ = up.encode(delta, {}, self._layout)
        self._lock = threading.Lock()
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
        """One site, from joining to farewell; ends the process if it fails."""
        try:
            self._take_part(name)
        except BaseException:
            # The others would wait for this one.
            traceback.print_exc()
            os._exit(1)

    def _take_part(self, name: str) -> None:
        identity = Identity.load(self._folder / "pki" / name)
        # Packed or not by how busy the cores are, bytes would not compare.
        link = GrpcLink(self._ticket["address"], identity, packs=False)
        stub = CoordinatorStub(link, self._ticket["run_id"], self._layout, POLL_S)
        hello = wire.Hello(site=name, session=uuid.uuid4().hex)
        hello.MergeFrom(self._hello)
        while (welcome := link.join(hello)).is_waiting:
            time.sleep(WAIT_S)
        if welcome.send_initial:
            stub.send_initial(self._weights)
        for version in range(self._num_rounds):
            work = wire.Work(step=version + 1, steps=1, samples=1)
            receipt = stub.send_contribution(0, version, self._payload, work)
            if receipt.status != wire.Receipt.ACCEPTED:
                raise RuntimeError(f"{name}'s contribution was not accepted: {receipt}")
            if stub.fetch_update(0, version + 1, lambda: None).payload is None:
                raise RuntimeError(f"{name} was too late for version {version + 1}")
            self._count_update(version, link)
        # Answer the question about quality until the coordinator says stop.
        while (signal := link.signals.get()).kind != wire.CoordinatorSignal.STOP:
            if signal.kind == wire.CoordinatorSignal.EVALUATE:
                stub.report(self._num_rounds, '{"fd": 0.0, "fd_floor": 0.0}', b"")
        link.leave(wire.Farewell())
        link.close()


if __name__ == "__main__":
    folder, role = Path(sys.argv[1]), sys.argv[2]
    os.chdir(folder / "app")
    tune_allocator()  # as both services do
    host = Host(folder)
    names = site_names(host.config)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(host.take_part, names))
    result: dict[str, Any] = {key: getattr(host, key) for key in ("marks", "num_bytes", "channels")}
    save_json(folder / f"{role}.json", result | used())
