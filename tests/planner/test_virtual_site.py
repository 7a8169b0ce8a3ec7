"""A site in virtual time, against a coordinator that answers as it is told."""

from __future__ import annotations

import pytest

from fedwan.fragments import due_step
from fedwan.planner.clock import Clock
from fedwan.planner.costs import Costs, Speed
from fedwan.planner.loads import global_bytes, loads_of
from fedwan.planner.virtual_journey import Journey
from fedwan.planner.virtual_site import SiteModel, Timetable
from fedwan.planner.weather import Season
from fedwan.planner.wire_model import Pipe, WireLink
from fedwan.strategy import Strategy
from tests.planner.models import LAYOUT, site, strategy_of

FREE = Costs(codecs={"fp32": Speed(0.0, 0.0)}, check_s=0.0, outer_s=0.0, copy_s=0.0)


def timetable(strategy: Strategy, num_steps: int) -> Timetable:
    fragments = strategy.fragments(LAYOUT)
    loads = loads_of(strategy, fragments, FREE)
    return Timetable(
        *(strategy.h, strategy.overlap.tau, num_steps),
        *(fragments, loads, global_bytes(LAYOUT, FREE)),
    )


class EchoingHub:
    """Publishes every round as soon as its one contribution is here, a while later."""

    def __init__(self, clock: Clock, num_fragments: int, after_s: float = 0.0) -> None:
        self.versions = [0] * num_fragments
        self.num_live = 1
        self.arrived: list[tuple[float, int]] = []
        self._clock = clock
        self._after_s = after_s

    def arrive(self, site: Journey, round_index: int, epoch: int) -> None:
        if epoch == site.epoch:
            self.arrived.append((self._clock.now_s, round_index))
            self._clock.at(self._clock.now_s + self._after_s, self.publish, site, round_index)

    def publish(self, site: Journey, round_index: int) -> None:
        self.versions[round_index % len(self.versions)] += 1
        site.deliver(round_index)


def journey(
    strategy: Strategy, model: SiteModel, num_steps: int, after_s: float = 0.0
) -> tuple[Journey, EchoingHub]:
    clock = Clock()
    table = timetable(strategy, num_steps)
    hub = EchoingHub(clock, len(table.fragments), after_s)
    found = Journey(0, model, table, clock, hub)
    clock.run()
    return found, hub


def link(bytes_per_s: float, rtt_s: float) -> WireLink:
    pipe = Pipe(bytes_per_s, rtt_s)
    return WireLink(pipe, pipe)


def test_departures_are_the_schedule_s_own() -> None:
    strategy = strategy_of("streaming_diloco", 1, 20, stream=(4, 3))
    table = timetable(strategy, 60)
    fragments = table.fragments
    assert list(table.departures) == [due_step(f, v, 20, 60) for v in range(3) for f in fragments]


def test_without_overlap_a_round_is_steps_and_one_round_trip() -> None:
    _, hub = journey(strategy_of("diloco", 1, 10), site(0.1, link(1e15, 0.2)), 30)
    # Up and down, half a round trip each: it asked for the update before it sent.
    slow_start_s = hub.arrived[0][0] - 1.0 - 0.1
    times = [moment for moment, _ in hub.arrived]
    assert slow_start_s > 0.2
    assert times[2] - times[1] == pytest.approx(1.0 + 0.2)


def test_with_overlap_a_site_does_not_wait_for_what_comes_before_tau_steps() -> None:
    strategy = strategy_of("streaming_diloco", 1, 10, stream=(2, 5))
    quick, _ = journey(strategy, site(0.1), 80, after_s=0.3)
    slow, _ = journey(strategy, site(0.1), 80, after_s=0.8)
    # The last one has no steps beside it.
    assert quick.ended_s == pytest.approx(8.0 + 0.3, abs=0.01)
    assert slow.ended_s > 8.0 + 0.8 + 1.0


def test_uploads_of_a_site_stand_in_line() -> None:
    strategy = strategy_of("streaming_diloco", 1, 10, stream=(2, 9))
    each_s = 2.0
    size = timetable(strategy, 10).loads[0].up_bytes
    _, hub = journey(strategy, site(0.1, link(size / each_s, 1e-9)), 10)
    # Both leave with the last step.
    (first, _), (second, _) = hub.arrived
    assert first == pytest.approx(1.0 + each_s, rel=0.01)
    assert second == pytest.approx(1.0 + 2 * each_s, rel=0.01)


def test_a_transfer_takes_the_rate_that_the_link_has_meanwhile() -> None:
    strategy = strategy_of("diloco", 1, 10)
    size = timetable(strategy, 10).loads[0].up_bytes
    # From 1.0 s on it would take 2 s; half of it has left when the link becomes ten times slower.
    slower = Season(2.0, link(size / 20.0, 0.0))
    model = SiteModel(0.1, (Season(0.0, link(size / 2.0, 0.0)), slower))
    _, hub = journey(strategy, model, 10)
    assert hub.arrived[0][0] == pytest.approx(1.0 + 1.0 + 10.0)


def test_a_site_that_returns_takes_the_global_weights_and_repeats_its_round() -> None:
    strategy = strategy_of("diloco", 1, 10)
    found, hub = journey(strategy, site(0.1, link(1e15, 0.0), (1.5, 5.0)), 30)
    assert found.rejoins == 1
    assert [index for _, index in hub.arrived] == [0, 1, 2]
    assert hub.arrived[1][0] == pytest.approx(5.0 + 1.0)
    # Five steps were thrown away.
    assert found.compute_s == pytest.approx(3.5)


def test_an_outage_after_the_end_changes_nothing() -> None:
    found, _ = journey(strategy_of("diloco", 1, 10), site(0.1, link(1e15, 0.0), (50.0, 60.0)), 30)
    assert found.rejoins == 0 and found.ended_s == pytest.approx(3.0)
