"""Steps by measured speed."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from fedwan.coordinator.paces import Paces, balanced_steps
from fedwan.link import wire_pb2 as wire

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


def test_sites_of_one_speed_take_the_same_steps() -> None:
    assert set(balanced_steps({"a": 3.3, "b": 3.3}, 20, 1).values()) == {20}


def test_speeds_come_from_contributions_and_settle() -> None:
    paces = Paces(["a", "b"], 20, 1)
    assert paces.steps() == {}
    for _ in range(20):
        paces.note("a", wire.Work(steps=20, compute_s=1.0))
        paces.note("b", wire.Work(steps=20, compute_s=4.0))
    assert paces.steps() == {"a": 20, "b": 5}


def test_what_no_speed_can_be_told_from_is_left_aside() -> None:
    paces = Paces(["a"], 20, 1)
    for work in (wire.Work(), wire.Work(steps=5), wire.Work(steps=5, compute_s=float("nan"))):
        paces.note("a", work)
    paces.note("nobody", wire.Work(steps=1, compute_s=1.0))
    assert paces.steps() == {}


def test_without_a_least_every_site_takes_h() -> None:
    paces = Paces(["a"], 20, 0)
    paces.note("a", wire.Work(steps=20, compute_s=1.0))
    assert paces.steps() == {}
