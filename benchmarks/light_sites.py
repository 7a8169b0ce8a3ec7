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
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from benchmarks.party import peak_rss_mb

if TYPE_CHECKING:
    from fedwan.codecs import Payload
    from fedwan.link.client import GrpcLink
    from fedwan.state import Layout, State

__all__ = ["RUN_ID", "Marks", "run_sites", "site_names"]

RUN_ID = "scale"
NUM_TENSORS = 16
POLL_S = 2.0
SEED = 1


class Sizes(Protocol):
    """What of a case matters here."""

    sites: int
    model_mb: float
    rounds: int
    channels: int


class Marks:
    """Time and processor time of this process after each round."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._cpu_s: list[float] = []

    def __len__(self) -> int:
        return len(self._times)

    def add(self) -> None:
        """A round is over."""
        used = resource.getrusage(resource.RUSAGE_SELF)
        self._times.append(time.monotonic())
        self._cpu_s.append(used.ru_utime + used.ru_stime)

    def result(self) -> dict[str, Any]:
        """All marks, and the peak of memory in MB."""
        return {"times": self._times, "cpu_s": self._cpu_s, "rss_mb": peak_rss_mb()}

    @staticmethod
    def load(path: Path) -> dict[str, Any]:
        """A result as it was written."""
        result: dict[str, Any] = json.loads(path.read_text())
        return result


def site_names(num: int) -> list[str]:
    """Names in merge order."""
    return [f"s{index:02}" for index in range(1, num + 1)]


def run_sites(folder: Path, case: Sizes) -> dict[str, Any]:
    """All sites' part in a run; ends the process if one of them fails."""
    import torch

    from fedwan.codecs import int4

    layout, weights = _model(case.model_mb)
    generator = torch.Generator().manual_seed(SEED)
    delta = {n: 1e-3 * torch.randn(w.shape, generator=generator) for n, w in weights.items()}
    payload, _ = int4().encode(delta, {}, layout)
    del delta
    host = _Host(folder, case, layout, weights, payload)
    del weights
    with ThreadPoolExecutor(case.sites) as pool:
        list(pool.map(host.take_part, site_names(case.sites)))
    return host.marks.result() | {"num_bytes": host.num_bytes, "channels": host.channels}


def _model(model_mb: float) -> tuple[Layout, State]:
    import torch

    from fedwan.state import Role, TensorSpec

    num_values = int(model_mb * 1e6 / 4 / NUM_TENSORS)
    names = [f"model/weights.{index:02}" for index in range(NUM_TENSORS)]
    spec = TensorSpec((num_values,), torch.float32, Role.PARAMETER)
    return {n: spec for n in names}, {n: torch.zeros(num_values) for n in names}


class _Host:
    """What the sites share."""

    def __init__(
        self, folder: Path, case: Sizes, layout: Layout, weights: State, payload: Payload
    ) -> None:
        from fedwan.state import hash_state

        self._folder = folder
        self._case = case
        self._layout = layout
        self._weights = weights
        self._initial_sha256 = hash_state(weights)
        self._payload = payload
        self._lock = threading.Lock()
        self._num_updates = 0
        self.marks = Marks()
        self.num_bytes = [0] * case.rounds
        """Both directions, all sites, since the beginning; after each round."""
        self.channels = 0
        """Most that a site used for its uploads."""

    def _count_update(self, version: int, link: GrpcLink) -> None:
        """A site has the update of a round; the last one to have it marks the round's end."""
        with self._lock:
            # Site by site: others may have begun the next round.
            self.num_bytes[version] += link.bytes_up + link.bytes_down
            self.channels = link.num_channels
            self._num_updates += 1
            if self._num_updates % self._case.sites == 0:
                self.marks.add()

    def take_part(self, name: str) -> None:
        """One site, from joining to farewell."""
        try:
            self._run(name, self._dial(name))
        except BaseException:
            # The others would wait for this one.
            traceback.print_exc()
            os._exit(1)

    def _dial(self, name: str) -> GrpcLink:
        from fedwan.link.client import GrpcLink
        from fedwan.link.tls import Identity

        port = self._folder / "port.json"
        while not port.exists():
            time.sleep(0.05)
        address = f"127.0.0.1:{json.loads(port.read_text())}"
        identity = Identity.load(self._folder / "pki" / name)
        # Packed or not by how busy the cores are, bytes would not compare.
        return GrpcLink(address, identity, channels=self._case.channels, compression="none")

    def _run(self, name: str, link: GrpcLink) -> None:
        from fedwan.site.courier import Courier

        from fedwan.link import wire_pb2 as wire

        courier = Courier(link, RUN_ID, self._layout, POLL_S)
        if link.join(self._hello(name)).send_initial:
            courier.send_initial(self._weights)
            self._weights.clear()
        for version in range(self._case.rounds):
            work = wire.Work(step=version + 1, samples=1)
            receipt = courier.send_contribution(0, version, self._payload, work)
            if receipt.status != wire.Receipt.ACCEPTED:
                raise RuntimeError(f"{name}'s contribution was not accepted: {receipt}")
            if courier.fetch_update(0, version + 1, lambda: None).payload is None:
                raise RuntimeError(f"{name} was too late for version {version + 1}")
            self._count_update(version, link)
        _stay(link, lambda: courier.report(self._case.rounds, '{"fd": 0.0}', b""))
        link.leave(wire.Farewell())
        link.close()

    def _hello(self, name: str) -> Any:
        from fedwan.link import wire_pb2 as wire
        from fedwan.link.base import PROTOCOL
        from fedwan.state import layout_to_json

        return wire.Hello(
            run_id=RUN_ID,
            protocol=PROTOCOL,
            site=name,
            session=uuid.uuid4().hex,
            layout_json=layout_to_json(self._layout),
            initial_sha256=self._initial_sha256,
        )


def _stay(link: GrpcLink, report: Callable[[], None]) -> None:
    """Answer the question about quality until the coordinator says stop."""
    from fedwan.link import wire_pb2 as wire

    while (signal := link.signals.get()).kind != wire.CoordinatorSignal.STOP:
        if signal.kind == wire.CoordinatorSignal.EVALUATE:
            report()
