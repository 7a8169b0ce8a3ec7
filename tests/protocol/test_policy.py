"""When a round closes, and steps by measured speed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.link import wire_pb2 as wire
from fedwan.protocol.pace import Paces, balanced_steps
from fedwan.protocol.policy import RoundPolicy

sites = st.integers(1, 20)
seconds = st.floats(0, 1e6)


@settings(deadline=None)
@given(sites, sites, st.integers(0, 20))
def test_a_quorum_is_asked_for_only_when_patience_is_over(num: int, quorum: int, seen: int) -> None:
    policy = RoundPolicy(num, min(quorum, num), 10.0)
    before, after = policy.decide(seen, 9.9), policy.decide(seen, 10.0)
    assert before == ("close" if seen >= num else "wait")
    assert after == ("close" if seen >= min(quorum, num) else "stop")


past = st.lists(st.floats(0.01, 1e3), max_size=60)


@settings(deadline=None)
@given(sites, sites, st.integers(0, 20), seconds, past)
def test_a_deadline_never_closes_a_round_below_its_quorum(
    num: int, quorum: int, seen: int, elapsed: float, seconds_of_past: list[float]
) -> None:
    policy = RoundPolicy(num, min(quorum, num), 10.0, has_deadline=True)
    if policy.decide(seen, elapsed, seconds_of_past) == "close":
        assert seen >= min(num, policy.quorum)
    assert policy.deadline_s(seconds_of_past) <= 10.0


@settings(deadline=None)
@given(st.integers(1, 20), st.integers(0, 20), seconds)
def test_on_arrival_one_contribution_is_enough_while_a_quorum_is_there(
    quorum: int, live: int, elapsed: float
) -> None:
    verdict = RoundPolicy(20, quorum, patience_s=10.0, arrivals_from=0).decide(
        1, elapsed, num_live=live
    )
    assert (verdict == "close") == (live >= quorum)
    assert (verdict == "stop") == (live < quorum and elapsed >= 10.0)


# Paces ------------------------------------------------------------------------------------------

speeds = st.dictionaries(st.text("abc", min_size=1), st.floats(1e-3, 1e6), min_size=1)


@given(speeds, st.integers(1, 500), st.integers(1, 500))
def test_the_fastest_takes_h_and_nobody_more_or_fewer_than_the_least(
    measured: dict[str, float], h: int, least: int
) -> None:
    steps = balanced_steps(measured, h, least)
    assert max(steps.values()) == h
    assert min(steps.values()) >= min(least, h)
    fastest = max(measured, key=lambda site: measured[site])
    assert steps[fastest] == h


def test_speeds_come_from_contributions_and_settle() -> None:
    paces = Paces(20, 1)
    assert paces.steps("a") == 0
    for seconds in (0.0, float("nan"), 5e-324, 1e-307):
        paces.note("a", wire.Work(steps=5, compute_s=seconds))
        assert paces.steps("a") == 0, "no speed can be told from it"
    for _ in range(20):
        paces.note("a", wire.Work(steps=20, compute_s=1.0))
        paces.note("b", wire.Work(steps=20, compute_s=4.0))
    assert (paces.steps("a"), paces.steps("b")) == (20, 5)


def test_speed_is_that_of_the_steps_since_anything_left_and_of_sites_that_are_here() -> None:
    paces = Paces(20, 1, num_fragments=2)
    for step in (5, 10, 10, 15):  # two leave after step 10
        paces.note("s1", wire.Work(step=step, steps=10, compute_s=0.5 if step != 10 else 0.25))
    assert paces.usual() == pytest.approx(10, rel=0.5)
    paces = Paces(20, 1)
    for site, seconds in (("s1", 1.0), ("s2", 4.0)):
        paces.note(site, wire.Work(steps=20, compute_s=seconds))
    assert paces.steps("s2") == 5
    paces.keep(["s2"])
    assert paces.steps("s2") == 20 and paces.steps("s1") == 0


def test_the_first_fragment_after_a_resume_tells_no_speed() -> None:
    paces = Paces(20, 1, num_fragments=2)
    paces.note("s1", wire.Work(step=10_000, steps=10, compute_s=5.0))
    assert paces.usual() == 0
    paces.note("s1", wire.Work(step=10_010, steps=10, compute_s=5.0))
    assert paces.usual() == 2


def test_steps_that_a_site_skips_as_others_go_on_without_it_make_it_no_faster() -> None:
    paces = Paces(20, 1, num_fragments=2)
    for step in (10, 20, 30):
        paces.note("s1", wire.Work(step=step, steps=20, compute_s=5.0))
    paces.note("s1", wire.Work(step=10_000, steps=10, compute_s=5.0))
    assert paces.usual() == 2
