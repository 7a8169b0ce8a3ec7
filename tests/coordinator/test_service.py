"""Runs over real mutual TLS: round loop, data plane, sites, and a network that fails."""

from __future__ import annotations

import json
import math
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.app import resolve
from fedwan.config import Config, LinkConfig
from fedwan.coordinator import control
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.service import run_coordinator
from fedwan.doctor.diagnosis import diagnose
from fedwan.errors import STOPPED, ConfigError, FedwanError, RunStopped, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.output.board import read_run
from fedwan.output.records import iter_records
from fedwan.site.site import Membership
from fedwan.site.stub import CoordinatorStub
from fedwan.state import hash_state
from fedwan.strategy import Strategy
from strategies import diloco
from tests.cli.conftest import Command
from tests.cli.conftest import fedwan as fedwan
from tests.planes import Bench, Wires, dialling, eventually, in_thread, serving
from tests.support import NET, TinyWorkload, WrappedLink, run_tiny, take_part, tiny_config


def test_a_site_that_ends_with_other_weights_is_a_finding_of_the_doctor(tmp_path: Path) -> None:
    class Mistaken(WrappedLink):
        def leave(self, farewell: wire.Farewell) -> None:
            farewell.global_sha256 = "0" * 64
            self._inner.leave(farewell)

    def wrap(name: str, link: Link) -> Link:
        return Mistaken(link) if name == "s2" else link  # type: ignore[return-value]

    run_tiny(tmp_path, tiny_config(), wrap=wrap)
    (found,) = diagnose(iter_records(tmp_path))
    assert (found.kind, found.site, found.network) == ("different_weights", "s2", None)
    assert found.version > 0 and "it ended with weights 000000000000" in found.why


@pytest.mark.slow
def test_a_run_over_mutual_tls_gives_the_same_bits_though_connections_break(
    tmp_path: Path, identities: Path
) -> None:
    config = tiny_config(h=3, steps=60)
    expected = run_tiny(tmp_path / "a", config).hashes
    is_over = threading.Event()
    with Wires(identities, "s2") as wires:

        def sabotage() -> None:
            while not is_over.wait(0.2):
                if wires.proxy and wires.proxy.num_cuts < 4:
                    wires.proxy.cut()

        saboteur = in_thread(sabotage)
        try:
            ran = run_tiny(tmp_path / "b", config, wrap=wires.wrap)
        finally:
            is_over.set()
            saboteur()
    assert ran.hashes == expected and len(expected) == 1
    totals = ran.result.totals
    assert (totals.contributions, totals.rejoins, totals.rejected) == (40, 0, 0)
    assert wires.proxy is not None and wires.proxy.num_cuts >= 1


@contextmanager
def coordinator(
    folder: Path, config: Config, identities: Path, port: int, resume: bool
) -> Iterator[tuple[CoordinatedRun, int, Any]]:
    """A coordinator that serves real links; its run, port and result."""
    strategy: Strategy = diloco.build(config)
    words = (config, "simulated", folder, lambda row: None, lambda *_: None)
    run = CoordinatedRun(*words, strategy, 60.0)  # type: ignore[arg-type]
    if resume:
        run.resume()
    with serving(run.hub, identities, LinkConfig(f"127.0.0.1:{port}")) as plane:
        yield run, plane.port, in_thread(run.train)


@pytest.mark.parametrize("every", [1, 2])
def test_sites_go_on_with_a_coordinator_that_was_killed_where_it_is_at_their_versions(
    every: int, tmp_path: Path, identities: Path
) -> None:
    config = tiny_config(h=3, steps=18, checkpoint={"every": every})
    (expected,) = run_tiny(tmp_path / "a", config).hashes
    may_go_on = threading.Event()

    class Gated(TinyWorkload):
        def step(self, *args: Any) -> Any:
            assert len(self.batches) < 9 or may_go_on.wait(20)
            return super().step(*args)

    def site(name: str, port: int, workload: TinyWorkload, folder: str = "") -> Any:
        def live() -> str:
            with dialling(port, identities / name) as link:
                member = Membership(
                    *(config, "simulated", name, tmp_path / "b" / (folder or name)),
                    lambda: link,
                    strategy=diloco.build(config),
                )
                return take_part(member, workload)

        return in_thread(live)

    with coordinator(tmp_path / "b", config, identities, 0, False) as (run, port, _):
        old = [site("s1", port, Gated(NET)), site("s2", port, Gated(NET))]
        durable = 2 if every == 1 else 0  # the version before the one that was saved last
        eventually(lambda: run.hub.model is not None and run.hub.model.version == 3, within_s=20.0)
        eventually(lambda: run.hub.durable_version == durable)
    with coordinator(tmp_path / "b", config, identities, port, True) as (again, _, result):
        other = site("s1", port, TinyWorkload(NET, seed=5), "other")
        with pytest.raises(Exception, match="its initial weights hash to"):
            other(20.0)
        may_go_on.set()
        if every > 1:
            for ended in old:
                with pytest.raises(SessionLost, match="is at other versions than the run"):
                    ended(20.0)
            old = [site(name, port, TinyWorkload(NET)) for name in ("s1", "s2")]
        assert hash_state(result(20.0).state) == expected
        assert [ended(10.0) for ended in old] == [expected] * 2
        assert again.site_sha256() == {"s1": expected, "s2": expected}
    run.hub.finish("the first coordinator is dead")


def test_nothing_is_left_behind_by_a_run(tmp_path: Path, identities: Path) -> None:
    def once(folder: Path) -> None:
        with Wires(identities) as wires:
            run_tiny(folder, tiny_config(h=3, steps=6), wrap=wires.wrap)

    before, ours = set(threading.enumerate()), ("control", "stripe", "data-plane")

    def is_quiet() -> bool:
        return not any(t.name.startswith(ours) for t in {*threading.enumerate()} - before)

    once(tmp_path / "warm-up")
    eventually(is_quiet)
    descriptors = len(os.listdir("/proc/self/fd"))
    for index in range(2):
        once(tmp_path / str(index))
    eventually(is_quiet)
    # gRPC keeps a few of its own, however many servers there were.
    eventually(lambda: len(os.listdir("/proc/self/fd")) <= descriptors + 2)


def test_totals_count_what_sites_did_after_their_last_contribution(tmp_path: Path) -> None:
    links: list[Link] = []

    def keep(_: str, link: Link) -> Link:
        links.append(link)
        return link

    totals = run_tiny(tmp_path, tiny_config(), wrap=keep).result.totals
    assert totals.bytes_up == sum(link.bytes_up for link in links)
    assert totals.bytes_down == sum(link.bytes_down for link in links)
    total = read_run(tmp_path).total  # what the live table and the report show
    assert (total.bytes_up, total.bytes_down) == (totals.bytes_up, totals.bytes_down)
    assert (total.compute_s, total.wait_s) == pytest.approx((totals.compute_s, totals.wait_s))


def test_a_disk_without_room_for_checkpoints_and_a_round_is_told_of_before_it_is_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = tiny_config(steps=2)
    (network,) = TinyWorkload(NET).networks.values()
    weights = 4 * sum(parameter.numel() for parameter in network.parameters())
    for name, free in (("little", 9 * weights), ("enough", 1 << 20)):
        monkeypatch.setattr("fedwan.files._free_bytes", lambda _, free=free: free)
        warnings = run_tiny(tmp_path / name, config).events("warning")
        assert (len(warnings) == 1 and "make room" in warnings[0]) == (name == "little")


def test_a_run_that_is_ended_from_outside_keeps_the_reason_and_tells_it_until_it_goes_on(
    tmp_path: Path, identities: Path, fedwan: Command
) -> None:
    out, why = tmp_path / "run", "site s2: the training script failed at step 3: ValueError: no"
    config = resolve(Config(workload="flow", sites=2, out=str(out)))

    @contextmanager
    def announce(*_: object) -> Iterator[None]:
        assert control.ask(out, {"ask": "ending", "text": why}) == {}
        raise FedwanError("ended by SIGTERM")
        yield

    with pytest.raises(RunStopped, match=why):
        run_coordinator(config, "run", identities / "coordinator", False, announce)
    code, text, _ = fedwan("status", str(out))
    assert code == 0 and text.splitlines()[1] == f"stopped: {why}"
    found = tmp_path / "found.json"
    code, text, _ = fedwan("doctor", str(out), "--json", str(found))
    (finding,) = json.loads(found.read_text())
    assert code == 0 and (finding["kind"], finding["why"]) == ("stopped", why) and why[:60] in text
    with (out / "journal.jsonl").open("a") as file:  # as a run that goes on writes it
        row = {"kind": "event", "t": 4e9, "event": "listening", "site": None, "text": "listens"}
        file.write(json.dumps(row) + "\n")
    assert why not in fedwan("status", str(out))[1] + fedwan("doctor", str(out))[1]
    with (out / "journal.jsonl").open("a") as file:  # and is stopped by its operator
        row |= {"event": "stopped", "text": STOPPED}
        file.write(json.dumps(row) + "\n")
    assert "mend  " not in fedwan("doctor", str(out))[1]


@pytest.mark.parametrize("others", [{}, {"kind": 1.0, "site": 9.0}])
def test_figures_that_no_record_can_hold_end_no_run(tmp_path: Path, others: Any) -> None:
    class Careless(TinyWorkload):
        def evaluate(self, *args: object) -> dict[str, Any]:
            return {"fd": torch.tensor(float("nan")), "none": None, **others}

    ran = run_tiny(tmp_path, tiny_config(sites=1, steps=2), make=lambda: Careless(NET))
    qualities = [row for row in ran.result.records if row["kind"] == "quality"]
    assert len(qualities) == 2 and len(ran.hashes) == 1
    texts = ran.events("rejected" if others else "warning")
    assert ("a figure named 'kind'" if others else "measured an fd of nan") in texts[0]
    assert all(math.isnan(row["fd"]) and math.isnan(row["none"]) for row in qualities)
    assert {row["site"] for row in qualities} == {"s1"}


def test_figures_of_images_are_kept_with_what_they_were_seen_through(tmp_path: Path) -> None:
    class Images(TinyWorkload):
        def evaluate(self, *args: object) -> dict[str, Any]:
            return {"fd": 2.0, "fd_floor": 1.0, "num_real": 9}

    ran = run_tiny(tmp_path, tiny_config(sites=1, steps=2), make=lambda: Images(NET))
    qualities = [row for row in ran.result.records if row["kind"] == "quality"]
    for told in (*qualities, ran.result.totals.quality):
        assert (told["num_real"], told["seen_through"]) == (9, "random features")


def test_the_seconds_of_all_evaluations_are_summed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    seconds: list[float] = []
    report = CoordinatorStub.report

    def told(self: CoordinatorStub, quality: wire.QualityReport) -> None:
        seconds.append(quality.evaluation_s)
        report(self, quality)

    monkeypatch.setattr(CoordinatorStub, "report", told)
    totals = run_tiny(tmp_path, tiny_config(sites=1, steps=2)).result.totals
    assert len(seconds) > 1 and all(seconds)
    assert totals.evaluation_s == pytest.approx(sum(seconds))


def test_a_coordinator_whose_port_is_taken_says_so_before_anything_runs(
    tmp_path: Path, identities: Path
) -> None:
    announced: list[object] = []

    def announce(ticket: object) -> nullcontext[None]:
        announced.append(ticket)
        return nullcontext()

    with serving(Bench(tmp_path).hub, identities) as plane:
        link = LinkConfig(listen=f"127.0.0.1:{plane.port}")
        config = resolve(Config(workload="flow", sites=2, out=str(tmp_path / "run"), link=link))
        with pytest.raises(ConfigError, match=f"cannot listen on 127.0.0.1:{plane.port}"):
            run_coordinator(config, "run", identities / "coordinator", False, announce)
    assert not announced
