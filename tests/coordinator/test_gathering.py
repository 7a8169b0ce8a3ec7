"""Late contributions and updates on arrival, with sites that are slow, lost, and back."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedwan.coordinator import rounds
from fedwan.errors import RunStopped
from fedwan.state import hash_state
from fedwan.strategy import Strategy
from tests.planes import eventually
from tests.runs import (
    BATCH,
    Crash,
    CrashingWorkload,
    GatedWorkload,
    H,
    TinyRun,
    arrival_strategy,
    delta_strategy,
    push_pull_strategy,
)


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rounds, "TICK_S", 0.05)
    monkeypatch.setattr(rounds, "FAREWELL_S", 1.0)


def lenient(max_staleness: int) -> Strategy:
    """Rounds close without the other site after half a second."""
    strategy = delta_strategy(2, quorum=1, patience_s=0.5)
    return strategy._replace(policy=strategy.policy._replace(max_staleness=max_staleness))


def run_with_a_late_site(folder: Path, max_staleness: int) -> TinyRun:
    """The first site's contribution to version 0 comes when the second has made version 1."""
    run = TinyRun(folder, lenient(max_staleness), num_versions=4)
    result = run.start()
    slow = GatedWorkload()
    first, second = run.site("s1", slow), run.site("s2")
    run.await_version(1)
    slow.allow(100)
    model = result(30.0)
    assert first(10.0) == second(10.0) == hash_state(model.state)
    return run


def contributions(run: TinyRun, site: str) -> list[tuple[int, int]]:
    rows = [row for row in run.rows if row["kind"] == "round" and row["site"] == site]
    return [(row["version"], row["staleness"]) for row in rows]


def test_a_late_contribution_becomes_part_of_the_next_update(tmp_path: Path) -> None:
    run = run_with_a_late_site(tmp_path, max_staleness=3)
    late = [(into, staleness) for into, staleness in contributions(run, "s1") if staleness]
    assert [staleness for _, staleness in late] == [late[0][0] - 1]
    in_time = [into for into, staleness in contributions(run, "s1") if not staleness]
    assert len(in_time) >= 2 and in_time == sorted(set(in_time)), "once it is back, it keeps up"
    assert contributions(run, "s2") == [(version, 0) for version in (1, 2, 3, 4)]
    assert (run.rounds.totals.late, run.desk.dropped) == (1, 0)


def test_a_late_contribution_is_dropped_and_counted_where_none_may_be_late(tmp_path: Path) -> None:
    run = run_with_a_late_site(tmp_path, max_staleness=0)
    assert all(late == 0 for _, late in contributions(run, "s1"))
    assert (run.rounds.totals.late, run.desk.dropped) == (0, 1)


def test_on_arrival_the_other_sites_do_not_wait_for_one_that_stands_still(tmp_path: Path) -> None:
    sites = ("s1", "s2", "s3")
    run = TinyRun(tmp_path, arrival_strategy(3, quorum=2), sites=sites, num_versions=4)
    result = run.start()
    still = GatedWorkload()
    loops = [run.site("s1", still), run.site("s2"), run.site("s3")]
    eventually(lambda: bool(run.desk.stop_text), within_s=20.0)
    still.allow(1)  # so that it hears that the run is over
    model = result(30.0)
    assert {loop(10.0) for loop in loops} == {hash_state(model.state)}
    assert contributions(run, "s1") == []
    assert run.rounds.totals.samples >= 3 * 4 * H * BATCH


def test_a_site_that_dies_on_arrival_rejoins_at_the_present_version(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, arrival_strategy(2, quorum=1), num_versions=30)
    result = run.start()
    first = run.site("s1", CrashingWorkload(after_steps=5 * H + 1))
    second = run.site("s2")
    with pytest.raises(Crash):
        first(30.0)
    again = run.site("s1")
    model = result(60.0)
    assert again(10.0) == second(10.0) == hash_state(model.state)
    assert run.desk.rejoins == 1
    assert len(contributions(run, "s1")) > 5


def test_below_its_quorum_a_run_on_arrival_pauses_and_then_stops(tmp_path: Path) -> None:
    run = TinyRun(
        tmp_path, arrival_strategy(2, quorum=2, patience_s=1.0), num_versions=400, silence_s=0.2
    )
    result = run.start()
    first = run.site("s1", CrashingWorkload(after_steps=2 * H))
    second = run.site("s2")
    with pytest.raises(Crash):
        first(30.0)
    run.desk.registry.sites["s1"].heard_s = -math.inf
    eventually(lambda: bool(run.events("paused")), within_s=10.0)
    assert "waits for s1" in run.events("paused")[0]
    with pytest.raises(RunStopped, match="below its quorum of 2"):
        result(30.0)
    with pytest.raises(RunStopped):
        second(10.0)


def test_a_parameter_servers_sites_end_on_its_weights(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, push_pull_strategy(2), num_versions=10)
    result = run.start()
    loops = [run.site("s1"), run.site("s2")]
    model = result(30.0)
    assert {loop(10.0) for loop in loops} == {hash_state(model.state)}
    assert run.rounds.totals.contributions == 20


def test_a_run_on_arrival_goes_on_from_its_checkpoint(tmp_path: Path) -> None:
    run = TinyRun(tmp_path, arrival_strategy(2, quorum=1), num_versions=400)
    result = run.start()
    loops = [run.site("s1"), run.site("s2")]
    run.await_version(8)
    run.desk.finish("enough")
    with pytest.raises(RunStopped, match="enough"):
        result(20.0)
    for loop in loops:
        with pytest.raises(RunStopped):
            loop(20.0)
    samples = run.rounds.totals.samples
    second = TinyRun(tmp_path, arrival_strategy(2, quorum=1), num_versions=60)
    second.rounds.totals = run.rounds.totals
    second.resume()
    again = second.start()
    loops = [second.site("s1"), second.site("s2")]
    model = again(30.0)
    assert {loop(10.0) for loop in loops} == {hash_state(model.state)}
    assert 2 * 60 * H * BATCH <= second.rounds.totals.samples
    assert samples < second.rounds.totals.samples
