"""No single site decides what a run trains: those that agree do, and the others hear why not."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.state import Role, TensorSpec, layout_to_json

COUNTED = {"unet/z": TensorSpec((), torch.int64, Role.COUNTER)}
LAYOUT = {"unet/w": TensorSpec((2, 3), torch.float32, Role.PARAMETER)}
WIDER = {"unet/w": TensorSpec((2, 4), torch.float32, Role.PARAMETER)}
NAMES = ("s1", "s2", "s3", "s4")


def claim(**changes: Any) -> Claim:
    hello = wire.Hello(
        layout_json=layout_to_json(LAYOUT),
        kinds_json='{"unet": "regression"}',
        sources_json='{"strategy diloco": "' + "a" * 64 + '"}',
        num_steps=100,
        initial_sha256="1" * 64,
        frozen_sha256="f" * 64,
    )
    for name, value in changes.items():
        setattr(hello, name, value)
    return Claim.of(hello)


DIFFERENCES = [
    (
        {"layout_json": layout_to_json(WIDER)},
        "its tensor 'unet/w' is 2x4 float32, the run's 2x3 float32",
    ),
    (
        {"layout_json": layout_to_json(LAYOUT | COUNTED)},
        "its tensor 'unet/z' is a scalar int64, the run's no such tensor",
    ),
    ({"kinds_json": '{"unet": "adversarial"}'}, "{'unet': 'adversarial'}, the run's {'unet': 're"),
    ({"num_steps": 200}, "its number of steps is 200, the run's 100"),
    (
        {"frozen_sha256": "e" * 64},
        "its frozen networks hash to eeeeeeeeeeee, the run's ffffffffffff",
    ),
    (
        {"initial_sha256": "2" * 64},
        "its initial weights hash to 222222222222, the run's 111111111111",
    ),
    (
        {"sources_json": '{"strategy diloco": "' + "b" * 64 + '"}'},
        f"its strategy diloco is another one: SHA-256 {'b' * 12}, the run's {'a' * 12}; install",
    ),
    (
        {"sources_json": "{}"},
        "diloco is another one: SHA-256 nothing, the run's aaaa",
    ),
]


@pytest.mark.parametrize(("changes", "text"), DIFFERENCES)
def test_a_difference_names_what_differs_both_values_and_the_mend(
    changes: dict[str, Any], text: str
) -> None:
    told = claim().difference(claim(**changes))
    assert text in told and ";" in told and "\n" not in told
    assert claim().difference(claim()) == ""


@pytest.mark.parametrize(
    "changes",
    [
        {"layout_json": '{"a": 1'},
        {"layout_json": "[]"},
        {"kinds_json": "[1]"},
        {"kinds_json": "{"},
        {"kinds_json": '{"a": 3}'},
        {"sources_json": "7"},
    ],
)
def test_a_claim_that_cannot_be_read_is_refused(changes: dict[str, str]) -> None:
    with pytest.raises(PayloadError, match="cannot be read"):
        claim(**changes)


joins = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), max_size=12)


@settings(deadline=None, max_examples=300)
@given(joins, st.integers(1, 4))
def test_a_run_starts_only_when_as_many_sites_agree_as_it_asks_for(
    joins: Sequence[tuple[str, int]], needed: int
) -> None:
    agreement = Agreement(NAMES, needed)
    latest: dict[str, int] = {}
    for name, kind in joins:
        was = agreement.agreed
        refusal = agreement.hear(name, claim(num_steps=kind))
        latest[name] = kind
        votes = list(latest.values())
        majority = [k for k in votes if 2 * votes.count(k) > len(NAMES)]
        leading = majority if was is None else [was.num_steps]
        assert bool(refusal) == bool(leading and kind not in leading)
        if refusal:
            del latest[name]
            votes.remove(kind)
            assert "\n" not in refusal and name in refusal
        if was is not None:
            assert agreement.agreed == was, "once begun, nobody changes what the run is"
        elif agreement.agreed is not None:
            assert votes.count(agreement.agreed.num_steps) >= needed
        else:
            assert all(votes.count(k) < needed for k in votes)
        missing = [name for name in NAMES if name not in latest]
        nothing_comes = not (missing or majority or agreement.agreed)
        assert bool(agreement.dispute()) == nothing_comes
        told = f"{len(latest)} of 4 sites are here, not {', '.join(missing)}"
        assert agreement.waits_for() == (told if missing else "all sites are here")
        why = {name: f"{name} fails" for name in NAMES[:1]}
        assert (f"{NAMES[0]} ({NAMES[0]} fails)" in agreement.waits_for(why)) == (
            NAMES[0] in missing
        )
    assert json.loads(claim().sources_json)


def test_where_the_run_has_steps_of_its_own_a_script_s_are_not_compared() -> None:
    agreement = Agreement(NAMES, 2, has_steps=True)
    for site, steps in zip(NAMES, (100, 200), strict=False):
        assert not agreement.hear(site, agreement.claim(claim(num_steps=steps)))
    assert agreement.agreed == claim(num_steps=0)


def test_who_was_let_go_before_the_start_has_no_vote() -> None:
    agreement = Agreement(NAMES, 2)
    agreement.hear("s1", claim())
    agreement.expect(NAMES[1:])
    agreement.hear("s2", claim())
    assert agreement.agreed is None and agreement.missing() == ["s3", "s4"]
    agreement.hear("s3", claim())
    assert agreement.agreed == claim()
    left = Agreement(NAMES, len(NAMES))
    left.expect(NAMES[:1])
    left.hear("s1", claim())
    assert left.agreed == claim(), "nobody waits for more than there are"


def test_recipes_are_those_of_the_coordinator_even_where_all_sites_have_others() -> None:
    agreement = Agreement(NAMES, 2, {"strategy diloco": "b" * 64})
    for site in NAMES:
        hello = wire.Hello(site=site, session="a", protocol=PROTOCOL)
        assert f"SHA-256 {'a' * 12}, the run's {'b' * 12}" in agreement.join(site, hello, claim())
        mine = claim(sources_json='{"strategy diloco": "' + "b" * 64 + '"}')
        assert agreement.join(site, hello, mine) == ""


def test_equal_claims_are_one_object_whoever_makes_them() -> None:
    agreement = Agreement(NAMES, len(NAMES))
    for name in NAMES[:2]:
        agreement.hear(name, agreement.claim(claim()))
    assert len({*map(id, agreement._claims.values())}) == 1
    assert agreement.claim(other := claim(num_steps=7)) is other


def test_who_comes_back_with_a_checkpoint_may_have_loaded_other_weights_but_no_frozen_ones() -> (
    None
):
    agreement, other = Agreement(NAMES, 1), "2" * 64
    assert agreement.claim(claim(initial_sha256=other), 3) == claim(initial_sha256=other)
    agreement.hear("s1", claim())
    assert agreement.claim(claim(initial_sha256=other), 3) == claim()
    assert agreement.claim(claim(initial_sha256=other)) == claim(initial_sha256=other)
    frozen = agreement.claim(claim(initial_sha256=other, frozen_sha256=other), 3)
    assert "frozen networks hash to" in agreement.objection("s2", frozen)
