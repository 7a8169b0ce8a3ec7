"""Who is here, at the times that the test passes."""

from __future__ import annotations

from queue import Empty

import pytest

from fedwan.errors import PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Signals
from fedwan.protocol.registry import KEPT_SESSIONS, Registry

Signal = wire.CoordinatorSignal


@pytest.fixture
def registry() -> Registry:
    registry = Registry(["s1", "s2"], 10.0)
    registry.admit("s1", "a", 0.0)
    return registry


def attach(registry: Registry, name: str, session: str) -> Signals:
    registry.attach(name, session, signals := Signals(), 0.0)
    return signals


def kinds(signals: Signals) -> list[int]:
    found = []
    while True:
        try:
            found.append(signals.get_nowait().kind)
        except Empty:
            return found


def test_a_site_is_live_from_its_join_until_it_falls_silent(registry: Registry) -> None:
    assert registry.live(10.0) == ["s1"] and registry.notice(10.0) == ([], [])
    assert registry.live(10.1) == [] and registry.absent(10.1) == ["s1"]
    assert [registry.notice(10.1) for _ in range(2)] == [(["s1"], []), ([], [])]
    registry.hear("s1", "a", 5, 11.0)
    assert registry.live(11.0) == ["s1"]
    assert [registry.notice(11.0) for _ in range(2)] == [([], ["s1"]), ([], [])]
    assert registry.notice(100.0) == (["s1"], []), "who never came is not lost"
    registry.admit("s1", "b", 200.0)
    registry.drop("s1", "a")  # is of the session before
    registry.drop("s1", "b")
    assert registry.notice(206.1) == (["s1"], []), "a broken stream shortens patience"
    registry.admit("s1", "c", 300.0)
    registry.sites["s1"].has_left = True
    assert registry.live(300.0) == [] and registry.notice(400.0) == ([], [])


def test_old_sessions_are_not_heard(registry: Registry) -> None:
    assert registry.admit("s1", "b", 0.0) and registry.rejoins == 1
    registry.hear("s1", "a", 9, 9.0)
    registry.drop("s1", "a")
    assert registry.live(10.0) == ["s1"] and registry.sites["s1"].step == 0


def test_a_late_join_of_a_replaced_session_does_not_put_the_present_one_out(
    registry: Registry,
) -> None:
    assert not registry.admit("s1", "a", 0.0), "asked twice"
    signals = attach(registry, "s1", "a")
    registry.admit("s1", "b", 0.0)
    assert kinds(signals) == [Signal.GONE] and kinds(attach(registry, "s1", "b")) == []
    with pytest.raises(SessionLost, match="another process of s1 has joined"):
        registry.admit("s1", "a", 1.0)
    assert registry.sites["s1"].session == "b" and registry.rejoins == 1
    for number in range(1000):
        registry.admit("s1", f"c{number}", 2.0)
    assert len(registry.sites["s1"].replaced) == KEPT_SESSIONS


def test_a_signal_is_said_again_on_each_new_stream_until_it_is_settled(registry: Registry) -> None:
    registry.tell("s1", Signal.EVALUATE)
    assert kinds(attach(registry, "s1", "a")) == [Signal.EVALUATE]
    second = attach(registry, "s1", "a")
    registry.tell("s1", Signal.STOP, "over")
    assert kinds(second) == [Signal.EVALUATE, Signal.STOP]
    for _ in range(2):
        registry.settle("s1", Signal.EVALUATE)
    registry.admit("s1", "b", 0.0)
    assert kinds(attach(registry, "s1", "b")) == [Signal.STOP]


def test_a_late_join_of_a_session_that_has_left_does_not_bring_it_back(registry: Registry) -> None:
    registry.sites["s1"].has_left = True
    with pytest.raises(SessionLost, match="this process of s1 has left the run"):
        registry.admit("s1", "a", 1.0)
    assert registry.live(1.0) == [] and registry.sites["s1"].joins == 1
    assert registry.admit("s1", "b", 2.0) and registry.live(2.0) == ["s1"]


def test_only_the_present_session_attaches(registry: Registry) -> None:
    with pytest.raises(SessionLost, match="this session of s1 was replaced"):
        attach(registry, "s1", "other")
    for name in ("s2", "stranger"):
        with pytest.raises(SessionLost, match="has not joined this run"):
            attach(registry, name, "")
        registry.hear(name, "x", 1, 0.0)
        registry.drop(name, "x")


def test_another_site_sends_the_first_weights_where_the_first_to_join_is_lost(
    registry: Registry,
) -> None:
    registry.admit("s2", "b", 0.0)
    assert registry.first == "s1"
    signals = attach(registry, "s2", "b")
    registry.replace_first([], 0.0)
    assert registry.first == "s1" and kinds(signals) == []
    registry.replace_first(["s1"], 0.0)
    assert registry.first == "s2" and kinds(signals) == [Signal.SEND_INITIAL]
    registry.replace_first(["s1", "s2"], 0.0)
    assert registry.first == ""
    registry.replace_first(["s1"], 0.0)
    assert registry.first == "s2"
    # Once it joins anew, Welcome says it.
    registry.admit("s2", "c", 0.0)
    assert kinds(attach(registry, "s2", "c")) == []


def test_another_site_sends_the_first_weights_where_the_first_was_let_go_and_has_yet_to_join(
    registry: Registry,
) -> None:
    registry.admit("s2", "b", 0.0)
    registry.decide("eject", "s1", [], has_begun=True)
    registry.decide("admit", "s1", [], has_begun=True)
    registry.replace_first([], 0.0)
    assert registry.first == "s2"


def test_a_process_that_was_to_leave_does_not_come_back_with_its_site(registry: Registry) -> None:
    registry.decide("drain", "s1", [], has_begun=True)
    assert registry.release([]) == ["s1"]
    registry.decide("admit", "s1", [], has_begun=True)
    with pytest.raises(SessionLost, match="another process of s1 has joined"):
        registry.admit("s1", "a", 1.0)  # its Join, which the network held back
    assert registry.admit("s1", "b", 2.0) and registry.live(2.0) == ["s1"]


def test_while_nobody_could_be_heard_nobody_falls_silent(registry: Registry) -> None:
    registry.admit("s2", "b", 0.0)
    registry.hear("s1", "a", 1, 95.0)
    registry.excuse(90.0, 100.0)
    assert registry.live(100.0) == ["s1", "s2"] and registry.live(100.1) == ["s1"]
    registry.excuse(80.0, 200.0)
    assert registry.live(200.0) == [], "both were silent already when the halt began"


def test_initial_weights_are_measured_unasked_by_who_sent_them_alone_and_once(
    registry: Registry,
) -> None:
    registry.admit("s2", "b", 0.0)
    registry.opener = "s1"
    with pytest.raises(PayloadError, match="report on version 0, for which nobody asked s2"):
        registry.answer("s2", 0)
    assert [registry.answer("s1", 0) for _ in range(2)] == [True, False]


def test_of_earlier_versions_than_asked_one_report_is_taken(registry: Registry) -> None:
    registry.tell("s1", Signal.EVALUATE, version=9)
    assert [registry.answer("s1", version) for version in (4, 4, 5, 6)] == [True, *3 * [False]]
    registry.tell("s1", Signal.EVALUATE, version=11)
    assert registry.answer("s1", 9) and not registry.answer("s1", 10) and registry.answer("s1", 12)
    with pytest.raises(PayloadError, match="report on version 11, for which nobody asked s1"):
        registry.answer("s1", 11)
