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
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.state import Role, TensorSpec, layout_to_json

LAYOUT = {"unet/w": TensorSpec((2, 3), torch.float32, Role.PARAMETER)}
WIDER = {"unet/w": TensorSpec((2, 4), torch.float32, Role.PARAMETER)}
COUNTED = {"unet/z": TensorSpec((), torch.int64, Role.COUNTER)}
NAMES = ("s1", "s2", "s3", "s4", "s5")


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
        {
            "layout_json": layout_to_json(
                LAYOUT | {"unet/z": TensorSpec((), torch.int64, Role.COUNTER)}
            )
        },
        "its tensor 'unet/z' is a scalar int64, the run's no such tensor",
    ),
    ({"kinds_json": '{"unet": "adversarial"}'}, "{'unet': 'adversarial'}, the run's {'unet': 're"),
    ({"num_steps": 200}, "its script asks for 200 steps, the run's for 100"),
    (
        {"frozen_sha256": "e" * 64},
        "its frozen networks hash to eeeeeeeeeeee, the run's to ffffffffffff",
    ),
    (
        {"initial_sha256": "2" * 64},
        "its initial weights hash to 222222222222, the run's to 111111111111",
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


def test_a_site_that_differs_from_a_majority_is_refused_and_the_others_go_on() -> None:
    agreement = Agreement(("s1", "s2", "s3"), needed=2)
    assert agreement.hear("s2", claim(initial_sha256="2" * 64)) == ""
    assert agreement.waits_for() == "1 of 3 sites are here, not s1, s3"
    assert agreement.hear("s1", claim()) == "" and agreement.agreed is None
    assert agreement.hear("s3", claim()) == "" and agreement.agreed == claim()
    refusal = agreement.hear("s2", claim(initial_sha256="2" * 64))
    assert refusal.startswith("site s2: its initial weights hash to 2222")
    assert agreement.dispute() == ""


def test_of_two_sites_that_differ_nobody_decides() -> None:
    agreement = Agreement(("s1", "s2"), needed=2)
    assert agreement.hear("s2", claim()) == ""
    assert agreement.dispute() == ""
    assert agreement.hear("s1", claim(num_steps=7)) == ""
    assert agreement.agreed is None
    assert agreement.dispute().startswith("s2 differs from s1: its script asks for 100 steps")


joins = st.lists(st.tuples(st.sampled_from(NAMES), st.integers(0, 2)), max_size=12)


@settings(deadline=None)
@given(joins, st.integers(1, 5))
def test_a_run_starts_only_when_as_many_sites_agree_as_it_asks_for(
    joins: Sequence[tuple[str, int]], needed: int
) -> None:
    agreement = Agreement(NAMES, needed)
    latest: dict[str, int] = {}
    for name, kind in joins:
        was = agreement.agreed
        refusal = agreement.hear(name, claim(num_steps=kind))
        latest[name] = kind
        if refusal:
            del latest[name]
            assert "\n" not in refusal and name in refusal
        votes = list(latest.values())
        if was is not None:
            assert agreement.agreed == was, "once begun, nobody changes what the run is"
            assert bool(refusal) == (kind != was.num_steps)
        elif agreement.agreed is not None:
            assert votes.count(agreement.agreed.num_steps) >= needed
        else:
            assert all(votes.count(k) < needed for k in votes)
        majority = [k for k in votes if 2 * votes.count(k) > len(NAMES)]
        assert not (agreement.dispute() and (majority or agreement.agreed))
    assert json.loads(claim().sources_json)
