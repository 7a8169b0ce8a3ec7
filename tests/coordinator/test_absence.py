"""Sites that are late, lost, silent or never come; at a barrier and on arrival."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.coordinator import run as run_module
from fedwan.coordinator.model import GlobalModel, find_checkpoint
from fedwan.coordinator.servicer import Servicer
from fedwan.errors import RunStopped, UserError
from fedwan.link.base import Link
from fedwan.protocol.round import Key
from fedwan.site.site import Membership
from fedwan.strategy import Strategy
from strategies import diloco
from tests.planes import eventually, in_thread
from tests.support import NET, Ran, TinyWorkload, hub_of, run_tiny, take_part, tiny_config

H = 3


@pytest.fixture(autouse=True)
def _brisk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_module, "FAREWELL_S", 1.0)


class Crash(BaseException):
    """A site's process dies."""


class Gated(TinyWorkload):
    """Takes each step once the test lets it, and dies where it is told to."""

    def __init__(self, permits: int = 10**6, dies_at: int = -1, judges: bool = True) -> None:
        super().__init__(NET)
        self.permits = threading.Semaphore(permits)
        self.dies_at = dies_at
        self.judges = judges

    def step(self, *args: Any) -> Any:
        if len(self.batches) == self.dies_at:
            raise Crash
        assert self.permits.acquire(timeout=20)
        return super().step(*args)

    def evaluate(self, *args: Any) -> Any:
        if self.batches and not self.judges:
            raise Crash
        return super().evaluate(*args)


class Federation:
    """A run in a thread, with what the test does to its sites.

    A site whose process dies falls silent; then `then` is called, and says whether it returns.
    """

    def __init__(
        self,
        folder: Path,
        config: Any,
        strategy: Strategy | None = None,
        workloads: Mapping[str, Gated] | None = None,
        then: Callable[[], bool] = lambda: False,
    ) -> None:
        self.hub: Servicer | None = None
        self._workloads, self._then = workloads or {}, then
        run = partial(run_tiny, folder, config, strategy, part=self._part, wrap=self._wrap)
        self.result: Callable[[float], Ran] = in_thread(run)

    def _wrap(self, name: str, link: Link) -> Link:
        self.hub = hub_of(link)
        return link

    def _part(self, member: Membership, workload: TinyWorkload) -> None:
        name = member.name
        try:
            take_part(member, self._workloads.get(name, workload))
        except Crash:
            assert self.hub is not None
            with self.hub.changed:
                self.hub.registry.sites[name].heard_s = -math.inf
            if self._then():
                take_part(member, TinyWorkload(NET))


def staleness(ran: Ran, site: str) -> list[tuple[int, int]]:
    return [(row["version"], row["staleness"]) for row in ran.rounds(site)]


@pytest.mark.parametrize("max_staleness", [0, 3])
def test_a_late_contribution_is_in_the_next_update_or_dropped_and_counted(
    max_staleness: int, tmp_path: Path
) -> None:
    words = {"quorum": 1, "patience_s": 0.5, "max_staleness": max_staleness}
    config, slow, fast = tiny_config(h=H, steps=4 * H, round=words), Gated(0), Gated(3 * H)
    strategy = diloco.build(config)
    # Both are needed to begin, which takes longer on a busy machine; one is enough to go on.
    config.round.quorum, config.round.patience_s = 0, 60.0
    run = Federation(tmp_path, config, strategy, {"s1": slow, "s2": fast})
    eventually(lambda: run.hub and run.hub.model and run.hub.rounds.version, within_s=20.0)
    assert run.hub is not None
    rounds = run.hub.rounds
    slow.permits.release(H)
    # The last round waits until the late one is here.
    eventually(lambda: rounds.dropped or rounds.settled(Key(0, 0, "s1")) == "accepted", 20.0)
    for site in (slow, fast):
        site.permits.release(100)
    ran = run.result(30.0)
    assert len(ran.hashes) == 1
    merged = staleness(ran, "s2")
    assert merged[0] == (1, 0) and max(merged + staleness(ran, "s1"))[0] == 4
    late = [(into, by) for into, by in staleness(ran, "s1") if by]
    # Rounds of milliseconds: on a busy machine either is late again.
    totals, (into, by) = ran.result.totals, late[0] if late else (0, 0)
    if max_staleness:
        assert late and by == into - 1 <= max_staleness
        assert totals.late == len(late) + sum(by > 0 for _, by in merged) and not totals.dropped
    else:
        assert not late and totals.late == 0 < totals.dropped
        assert ran.events("late")
    check_spent(ran)


def check_spent(ran: Ran) -> None:
    """What was dropped has cost time and bytes, too; each is told once."""
    for name in ("compute_s", "bytes_up", "bytes_down"):
        told = sum(row.get(name, 0) for row in ran.result.records)
        assert getattr(ran.result.totals, name) == pytest.approx(told)


def test_what_grows_too_old_while_it_waits_for_its_turn_is_told(tmp_path: Path) -> None:
    config = tiny_config("parameter_server", NET, sites=4, h=1, steps=10)
    config.round.max_staleness = 1
    ran = run_tiny(tmp_path, config)
    assert len(ran.events("late")) == ran.result.totals.dropped > 0
    check_spent(ran)


def test_below_its_quorum_a_run_stops_with_a_checkpoint_and_says_whom_it_misses(
    tmp_path: Path,
) -> None:
    config = tiny_config(h=H, steps=6 * H, round={"patience_s": 0.6}, checkpoint={"every": 100})
    run = Federation(tmp_path, config, None, {"s2": Gated(dies_at=2 * H)})
    with pytest.raises(RunStopped, match=r"round 3 waits for s2, and .* for 0.6 s; bring"):
        run.result(20.0)
    model = GlobalModel.load(tmp_path / "checkpoint", diloco.build(config), config)
    assert model.versions == [2]
    assert find_checkpoint(tmp_path / "checkpoint")[0]["totals"]["contributions"] == 4


def test_a_run_whose_site_is_there_and_does_not_come_back_ends_and_says_what_to_mend(
    tmp_path: Path,
) -> None:
    config, still = tiny_config(h=H, steps=2 * H, round={"patience_s": 1.5}), Gated(permits=1)
    run = Federation(tmp_path, config, None, {"s2": still})
    eventually(lambda: run.hub and run.hub.stop_text, within_s=20.0)
    still.permits.release(H)  # so that it hears that the run is over
    says = (
        r"s2 \(connected, at step 1\), .* come back to `site`, or .* calls no site.after_step\(\)"
    )
    with pytest.raises(RunStopped, match=says):
        run.result(20.0)


@pytest.mark.slow
def test_a_round_is_waited_for_as_long_as_its_sites_take_steps(tmp_path: Path) -> None:
    config, slow = tiny_config(h=5, steps=5, round={"patience_s": 2.0}), Gated(permits=0)
    run = Federation(tmp_path, config, None, {"s2": slow})
    for _ in range(5):
        time.sleep(0.7)
        slow.permits.release()
    assert run.result(20.0).result.totals.contributions == 2


@pytest.mark.slow
def test_a_site_that_is_refused_again_and_again_is_given_up_and_the_run_waits_no_longer_for_it(
    tmp_path: Path,
) -> None:
    """However often it joins meanwhile."""
    told: list[Exception] = []

    class Spoilt(TinyWorkload):
        def step(self, *args: Any) -> Any:
            losses = super().step(*args)
            with torch.no_grad():
                next(self.networks["velocity"].parameters()).fill_(math.nan)
            return losses

    def part(member: Membership, workload: TinyWorkload) -> None:
        while member.name == "s2":
            try:
                take_part(member, Spoilt(NET))
            except UserError as error:
                told.append(error)
                time.sleep(0.05)
        take_part(member, workload)

    config = tiny_config(h=H, steps=2 * H, round={"patience_s": 3.0})
    began_s = time.monotonic()
    says = r"round 1 waits for s2( \(connected, at step \d\))?, and .* for 3 s; (bring|mend)"
    with pytest.raises(RunStopped, match=says):
        run_tiny(tmp_path, config, part=part)
    assert time.monotonic() - began_s < 15  # in which a process that has just joined is silent
    assert len(told) > 1
    assert str(told[0]).startswith("3 contributions in a row were refused: tensor ")


def test_a_site_that_is_waited_for_is_announced_once_by_name(tmp_path: Path) -> None:
    run = Federation(
        tmp_path,
        tiny_config(h=H, steps=2 * H),
        None,
        {"s2": Gated(dies_at=H + 1)},
        then=lambda: not time.sleep(0.3),  # type: ignore[func-returns-value]
    )
    ran = run.result(20.0)
    assert ran.events("paused") == ["round 2 waits for s2"]
    assert ran.events("lost") == ["s2 has fallen silent"]
    assert len(ran.hashes) == 1 and ran.result.totals.rejoins == 1


def test_stop_from_outside_ends_the_run_with_farewells(tmp_path: Path) -> None:
    gated = Gated(permits=2 * H)
    run = Federation(tmp_path, tiny_config(h=H, steps=6 * H), None, {"s2": gated})
    eventually(lambda: run.hub and run.hub.model and run.hub.rounds.version >= 2, within_s=20.0)
    assert run.hub is not None
    run.hub.finish("enough")
    gated.permits.release(H)
    with pytest.raises(RunStopped, match="enough"):
        run.result(20.0)
    assert sorted(run.hub.farewells) == ["s1", "s2"]


# Who measures -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("sites", "returns", "judge"), [(2, False, "s2"), (1, True, "s1"), (1, False, "")]
)
def test_a_lost_evaluator_is_replaced_or_asked_again_or_missed_for_as_long_as_patience_lasts(
    sites: int, returns: bool, judge: str, tmp_path: Path
) -> None:
    config = tiny_config(
        sites=sites, h=H, steps=2 * H, round={"patience_s": 0.4 if not judge else 60.0}
    )
    lost = {"s1": Gated(judges=False)}
    ran = Federation(tmp_path, config, None, lost, then=lambda: returns).result(20.0)
    rows = [row for row in ran.result.records if row["kind"] == "quality"]
    assert ran.result.model.versions == [2]
    assert [row["site"] for row in rows if row["version"] == 2] == [judge][: bool(judge)]
    told = "version 2 was not measured; the quality that is told is of version 0"
    assert any(told in text for text in ran.events("warning")) == (not judge)


@pytest.mark.slow
def test_what_is_measured_late_is_kept_while_the_site_is_waited_for(tmp_path: Path) -> None:
    class Slow(Gated):
        def evaluate(self, *args: Any) -> Any:
            time.sleep(1.5 * bool(self.batches))
            return super().evaluate(*args)

    config = tiny_config(sites=1, h=H, steps=H, round={"patience_s": 1.0})
    ran = Federation(tmp_path, config, None, {"s1": Slow()}).result(20.0)
    assert ran.result.totals.quality_version == 1 and not ran.events("warning")
