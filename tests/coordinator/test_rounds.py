"""The round loop with sites that are slow, late, lost, or never come."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest

from fedwan.coordinator import rounds
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import JoinRefused, RunStopped
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.link.loopback import LoopbackLink
from fedwan.site.replica import Replica
from fedwan.state import hash_state, layout_to_json
from tests.planes import eventually
from tests.runs import (
    BATCH,
    INNER,
    GatedWorkload,
    H,
    SameStart,
    TinyRun,
    delta_strategy,
    tiny_workload,
)
from tests.support import DawdlingLink, TinyWorkload


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TICK_S", 0.05)
    monkeypatch.setattr(rounds, "FAREWELL_S", 1.0)


def test_any_order_of_arrival_gives_the_same_bits(tmp_path: Path) -> None:
    hashes = set()
    for attempt in range(3):
        sites = ("s1", "s2", "s3")
        run = TinyRun(tmp_path / str(attempt), delta_strategy(3), sites=sites)
        result = run.start()
        for name in sites:
            run.site(name, wrap=partial(DawdlingLink, seed=(attempt, name)))
        hashes.add(hash_state(result(30.0).state))
        order = [row["site"] for row in run.rows if row["kind"] == "round"]
        assert order == ["s1", "s2", "s3"] * run.num_versions
    assert len(hashes) == 1


@pytest.mark.parametrize("corrects", [False, True])
def test_the_doctor_is_not_told_who_looks_back_where_sites_correct_themselves(
    tmp_path: Path, corrects: bool
) -> None:
    run = TinyRun(tmp_path, delta_strategy(2)._replace(corrects=corrects))
    result = run.start()
    for name in run.sites:
        run.site(name)
    result(30.0)
    rows = [row for row in run.rows if row["kind"] == "round"]
    assert all(row["cosines"] for row in rows)
    assert bool(rows[-1]["backward"]) is not corrects


def test_a_quorum_closes_a_round_after_patience_and_not_before(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2, quorum=1, patience_s=0.5), num_versions=2)
    result = run.start()
    run.site("s2")
    began = time.monotonic()
    model = result(20.0)
    assert 1.0 <= time.monotonic() - began < 5.0
    assert min(model.versions) == 2
    rows = [row for row in run.rows if row["kind"] == "round"]
    assert [(row["site"], row["samples"]) for row in rows] == [("s2", H * BATCH)] * 2


def test_below_its_quorum_a_run_stops_with_a_checkpoint_and_says_whom_it_misses(
    tmp_path: Path,
) -> None:
    run = TinyRun(tmp_path, delta_strategy(2, patience_s=0.4), checkpoint_every=100)
    result = run.start()
    site = run.site("s1")
    with pytest.raises(RunStopped, match=r"round 1 has waited 0.4 s for s2 .* quorum of 2; bring"):
        result(20.0)
    with pytest.raises(RunStopped, match="round 1 has waited"):
        site(10.0)
    model, meta = GlobalModel.load(tmp_path / "checkpoint", run.strategy, 100.0)
    assert model.versions == [0] and meta["totals"]["contributions"] == 0


def test_a_run_that_no_site_comes_to_stops(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), patience_s=0.3)
    with pytest.raises(RunStopped, match=r"no site has sent initial weights for 0.3 s; check"):
        run.start()(10.0)


def test_initial_weights_come_from_another_site_if_the_first_falls_silent(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), num_versions=2)
    result = run.start()
    workload = tiny_workload()
    lost = LoopbackLink(run.desk, "s1")
    replica = Replica(workload)
    hello = wire.Hello(
        run_id="run",
        protocol=PROTOCOL,
        site="s1",
        session="lost",
        layout_json=layout_to_json(replica.layout),
        initial_sha256=replica.initial_sha256,
        frozen_sha256=replica.frozen_sha256,
    )
    assert lost.join(hello).send_initial
    run.desk.registry.sites["s1"].heard_s -= 100.0
    eventually(lambda: bool(run.events("lost")))  # while nobody else is there to be asked
    second = run.site("s2")
    eventually(lambda: run.rounds.model is not None, within_s=10.0)
    assert run.events("lost") == ["s1 has fallen silent"]
    first = run.site("s1", workload)
    sha256 = hash_state(result(20.0).state)
    assert first(10.0) == second(10.0) == sha256


def test_a_lost_evaluator_is_replaced(tmp_path: Path) -> None:
    class DyingJudge(SameStart):
        """Dies when it is asked for the quality at the end."""

        def evaluate(self, *args: object) -> dict[str, float]:
            if self.batches:
                raise KeyboardInterrupt
            return {"fd": 1.0}

    run = TinyRun(tmp_path, delta_strategy(2), num_versions=2)
    result = run.start()
    dying, good = run.site("s1", DyingJudge()), run.site("s2")
    with pytest.raises(KeyboardInterrupt):
        dying(20.0)
    run.desk.registry.sites["s1"].heard_s -= 100.0
    model = result(20.0)
    assert good(10.0) == hash_state(model.state)
    assert run.rounds.totals.quality_version == 2
    assert run.rows[-1]["kind"] != "warning"
    assert [r["site"] for r in run.rows if r["kind"] == "quality"][-1] == "s2"


def test_an_evaluator_that_comes_back_is_asked_again(tmp_path: Path) -> None:
    class DyingJudge(SameStart):
        def evaluate(self, *args: object) -> dict[str, float]:
            if self.batches:
                raise KeyboardInterrupt
            return {"fd": 1.0}

    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",), num_versions=2)
    result = run.start()
    with pytest.raises(KeyboardInterrupt):
        run.site("s1", DyingJudge())(20.0)
    run.site("s1")(20.0)
    result(10.0)
    assert run.rounds.totals.quality_version == 2


def test_without_anybody_to_measure_the_run_ends_after_patience(tmp_path: Path) -> None:
    class DyingJudge(SameStart):
        def evaluate(self, *args: object) -> dict[str, float]:
            if self.batches:
                raise KeyboardInterrupt
            return {"fd": 1.0}

    run = TinyRun(
        tmp_path, delta_strategy(1), sites=("s1",), num_versions=2, patience_s=1.0, silence_s=0.5
    )
    result = run.start()
    with pytest.raises(KeyboardInterrupt):
        run.site("s1", DyingJudge())(20.0)
    assert min(result(10.0).versions) == 2


def test_figures_of_a_site_cannot_pose_as_other_rows(tmp_path: Path) -> None:
    class Liar(SameStart):
        def evaluate(self, *args: object) -> dict[str, object]:
            return {"fd": float("nan"), "kind": "round", "site": "s9"}

    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",), num_versions=1)
    result = run.start()
    run.site("s1", Liar())(20.0)
    result(10.0)
    qualities = [row for row in run.rows if row["kind"] == "quality"]
    assert len(qualities) == 2 and {row["site"] for row in qualities} == {"s1"}
    assert any("measured an fd of nan" in text for text in run.events("warning"))


def test_stop_from_outside_ends_the_run_with_a_checkpoint(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), checkpoint_every=100)
    result = run.start()
    workload = GatedWorkload()
    sites = [run.site("s1"), run.site("s2", workload)]
    workload.allow(2 * H)
    run.await_version(2)
    run.desk.finish("enough")
    workload.allow(H)
    with pytest.raises(RunStopped, match="enough"):
        result(10.0)
    for site in sites:
        with pytest.raises(RunStopped, match="enough"):
            site(10.0)
    model, _ = GlobalModel.load(tmp_path / "checkpoint", run.strategy, 100.0)
    assert model.versions == [2]


def test_totals_count_what_sites_did_after_their_last_contribution(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), num_versions=2)
    result = run.start()
    links: list[LoopbackLink] = []

    def keep(link: LoopbackLink) -> LoopbackLink:
        links.append(link)
        return link

    for name in run.sites:
        run.site(name, wrap=keep)  # type: ignore[arg-type]
    result(20.0)
    assert run.rounds.totals.bytes_up == sum(link.bytes_up for link in links)
    assert run.rounds.totals.bytes_down == sum(link.bytes_down for link in links)
    assert run.rounds.totals.contributions == 4


def test_a_site_that_waits_is_announced_once_by_name(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(2), silence_s=60.0, num_versions=2)
    result = run.start()
    workload = GatedWorkload()
    run.site("s1")
    run.site("s2", workload)
    workload.allow(H)
    run.await_version(1)
    run.desk.registry.sites["s2"].heard_s -= 100.0
    eventually(lambda: run.events("paused") == ["round 2 waits for s2"])
    time.sleep(0.2)
    assert run.events("lost") == ["s2 has fallen silent"]
    workload.allow(H)
    result(20.0)
    assert run.events("paused") == ["round 2 waits for s2"]


def test_a_resumed_run_refuses_sites_of_another_beginning(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, delta_strategy(1), sites=("s1",), num_versions=2)
    result = run.start()
    run.site("s1")(20.0)
    result(10.0)
    again = TinyRun(tmp_path, delta_strategy(1), sites=("s1",), num_versions=4)
    again.resume()
    other = TinyWorkload(INNER, norm=True, seed=5)
    with pytest.raises(JoinRefused, match="initial weights"):
        again.site("s1", other)(10.0)
    result = again.start()
    assert again.site("s1")(20.0) == hash_state(result(10.0).state)
