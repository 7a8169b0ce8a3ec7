"""A real data plane on loopback with real certificates, and what tests put through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import grpc
import torch

from fedwan import outer
from fedwan.codecs import Payload, fp32
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.server_step import step_outer
from fedwan.coordinator.servicer import CoordinatorRounds, Servicer
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.link.client import GrpcLink
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.protocol.policy import barrier
from fedwan.protocol.registry import Registry
from fedwan.state import Layout, Role, State, TensorSpec, hash_state, layout_to_json
from fedwan.strategy import Strategy
from tests.proxies import FlakyProxy, flaky_proxy
from tests.support import read_all as read_all  # for tests of the link

RUN = "run-1"
SITES = ("s1", "s2", "s3")


def layout_of_size(num_values: int) -> Layout:
    return {"net/w": TensorSpec((num_values,), torch.float32, Role.PARAMETER)}


def payload_of(value: float, layout: Layout) -> Payload:
    (spec,) = layout.values()
    return fp32().encode({"net/w": torch.full(spec.shape, value)}, {}, layout)[0]


def random_payload(seed: int, layout: Layout) -> Payload:
    (spec,) = layout.values()
    values = torch.randn(spec.shape, generator=torch.Generator().manual_seed(seed))
    return fp32().encode({"net/w": values}, {}, layout)[0]


def averaging(num_sites: int, quorum: int = 0, patience_s: float = 60.0) -> Strategy:
    step = step_outer({"net": outer.sgd(lr=1.0)})
    policy = barrier(num_sites, quorum, patience_s)
    return Strategy("delta", 1, whole, step, fp32(), fp32(), policy)


class Bench:
    """A coordinator's servicer with the events that it told; the sites have agreed."""

    def __init__(
        self,
        folder: Path,
        *,
        num_values: int = 1000,
        sites: Sequence[str] = SITES,
        silence_s: float = 60.0,
        chunk_bytes: int = 1 << 16,
        run_id: str = RUN,
    ) -> None:
        self.layout = layout_of_size(num_values)
        self.strategy = averaging(len(sites))
        self.events: list[tuple[str, str | None, str]] = []
        self.registry = Registry(sites, silence_s)
        fragments = self.strategy.fragments(self.layout)
        self.intake = Intake(self.layout, fragments, self.strategy.up, folder / "spool")
        self.claim = Claim.of(self.hello(sites[0]))
        self.hub = Servicer(
            run_id,
            self.registry,
            Agreement(sites, len(sites), self.claim, run_id),
            lambda *event: self.events.append(event),
            chunk_bytes,
        )
        self.rounds = CoordinatorRounds(self.strategy, fragments, sites, 1000, 4)
        self.hub.start(self.rounds, self.intake)
        self.set_model()

    def set_model(self) -> GlobalModel:
        (spec,) = self.layout.values()
        model = GlobalModel({"net/w": torch.zeros(spec.shape)}, self.layout, self.strategy, 1e3)
        self.hub.set_model(model)
        return model

    def publish(self, version: int, payload: Payload) -> None:
        """Hand an update out, whatever was merged."""
        with self.hub.changed:
            self.rounds.hold(0, version, payload)
            self.intake.forget(0, version)
            self.hub.changed.notify_all()
        self.intake.free()

    def withdraw(self) -> None:
        """Drop the update that is out."""
        with self.hub.changed:
            self.rounds.withdraw(0)

    def forget(self) -> None:
        """Free the files that contributions are in."""
        for site in self.registry.sites:
            for version in range(3):
                if (found := self.contribution(site, version)) is not None:
                    found.payload.close()

    def is_live(self, site: str) -> bool:
        return site in self.registry.live(time.monotonic())

    def hello(self, site: str, session: str = "") -> wire.Hello:
        (spec,) = self.layout.values()
        state: State = {"net/w": torch.zeros(spec.shape)}
        return wire.Hello(
            run_id=RUN,
            protocol=PROTOCOL,
            site=site,
            session=session or f"{site}-first",
            layout_json=layout_to_json(self.layout),
            initial_sha256=hash_state(state),
            frozen_sha256=hash_state({}),
        )

    def contribution(self, site: str, version: int = 0) -> Contribution | None:
        with self.hub.changed:
            return self.rounds._whole[0].get((version, site))

    def value(self, site: str, version: int = 0) -> float:
        """The one number that a site's contribution consists of."""
        contribution = self.contribution(site, version)
        assert contribution is not None
        (tensor,) = fp32().decode(contribution.payload, self.layout).values()
        assert bool((tensor == tensor[0]).all())
        return float(tensor[0])


def header_of(payload: Payload, version: int = 0, samples: int = 4) -> wire.UploadHeader:
    return wire.UploadHeader(
        run_id=RUN,
        kind=wire.UploadHeader.CONTRIBUTION,
        version=version,
        num_bytes=payload.num_bytes,
        checksum=payload.checksum,
        work=wire.Work(step=1, steps=-(-samples // 4), samples=samples),
    )


def update_request(version: int = 1, wait_s: float = 0.0) -> wire.DownloadRequest:
    kind = wire.DownloadRequest.UPDATE
    return wire.DownloadRequest(run_id=RUN, kind=kind, version=version, wait_s=wait_s)


@contextmanager
def serving(
    hub: Any,
    identities: Path,
    *,
    port: int = 0,
    num_threads: int = 24,
    heartbeat_s: float = 0.2,
    congestion: str = "auto",
    num_sites: int = 1,
) -> Iterator[DataPlane]:
    identity = Identity.load(identities / "coordinator", "coordinator")
    plane = DataPlane(
        hub,
        identity,
        "127.0.0.1",
        port,
        num_threads,
        heartbeat_s,
        congestion,
        num_sites=num_sites,
    )
    plane.start()
    try:
        yield plane
    finally:
        plane.stop(0.1)


@contextmanager
def dialling(
    port: int,
    folder: Path,
    *,
    channels: int = 2,
    chunk_bytes: int = 1 << 16,
    patience_s: float = 30.0,
    heartbeat_s: float = 0.1,
    congestion: str = "auto",
    compression: str = "none",
    pace_mbit: float = 0.0,
) -> Iterator[GrpcLink]:
    link = GrpcLink(
        f"127.0.0.1:{port}",
        Identity.load(folder),
        channels=channels,
        chunk_bytes=chunk_bytes,
        heartbeat_s=heartbeat_s,
        patience_s=patience_s,
        congestion=congestion,
        compression=compression,
        pace_mbit=pace_mbit,
    )
    try:
        yield link
    finally:
        link.close()


@contextmanager
def joined(bench: Bench, identities: Path, **settings: Any) -> Iterator[GrpcLink]:
    """The link of s1, which has joined a served coordinator; settings as in `dialling`."""
    with (
        serving(bench.hub, identities) as plane,
        dialling(plane.port, identities / "s1", **settings) as link,
    ):
        link.join(bench.hello("s1"))
        yield link


@contextmanager
def joined_through_proxy(
    bench: Bench, identities: Path, **settings: Any
) -> Iterator[tuple[GrpcLink, FlakyProxy]]:
    """As `joined`, with a proxy on the way."""
    with (
        serving(bench.hub, identities) as plane,
        flaky_proxy(plane.port) as proxy,
        dialling(proxy.port, identities / "s1", **settings) as link,
    ):
        link.join(bench.hello("s1"))
        yield link, proxy


def await_control(bench: Bench, link: GrpcLink, site: str) -> None:
    """Until a site's Control stream stands: a server stopped while it opens might not end it."""
    link.heartbeat(1)
    eventually(lambda: bench.registry.sites[site].step == 1)


@contextmanager
def stub_of(port: int, folder: Path) -> Iterator[Stub]:
    """Bare calls, without any of the site's own manners."""
    credentials = Identity.load(folder).grpc_channel_credentials()
    channel = grpc.secure_channel(f"127.0.0.1:{port}", credentials)
    try:
        yield Stub(channel, ByteCounter(), f"127.0.0.1:{port}")
    finally:
        channel.close()


def eventually(condition: Callable[[], Any], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def in_thread(call: Callable[[], Any]) -> Any:
    """Run a call beside the test; the returned function waits for it and gives or raises."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((True, call()))
        except BaseException as error:
            outcome.append((False, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait(timeout_s: float = 20.0) -> Any:
        thread.join(timeout_s)
        assert outcome, "still running"
        is_good, value = outcome[0]
        if not is_good:
            raise value
        return value

    wait.is_running = thread.is_alive  # type: ignore[attr-defined]
    return wait
