"""Fragments in flight: sites and coordinators that die, contributions that are refused, overlap."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from tests.runs import Crash, CrashingWorkload, H, TinyRun

from fedwan import outer
from fedwan.codecs import Codec, by_network, fp32, int4, topk2
from fedwan.coordinator.policy import barrier
from fedwan.coordinator.server_step import step_outer
from fedwan.fragments import Fragment, strided
from fedwan.link import wire_pb2 as wire
from fedwan.overlap import Eager, Overlap
from fedwan.site.checkpoint import Ledger, Work
from fedwan.site.residuals import Residuals
from fedwan.state import hash_state
from fedwan.strategy import Strategy
from tests.support import WrappedLink, spec

BLEND = Overlap(tau=2, alpha=0.5)
EAGER = Overlap(tau=2, eager={"net": Eager(0.5, 0.5)})
STEPS = 2 * H


def streaming(num_sites: int, overlap: Overlap = BLEND, codec: Codec | None = None) -> Strategy:
    codec = codec or fp32()
    step = step_outer({"net": outer.nesterov(0.7, 0.5)})
    policy = barrier(num_sites, 0, 60.0)
    return Strategy("delta", STEPS, strided(3, STEPS), step, codec, codec, policy, overlap)


@pytest.mark.parametrize("overlap", [Overlap(), BLEND, EAGER], ids=["barrier", "blend", "eager"])
@pytest.mark.parametrize("after_steps", [0, STEPS - 1, STEPS, STEPS + 3, 3 * STEPS + 2])
def test_a_site_that_dies_in_flight_comes_back_and_ends_where_the_others_do(
    tmp_path: Path, after_steps: int, overlap: Overlap
) -> None:
    run = TinyRun(tmp_path, streaming(2, overlap), num_versions=5)
    result = run.start()
    first = run.site("s1")
    with pytest.raises(Crash):
        run.site("s2", CrashingWorkload(after_steps))(20.0)
    second = run.site("s2")
    sha256 = hash_state(result(30.0).state)
    assert first(10.0) == second(10.0) == sha256
    assert run.rounds.totals.rejoins == 1
    assert run.rounds.totals.contributions == 2 * 3 * 5


@pytest.mark.parametrize(
    "codec",
    [fp32(), int4(), topk2(), by_network(int4(), {"net": topk2()})],
    ids=lambda codec: codec.name,
)
def test_a_coordinator_that_dies_is_resumed_with_all_sites(tmp_path: Path, codec: Codec) -> None:
    strategy = streaming(2, codec=codec)
    run = TinyRun(tmp_path, strategy, num_versions=5)
    run.start()
    crashed = [run.site(name, CrashingWorkload(2 * STEPS + 4)) for name in run.sites]
    for site in crashed:
        with pytest.raises(Crash):
            site(20.0)
    run.await_version(1)
    again = TinyRun(tmp_path, strategy, num_versions=5)
    again.resume()
    result = again.start()
    sites = [again.site(name) for name in again.sites]
    sha256 = hash_state(result(30.0).state)
    assert [site(10.0) for site in sites] == [sha256, sha256]
    run.desk.finish("the first coordinator is dead")


def test_the_same_run_ends_on_the_same_bits_whatever_the_links_weather(tmp_path: Path) -> None:
    class Weather(WrappedLink):
        def download(self, request: wire.DownloadRequest) -> Any:
            time.sleep(0.003 * (request.fragment + request.version) % 0.011)
            return self._inner.download(request)

    hashes = set()
    for attempt, wrap in enumerate((lambda link: link, Weather)):
        run = TinyRun(tmp_path / str(attempt), streaming(2), num_versions=4)
        result = run.start()
        sites = [run.site(name, wrap=wrap) for name in run.sites]
        hashes |= {hash_state(result(30.0).state), *(site(10.0) for site in sites)}
    assert len(hashes) == 1


class Refusing(WrappedLink):
    """The coordinator says no to one contribution."""

    left = 1

    def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
        is_chosen = header.kind == wire.UploadHeader.CONTRIBUTION and header.version == 1
        if is_chosen and header.fragment == 1 and self.left:
            self.left -= 1
            payload.read(0, payload.num_bytes)
            return wire.Receipt(status=wire.Receipt.REJECTED, text="it looks odd")
        return self._inner.upload(header, payload)


def test_after_a_refused_fragment_a_site_starts_over_from_the_global_weights(
    tmp_path: Path,
) -> None:
    run = TinyRun(tmp_path, streaming(2), num_versions=4)
    result = run.start()
    sites = [run.site("s1"), run.site("s2", wrap=Refusing)]
    sha256 = hash_state(result(30.0).state)
    assert [site(10.0) for site in sites] == [sha256, sha256]
    assert run.rounds.totals.contributions == 2 * 3 * 4


def test_a_site_steps_on_while_its_fragments_fly(tmp_path: Path) -> None:
    """The first upload does not return before steps were taken that came after it."""
    stepped_on = threading.Event()

    class Holding(WrappedLink):
        def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
            if header.kind == wire.UploadHeader.CONTRIBUTION:
                assert stepped_on.wait(10)
            return self._inner.upload(header, payload)

        def heartbeat(self, step: int) -> None:
            if step == STEPS + 1:
                stepped_on.set()
            self._inner.heartbeat(step)

    run = TinyRun(tmp_path, streaming(1), sites=("s1",), num_versions=2)
    result = run.start()
    site = run.site("s1", wrap=Holding)
    assert hash_state(result(30.0).state) == site(10.0)
    assert stepped_on.is_set()


@pytest.mark.parametrize(
    ("overlap", "contributions"), [(Overlap(), 0), (BLEND, 3)], ids=["barrier", "blend"]
)
def test_a_checkpoint_that_cannot_be_written_ends_the_site(
    tmp_path: Path, overlap: Overlap, contributions: int
) -> None:
    """Without overlap before its contribution leaves; with overlap before it says farewell."""
    run = TinyRun(tmp_path, streaming(1, overlap), sites=("s1",), num_versions=1)
    run.start()
    (tmp_path / "s1").write_text("no folder")
    with pytest.raises(OSError, match="s1"):
        run.site("s1")(20.0)
    assert run.rounds.totals.contributions == contributions
    run.desk.finish("test over")


def test_what_was_owed_is_forgotten_once_its_version_is_past() -> None:
    fragments = [Fragment(i, {f"net/{i}": spec((1,))}) for i in range(2)]
    owed = {f"net/{i}": torch.tensor([float(i)]) for i in range(2)}
    residuals = Residuals(2)
    residuals.restore(fragments, [3, 4], Ledger({}, owed, Work(0, 0), (3, 3)))
    assert residuals.of(fragments[0]) == {"net/0": owed["net/0"]}
    assert residuals.of(fragments[1]) == {}
    residuals.settle(fragments[1], 5, {"net/1": owed["net/1"]})
    ledger = residuals.ledger({}, {}, Work(1, 2))
    assert (ledger.versions, set(ledger.owed)) == ((3, 5), {"net/0", "net/1"})
