"""When a round closes."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.coordinator.policy import barrier

sites = st.integers(1, 20)
seconds = st.floats(0, 1e6)


@settings(deadline=None)
@given(sites, seconds)
def test_a_full_round_closes_at_once(num: int, elapsed: float) -> None:
    assert barrier(num, patience_s=10.0).decide(num, elapsed) == "close"


@settings(deadline=None)
@given(sites, st.integers(0, 19), seconds)
def test_without_a_quorum_a_round_closes_with_every_site_or_never(
    num: int, arrived: int, elapsed: float
) -> None:
    verdict = barrier(num, patience_s=10.0).decide(arrived, elapsed)
    assert (verdict == "close") == (arrived >= num)
    assert (verdict == "stop") == (arrived < num and elapsed >= 10.0)


@settings(deadline=None)
@given(sites, sites, st.integers(0, 20))
def test_a_quorum_is_asked_for_only_when_patience_is_over(num: int, quorum: int, seen: int) -> None:
    policy = barrier(num, quorum=min(quorum, num), patience_s=10.0)
    before, after = policy.decide(seen, 9.9), policy.decide(seen, 10.0)
    assert before == ("close" if seen >= num else "wait")
    assert after == ("close" if seen >= min(quorum, num) else "stop")


def test_a_round_never_closes_with_nothing() -> None:
    assert barrier(1, patience_s=0.0).decide(0, 1e9) == "stop"
