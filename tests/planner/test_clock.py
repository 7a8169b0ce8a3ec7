"""Virtual time."""

from __future__ import annotations

from fedwan.planner.clock import Clock


def test_events_happen_in_order_of_time_and_then_of_arrival() -> None:
    clock, seen = Clock(), []
    for moment, name in ((2.0, "c"), (1.0, "a"), (1.0, "b")):
        clock.at(moment, lambda name: seen.append((clock.now_s, name)), name)
    clock.run()
    assert seen == [(1.0, "a"), (1.0, "b"), (2.0, "c")]


def test_nothing_happens_once_it_is_stopped() -> None:
    clock, seen = Clock(), []
    clock.at(1.0, clock.stop)
    clock.at(1.0, seen.append, "late")
    clock.run()
    assert not seen and clock.now_s == 1.0
