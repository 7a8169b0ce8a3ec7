"""Whole runs over real mutual TLS: round loop, data plane, site loops, and a network that fails."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path

import pytest

from fedwan.app import resolve
from fedwan.config import Config, LinkConfig
from fedwan.coordinator import rounds
from fedwan.coordinator.service import run_coordinator
from fedwan.errors import ConfigError, LinkLost, RunStopped, SessionLost
from fedwan.link.base import Link
from fedwan.link.client import GrpcLink
from fedwan.link.tls import Identity
from fedwan.state import hash_state
from tests.planes import eventually, serving
from tests.proxies import FlakyProxy, flaky_proxy
from tests.runs import GatedWorkload, H, TinyRun, delta_strategy


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TICK_S", 0.05)


def dialler(port: int, folder: Path) -> Callable[[], Link]:
    def dial() -> Link:
        return GrpcLink(
            f"127.0.0.1:{port}",
            Identity.load(folder),
            chunk_bytes=1 << 10,
            heartbeat_s=0.1,
            patience_s=20.0,
        )

    return dial


def expected_hash(folder: Path) -> str:
    run = TinyRun(folder, delta_strategy(2))
    result = run.start()
    for name in run.sites:
        run.site(name)
    return hash_state(result(20.0).state)


def test_a_run_over_mutual_tls_gives_the_same_bits_though_connections_break(
    tmp_path: Path, identities: Path
) -> None:
    expected = expected_hash(tmp_path / "a")
    run = TinyRun(tmp_path / "b", delta_strategy(2))
    with serving(run.desk, identities) as plane, flaky_proxy(plane.port) as proxy:
        result = run.start()
        stop = threading.Event()
        saboteur = threading.Thread(target=sabotage, args=(proxy, stop))
        saboteur.start()
        sites = [
            run.site("s1", dial=dialler(plane.port, identities / "s1")),
            run.site("s2", dial=dialler(proxy.port, identities / "s2")),
        ]
        try:
            model = result(40.0)
            assert hash_state(model.state) == expected
            assert [site(20.0) for site in sites] == [expected, expected]
        finally:
            stop.set()
            saboteur.join()
    assert run.rounds.totals.contributions == 2 * run.num_versions
    assert run.rounds.totals.rejoins == run.desk.rejected == 0
    assert proxy.num_cuts >= 3


def sabotage(proxy: FlakyProxy, stop: threading.Event) -> None:
    """A few cuts while the run is under way, with less and less time to recover."""
    for pause_s in (0.2, 0.3, 0.3, 0.3):
        if stop.wait(pause_s):
            return
        proxy.cut()


def test_a_stopped_run_ends_every_site_at_once_and_with_the_reason(
    tmp_path: Path, identities: Path
) -> None:
    run = TinyRun(tmp_path, delta_strategy(2))
    workload = GatedWorkload()
    with serving(run.desk, identities) as plane:
        result = run.start()
        sites = [
            run.site("s1", dial=dialler(plane.port, identities / "s1")),
            run.site("s2", workload, dial=dialler(plane.port, identities / "s2")),
        ]
        workload.allow(2 * H)
        run.await_version(2)
        began = time.monotonic()
        run.desk.finish("enough")
        workload.allow(3 * H)
        with pytest.raises(RunStopped, match="enough"):
            result(10.0)
    for site in sites:
        with pytest.raises(RunStopped, match="enough"):
            site(10.0)
    assert time.monotonic() - began < 5.0
    assert sorted(run.desk.farewells) == ["s1", "s2"]


def test_a_coordinator_that_is_killed_and_resumed_sends_old_sessions_back_to_join(
    tmp_path: Path, identities: Path
) -> None:
    expected = expected_hash(tmp_path / "a")
    run = TinyRun(tmp_path / "b", delta_strategy(2))
    gated = GatedWorkload()
    with serving(run.desk, identities) as plane:
        port = plane.port
        run.start()
        old = [
            run.site("s1", dial=dialler(port, identities / "s1")),
            run.site("s2", gated, dial=dialler(port, identities / "s2")),
        ]
        gated.allow(2 * H)
        run.await_version(2)
        eventually(lambda: run.desk.outbox.durable_version == 2)
    again = TinyRun(tmp_path / "b", delta_strategy(2))
    again.resume()
    with serving(again.desk, identities, port=port):
        result = again.start()
        gated.allow(6 * H)
        for site in old:
            with pytest.raises((SessionLost, LinkLost)) as caught:
                site(20.0)
            assert isinstance(caught.value, SessionLost), caught.value
        sites = [again.site(n, dial=dialler(port, identities / n)) for n in again.sites]
        assert hash_state(result(20.0).state) == expected
        assert [site(10.0) for site in sites] == [expected, expected]
    run.desk.finish("the first coordinator is dead")


def test_nothing_is_left_behind_by_a_run(tmp_path: Path, identities: Path) -> None:
    def once(folder: Path) -> None:
        run = TinyRun(folder, delta_strategy(2), num_versions=2)
        with serving(run.desk, identities) as plane:
            result = run.start()
            sites = [
                run.site(name, dial=dialler(plane.port, identities / name)) for name in run.sites
            ]
            result(20.0)
            for site in sites:
                site(10.0)

    before = set(threading.enumerate())

    def num_threads() -> int:
        ours = ("control", "stripe", "data-plane")
        new = set(threading.enumerate()) - before
        return sum(thread.name.startswith(ours) for thread in new)

    once(tmp_path / "warm-up")
    eventually(lambda: num_threads() == 0)
    descriptors = len(os.listdir("/proc/self/fd"))
    for index in range(3):
        once(tmp_path / str(index))
    eventually(lambda: num_threads() == 0)
    # gRPC keeps a few of its own, however many servers there were.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)


def test_a_coordinator_whose_port_is_taken_says_so_before_anything_runs(
    tmp_path: Path, identities: Path
) -> None:
    run = TinyRun(tmp_path / "other", delta_strategy(2))
    with serving(run.desk, identities) as plane:
        config = resolve(
            Config(
                workload="flow",
                strategy="diloco",
                sites=2,
                out=str(tmp_path / "run"),
                link=LinkConfig(port=plane.port),
            )
        )
        announced: list[object] = []

        def announce(ticket: object) -> nullcontext[None]:
            announced.append(ticket)
            return nullcontext()

        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{plane.port}"):
            run_coordinator(config, "run", identities / "coordinator", False, announce)
        assert not announced
