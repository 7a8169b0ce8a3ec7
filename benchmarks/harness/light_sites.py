"""Many sites in one process, for `scale.py`: real connections and payloads, no training.

Each site has a thread, a certificate and a link of its own. All send the same contribution, coded
once and only read from then on, and throw away the updates that come, undecoded.
"""

from __future__ import annotations

import json
import os
import resource
import threading
import time
import traceback
import uuid
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from fedwan.app import load_strategy, load_workload, sources
from fedwan.config import from_json, site_names
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.link.client import GrpcLink
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.site.stub import CoordinatorStub
from fedwan.state import hash_state, layout_of, layout_to_json, state_of
from fedwan.workloads.settings import networks_of

POLL_S = 2.0
WAIT_S = 0.1


def run_sites(folder: Path, ticket: dict[str, Any]) -> dict[str, Any]:
    """All sites' part in a run; ends the process if one of them fails."""
    tune_allocator()  # as both services do
    host = _Host(folder, ticket)
    names = site_names(host.config)
    with ThreadPoolExecutor(len(names)) as pool:
        list(pool.map(host.take_part, names))
    return {"marks": host.marks, "num_bytes": host.num_bytes, "channels": host.channels}


class _Host:
    def __init__(self, folder: Path, ticket: dict[str, Any]) -> None:
        self._folder, self._ticket = folder, ticket
        self.config = from_json(ticket["config"])
        recipe = load_workload(self.config.workload)
        networks = recipe.build(self.config, "cpu").networks
        self._claim = {
            "kinds_json": json.dumps(dict(networks_of(recipe, self.config)), sort_keys=True),
            "sources_json": json.dumps(sources(self.config), sort_keys=True),
        }
        self._layout, self._weights = layout_of(networks), state_of(networks)
        self._initial_sha256 = hash_state(self._weights)
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
            if self._num_updates % self.config.sites == 0:
                used = resource.getrusage(resource.RUSAGE_SELF)
                mine = used.ru_utime + used.ru_stime
                self.marks.append((time.monotonic(), _cpu_s(self._ticket["pid"]), mine))
            self._num_updates += 1

    def take_part(self, name: str) -> None:
        """One site, from joining to farewell."""
        try:
            identity = Identity.load(self._folder / "pki" / name)
            # Packed or not by how busy the cores are, bytes would not compare.
            link = GrpcLink(self._ticket["address"], identity, packs=False)
            self._run(name, link)
        except BaseException:
            # The others would wait for this one.
            traceback.print_exc()
            os._exit(1)

    def _run(self, name: str, link: GrpcLink) -> None:
        stub = CoordinatorStub(link, self._ticket["run_id"], self._layout, POLL_S)
        hello = wire.Hello(
            run_id=self._ticket["run_id"],
            protocol=PROTOCOL,
            site=name,
            session=uuid.uuid4().hex,
            layout_json=layout_to_json(self._layout),
            initial_sha256=self._initial_sha256,
            **self._claim,
        )
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


def _cpu_s(pid: int) -> float:
    """Processor seconds of another process, to a hundredth (proc(5))."""
    words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(words[11]) + int(words[12])) / os.sysconf("SC_CLK_TCK")
