"""How large a contribution may be."""

from __future__ import annotations

import json
import random

import pytest

from fedwan.protocol.gate import LEAST_ROUNDS, Gate, bound_of

SITES = 5


def fed(values: list[float], k: float = 20.0, sites: int = SITES, what: str = "g's norm") -> Gate:
    gate = Gate(k, sites)
    for value in values:
        gate.note(0, {what: value})
    return gate


def refuses(gate: Gate, value: float, fragment: int = 0, what: str = "g's norm") -> bool:
    return bool(gate.objection(fragment, "s1", {what: value}))


def test_nothing_is_refused_before_two_rounds_of_all_sites_are_merged() -> None:
    gate = fed([1.0] * (LEAST_ROUNDS * SITES - 1))
    assert not refuses(gate, 1e30)
    gate.note(0, {"g's norm": 1.0})
    assert refuses(gate, 1e30)
    assert not refuses(fed([1.0] * 7, sites=1), 1e30) and refuses(fed([1.0] * 8, sites=1), 1e30)


def test_before_that_a_round_s_own_are_compared_where_most_agree() -> None:
    gate = fed([1.0] * (LEAST_ROUNDS * SITES - 1))
    assert gate.is_warming(0) and not Gate(0.0, SITES).is_warming(0)

    def odd(*norms: float) -> list[int]:
        return list(gate.odd_ones([{"g's norm": norm} for norm in norms]))

    assert odd(1.0, 2.0, 1e6) == [2] == odd(1.0, 1.2, 30.1, 0.9, 1e-9, 1.1)
    assert odd(1.0, 1e6) == [] == odd(0.0, 0.0, 1.0) == odd(1.0, 2.0, 40.0)
    apart = [{"a": 1.0, "b": 1.0}, {"a": 1e6, "b": 1.0}, {"a": 1.0, "b": 1e6}]
    assert gate.odd_ones(apart) == {}, "there is no majority"
    assert gate.odd_ones([*apart, apart[0]]) == {}, "nor of half of them"
    (text,) = gate.odd_ones([{"g's norm": norm} for norm in (1.0, 1.0, 1e6)]).values()
    assert text.startswith("g's norm 1e+06 is above 20, 20 times the median of its round")
    gate.note(0, {"g's norm": 1.0})
    assert not gate.is_warming(0) and gate.is_warming(1)


def test_the_bound_is_median_plus_k_spreads_and_names_what_it_refuses() -> None:
    values = [1.0, 2.0, 3.0, 4.0, 100.0]
    assert bound_of(values, 10.0) == pytest.approx(3.0 + 10 * 1.4826)
    assert bound_of([4.0] * 9, 2.0) == 6.0
    liars = fed([1.0, 1.2, 0.9, 1e6, 1e6] * 4)
    assert refuses(liars, 1e6) and not refuses(liars, 1.5), "fewer than half cannot raise it"
    assert not refuses(fed([0.0] * 20), 1e-9), "what was 0 for a while may begin to move"
    text = fed([1.0] * 20).objection(0, "s1", {"d's norm": 1e9, "g's norm": 6.5})
    assert text.startswith("g's norm 6.5 is above 6, the most after a median of 1; lower that")
    assert "round.gate" in text and "\n" not in text


def test_it_follows_a_run_whose_contributions_shrink_or_grow() -> None:
    draw = random.Random(1)
    gate = Gate(20.0, SITES)
    for round_ in range(300):
        size = 0.98**round_ if round_ < 150 else 0.98**150 * 1.03 ** (round_ - 150)
        for _ in range(SITES):
            value = size * draw.uniform(0.7, 1.4)
            assert not refuses(gate, value)
            gate.note(0, {"g's norm": value})
        assert round_ < LEAST_ROUNDS or refuses(gate, 100 * size)


def test_fragments_and_figures_are_bounded_apart_and_nothing_where_k_is_0() -> None:
    gate = fed([1.0] * 20)
    assert refuses(gate, 50.0)
    assert not refuses(gate, 50.0, fragment=1) and not refuses(gate, 50.0, what="d's norm")
    assert not refuses(fed([1.0] * 20, k=0.0), 50.0)


def test_its_state_decides_alike_after_it_was_written_as_json() -> None:
    draw = random.Random(2)
    gate = fed([draw.uniform(0.1, 2.0) for _ in range(200)])
    again = Gate(20.0, SITES)
    again.load_state(json.loads(json.dumps(gate.state())))
    for each in (gate, again):
        each.note(0, {"g's norm": 1.5})
    assert again.state() == gate.state() and len(gate.state()["0:g's norm"]) == 80
    assert all(
        again.objection(0, "s1", {"g's norm": v}) == gate.objection(0, "s1", {"g's norm": v})
        for v in (1.0, 5.0, 10.0, 20.0)
    )


def test_where_most_sites_are_refused_together_they_are_compared_as_at_first() -> None:
    gate = fed([1e-4] * 20, k=50.0)
    for _ in range(9):  # one site, or two of five, cannot raise it
        assert gate.objection(0, "s1", {"g's norm": 1.0})
        assert gate.objection(0, "s2", {"g's norm": 1.0})
    assert not gate.is_warming(0)
    gate.note(0, {"g's norm": 1e-4})
    assert gate.objection(0, "s3", {"g's norm": 1.0}), "others were merged meanwhile"
    assert not gate.is_warming(0) and gate.objection(0, "s1", {"g's norm": 1.0})
    assert gate.objection(0, "s2", {"g's norm": 1.0}) and gate.is_warming(0)
    assert not gate.objection(0, "s3", {"g's norm": 1.0})
    assert list(gate.odd_ones([{"g's norm": norm} for norm in (1.0, 1.2, 0.9, 1e6)])) == [3]
    some = fed([1e-4] * 20, k=50.0)
    for site in ("s1", "s2", "s3", "s4"):  # two were accepted in this round
        assert some.objection(0, site, {"g's norm": 1.0}, 2)
    assert not some.is_warming(0)
    few = fed([1e-4] * 20, k=50.0, sites=2)
    for _ in range(9):  # of two nobody knows which is odd
        assert few.objection(0, "s1", {"g's norm": 1.0})
        assert few.objection(0, "s2", {"g's norm": 1.0})
