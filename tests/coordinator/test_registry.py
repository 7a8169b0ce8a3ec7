"""Who is here, on a clock that the test moves."""

from __future__ import annotations

from queue import Empty

import pytest

from fedwan.coordinator.registry import Registry
from fedwan.errors import SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Signals

Signal = wire.CoordinatorSignal


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def registry(clock: Clock) -> Registry:
    registry = Registry(["s1", "s2"], 10.0, clock)
    registry.admit("s1", "a")
    return registry


def kinds(signals: Signals) -> list[int]:
    found = []
    while True:
        try:
            found.append(signals.get_nowait().kind)
        except Empty:
            return found


def test_a_site_is_live_from_its_join_until_it_falls_silent(
    registry: Registry, clock: Clock
) -> None:
    assert registry.live() == ["s1"] and registry.newly_lost() == []
    clock.now += 10
    assert registry.is_live("s1")
    clock.now += 0.1
    assert not registry.is_live("s1")
    assert registry.newly_lost() == ["s1"] and registry.newly_lost() == []
    assert registry.hear("s1", "a", 5) and registry.live() == ["s1"]


def test_a_site_that_never_came_is_not_lost(registry: Registry, clock: Clock) -> None:
    clock.now += 100
    assert registry.newly_lost() == ["s1"]


def test_a_broken_stream_shortens_patience_with_silence(registry: Registry, clock: Clock) -> None:
    registry.drop("s1", "a")
    clock.now += 4.1
    assert registry.newly_lost() == ["s1"]


def test_old_sessions_are_not_heard(registry: Registry, clock: Clock) -> None:
    assert registry.admit("s1", "b")
    clock.now += 9
    assert not registry.hear("s1", "a", 9)
    registry.drop("s1", "a")
    clock.now += 1
    assert registry.is_live("s1") and registry.sites["s1"].step == 0


def test_admission_is_idempotent_by_session(registry: Registry) -> None:
    assert not registry.admit("s1", "a")
    assert registry.admit("s1", "b") and registry.sites["s1"].joins == 2
    assert registry.admit("s1", "b") and registry.sites["s1"].joins == 2


def test_a_replaced_session_is_told(registry: Registry) -> None:
    signals = registry.attach("s1", "a")
    registry.admit("s1", "b")
    assert kinds(signals) == [Signal.GONE]
    assert kinds(registry.attach("s1", "b")) == []


def test_a_signal_is_said_again_on_each_new_stream_until_it_is_settled(registry: Registry) -> None:
    registry.tell("s1", Signal.EVALUATE)
    assert kinds(registry.attach("s1", "a")) == [Signal.EVALUATE]
    second = registry.attach("s1", "a")
    registry.tell("s1", Signal.STOP, "over")
    assert kinds(second) == [Signal.EVALUATE, Signal.STOP]
    registry.settle("s1", Signal.EVALUATE)
    registry.settle("s1", Signal.EVALUATE)
    registry.admit("s1", "b")
    assert kinds(registry.attach("s1", "b")) == [Signal.STOP]


def test_only_the_present_session_attaches(registry: Registry) -> None:
    with pytest.raises(SessionLost, match="this session of s1 was replaced"):
        registry.attach("s1", "other")
    for name in ("s2", "stranger"):
        with pytest.raises(SessionLost, match="has not joined this run"):
            registry.attach(name, "")
        assert not registry.hear(name, "x", 1)
        registry.drop(name, "x")


def test_a_site_that_left_is_neither_live_nor_lost(registry: Registry, clock: Clock) -> None:
    registry.sites["s1"].has_left = True
    clock.now += 100
    assert registry.live() == [] and registry.newly_lost() == []
    registry.admit("s1", "b")
    assert registry.live() == ["s1"]
