"""A real data plane on loopback with real certificates, and what tests put through it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack, closing, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest import mock

import grpc
import torch

from fedwan import outer
from fedwan.codecs import Payload, fp32
from fedwan.config import Config, LinkConfig
from fedwan.coordinator.federation import CoordinatorRounds
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.servicer import Servicer
from fedwan.files import replace_bytes
from fedwan.fragments import whole
from fedwan.link import certificates, client, pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Link
from fedwan.link.client import GrpcLink
from fedwan.link.rpc import ByteCounter, Stub
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity, now
from fedwan.outer.step import step_outer
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.protocol.policy import RoundPolicy
from fedwan.protocol.registry import Registry
from fedwan.state import Layout, State, hash_state, layout_to_json
from fedwan.strategy import Strategy
from tests.proxies import FlakyProxy, flaky_proxy
from tests.support import encoded, hub_of, random_state, spec
from tests.support import read_all as read_all  # for tests of the link

RUN = "run-1"
SITES = ("s1", "s2", "s3")
LINK = LinkConfig()


def layout_of_size(num_values: int) -> Layout:
    return {"net/w": spec((num_values,))}


def payload_of(value: float, layout: Layout) -> Payload:
    return encoded({"net/w": torch.full(layout["net/w"].shape, value)}, layout)


def random_payload(seed: int, layout: Layout) -> Payload:
    return encoded(random_state(seed, layout), layout)


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
    ) -> None:
        self.layout = layout_of_size(num_values)
        step = step_outer({"net": outer.sgd(lr=1.0)})  # the mean of the sites'
        policy = RoundPolicy(len(sites), len(sites), 60.0)
        self.strategy = Strategy("delta", 1, whole, step, fp32(), fp32(), policy)
        self.events: list[tuple[str, str | None, str]] = []
        self.details: list[dict[str, Any]] = []
        self.registry = Registry(sites, silence_s)
        fragments = self.strategy.fragments(self.layout)
        self.intake = Intake(self.layout, fragments, self.strategy.up, folder / "spool")
        self.claim = Claim.of(self.hello(sites[0]))
        agreement = Agreement(sites, len(sites))
        agreement.agreed = self.claim
        self.hub = Servicer(RUN, self.registry, agreement, self._keep, chunk_bytes)
        self.rounds = CoordinatorRounds(self.strategy, fragments, sites, 1000, 4)
        self.hub.start(self.rounds, self.intake)
        self.set_model()

    def _keep(self, *event: Any, **details: Any) -> None:
        self.events.append(event)
        self.details.append(details)

    def _zeros(self) -> State:
        return {"net/w": torch.zeros(self.layout["net/w"].shape)}

    def set_model(self) -> GlobalModel:
        model = GlobalModel(self._zeros(), self.layout, self.strategy, 1e3)
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
            self.rounds.updates.close(0)

    def is_live(self, site: str) -> bool:
        return site in self.registry.live(time.monotonic())

    def hello(self, site: str, session: str = "") -> wire.Hello:
        return hello_of(site, session or f"{site}-first", self.layout, hash_state(self._zeros()))

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


def hello_of(site: str, session: str, layout: Layout, initial_sha256: str) -> wire.Hello:
    return wire.Hello(
        run_id=RUN,
        protocol=PROTOCOL,
        site=site,
        session=session,
        layout_json=layout_to_json(layout),
        initial_sha256=initial_sha256,
        frozen_sha256=hash_state({}),
    )


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
    hub: Any, identities: Path, link: LinkConfig = LINK, num_sites: int = 1
) -> Iterator[DataPlane]:
    """A data plane on loopback."""
    identity = Identity.load(identities / "coordinator", "coordinator")
    plane = DataPlane(hub, identity, Config(sites=num_sites, link=link))
    plane.start()
    try:
        yield plane
    finally:
        plane.stop(0.1)


@contextmanager
def dialling(
    port: int, folder: Path, link: LinkConfig = LINK, **settings: Any
) -> Iterator[GrpcLink]:
    """A site's link; settings as it has them."""
    identity = Identity.load(folder)
    given: dict[str, Any] = {"channels": 2, "patience_s": 30.0, "packs": False} | settings
    with closing(GrpcLink(f"127.0.0.1:{port}", identity, link, **given)) as found:
        yield found


@contextmanager
def joined(
    bench: Bench, identities: Path, link: LinkConfig = LINK, **settings: Any
) -> Iterator[GrpcLink]:
    """The link of s1, which has joined a served coordinator; settings as in `dialling`."""
    with (
        serving(bench.hub, identities, link) as plane,
        dialling(plane.port, identities / "s1", link, **settings) as found,
    ):
        found.join(bench.hello("s1"))
        yield found


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


def carry(bench: Bench, link: GrpcLink, way: str, payload: Payload) -> bytes:
    """Bring a payload `up` or `down`; the bytes that arrive."""
    if way == "up":
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        arrived = bench.contribution("s1")
    else:
        bench.publish(1, payload)
        arrived = link.download(update_request())  # type: ignore[assignment]
    assert arrived is not None and arrived.payload is not None
    return read_all(arrived.payload)


class Wires(ExitStack):
    """Real links to a simulated run's coordinator, one of them through a proxy."""

    def __init__(self, identities: Path, proxied: str = "") -> None:
        super().__init__()
        self.enter_context(mock.patch.object(client, "CHUNK_BYTES", 1 << 10))
        self.proxy: FlakyProxy | None = None
        self._identities, self._proxied = identities, proxied
        self._lock, self._port = threading.Lock(), 0

    def wrap(self, name: str, link: Link) -> Link:
        with self._lock:
            if not self._port:
                plane = self.enter_context(serving(hub_of(link), self._identities, num_sites=3))
                self._port = plane.port
                if self._proxied:
                    self.proxy = self.enter_context(flaky_proxy(self._port))
            port = self.proxy.port if self.proxy and name == self._proxied else self._port
            found = dialling(port, self._identities / name)
            wired: Any = self.enter_context(found)
            wired._hub, wired._site = hub_of(link), name  # for links that rewrite what passes
            return wired  # type: ignore[no-any-return]


def await_control(bench: Bench, link: GrpcLink, site: str) -> None:
    """Until a site's Control stream stands: a server stopped while it opens might not end it."""
    link.heartbeat(1)
    eventually(lambda: bench.registry.sites[site].step == 1)


@contextmanager
def stub_of(port: int, folder: Path) -> Iterator[Stub]:
    """Bare calls, without any of the site's own manners."""
    identity, address = Identity.load(folder), f"127.0.0.1:{port}"
    with grpc.secure_channel(address, identity.grpc_channel_credentials()) as channel:
        yield Stub(channel, ByteCounter(), address, identity)


class Failure(grpc.RpcError):
    """A call that failed."""

    def __init__(self, code: grpc.StatusCode, text: str = "text") -> None:
        self.code, self.details = lambda: code, lambda: text


def eventually(condition: Callable[[], Any], within_s: float = 5.0) -> None:
    deadline = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < deadline, "did not come true in time"
        time.sleep(0.01)


def in_thread(call: Callable[[], Any]) -> Any:
    """Run a call beside the test; the returned function waits for it and gives or raises."""
    outcome: futures.Future[Any] = futures.Future()

    def run() -> None:
        try:
            outcome.set_result(call())
        except BaseException as error:
            outcome.set_exception(error)

    threading.Thread(target=run, daemon=True).start()

    def wait(timeout_s: float = 20.0) -> Any:
        futures.wait([outcome], timeout_s)
        assert outcome.done(), "still running"
        return outcome.result()

    wait.is_running = lambda: not outcome.done()  # type: ignore[attr-defined]
    return wait


def let_lapse(authority: pki.Authority) -> None:
    """The coordinator's revocation list is one whose time is over."""
    certificate, key = authority._issuer
    over = mock.Mock(subject=certificate.subject, not_valid_after_utc=now() - timedelta(minutes=1))
    lapsed = certificates.sign_revocations(certificates.Issuer(over, key), {}, 9)
    replace_bytes(authority.directory / "coordinator" / "crl.pem", lapsed)
