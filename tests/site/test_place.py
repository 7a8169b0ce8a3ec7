"""Where a site goes on that rounds went on without."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.policy import RoundPolicy
from fedwan.site.checkpoint import Ledger, Residuals
from fedwan.site.group import Group
from fedwan.site.meter import Work
from fedwan.site.place import Place
from fedwan.site.stub import is_merged
from tests.support import same_bits, spec

PER_S = 10.0
"""Steps of the site."""


def make(versions: list[int], *, has_deadline: bool = True) -> Any:
    """Two fragments that leave after steps 10 and 15, 20 and 25, …"""
    place: Any = Place.__new__(Place)
    place.strategy = SimpleNamespace(h=10, policy=RoundPolicy(4, 3, has_deadline=has_deadline))
    place.replica = SimpleNamespace(group=Group())
    place.meter = SimpleNamespace(speed=lambda: PER_S)
    place.fragments = [Fragment(0, {}), Fragment(1, {}, offset=5)]
    place.versions, place.num_steps, place.keeps_pace = versions, 1000, False
    place._others = (0, 0.0)
    return place


@pytest.mark.parametrize(
    ("others", "flying", "expected"),
    [
        (0, (), 31),  # nothing was said
        (25, (), 31),  # it is ahead of them
        (33, (), 33),
        (38, (), 34),  # the second fragment is due after step 35
        (38, (1,), 38),
        (99, (0, 1), 44),  # the second one's next: after 45; the first one is due after 50
        (99, (1,), 39),
    ],
)
def test_it_goes_on_where_the_others_are_but_contributes_first(
    others: int, flying: tuple[int, ...], expected: int
) -> None:
    place = make([3, 2])
    place.note_others(wire.Receipt(status=wire.Receipt.STALE, others_step=others))
    assert place.ahead(31, flying) == expected
    assert place.ahead(31, flying) == 31, "what was said is heeded once"


def test_others_have_gone_on_since_it_was_said() -> None:
    place = make([3, 3])
    place._others = (31, time.monotonic() - 0.55)
    assert place.ahead(31) == 36


def test_nobody_is_skipped_for_where_rounds_wait_for_all() -> None:
    place = make([3, 2], has_deadline=False)
    place.note_others(wire.DownloadHeader(others_step=33))
    assert place.ahead(31) == 31


def test_what_has_all_its_versions_is_not_sent_again_with_what_was_missed() -> None:
    """Of a site that has started over right before the end."""
    place = make([100, 99])
    assert [fragment.index for fragment in place.due(1000, (), ())] == [1]
    assert [fragment.index for fragment in make([99, 98]).due(1000, (1,), (1,))] == [0, 1]


def at_its_own_pace(version: int, load: Callable[..., Ledger | None]) -> Any:
    """One fragment; H = 10."""
    place: Any = Place.__new__(Place)
    vars(place).update(
        strategy=SimpleNamespace(owes="residual", h=10),
        replica=SimpleNamespace(adopt=lambda: None),
        hook=SimpleNamespace(on_adopt=lambda: None),
        meter=SimpleNamespace(total=Work(0, 0)),
        checkpoints=SimpleNamespace(load=load, versions=list),
        fragments=[Fragment(0, {"net/w": spec((2,))})],
        residuals=Residuals(1),
        versions=[version],
        num_steps=1000,
        _anew={},
        has_gradients=False,
        keeps_pace=True,
        follows=False,
        is_behind=False,
        is_exact=False,
        can_repeat=False,
        is_mirrored=False,
    )
    return place


@pytest.mark.parametrize(
    ("version", "usable", "merged", "expected"),
    [
        (7, 7, (6, 7), "after"),
        (9, 8, (7, 9), "after"),  # others' were merged before it
        (6, 7, (5, 6), "before"),  # it has left, or not
        (8, 7, (5, 6), "before"),  # it was dropped
        (9, 6, (7, 9), ""),  # another one has paid
        (6, 7, (0, 0), "before"),  # the coordinator is new, and its weights are of before
        (7, 7, (0, 0), "after"),
    ],
)
def test_at_a_pace_of_its_own_a_site_owes_on_what_was_not_merged(
    version: int, usable: int, merged: tuple[int, int], expected: str
) -> None:
    before, after = ({"net/w": torch.full((2,), value)} for value in (1.0, 2.0))
    ledger = Ledger(before, after, Work(4, 16), (usable,))
    place = at_its_own_pace(version, lambda *_: ledger)
    start, into = merged
    place._stand_at(wire.DownloadHeader(merged_from=start, merged_into=into), version, usable)
    owed = {"before": before, "after": after, "": {}}[expected]
    assert same_bits(place.residuals.of(place.fragments[0]), owed)
    assert place.residuals.ledger(Work(0, 0)).versions == (version,)


@pytest.mark.parametrize(("merged", "expected"), [((6, 7), 2.0), ((5, 6), 1.0), ((0, 0), 2.0)])
def test_behind_a_barrier_a_site_owes_on_what_was_not_merged_if_that_is_known(
    merged: tuple[int, int], expected: float
) -> None:
    before, after = ({"net/w": torch.full((2,), value)} for value in (1.0, 2.0))
    place = at_its_own_pace(7, lambda *_: Ledger(before, after, Work(4, 16), (7,)))
    place.keeps_pace = False
    start, into = merged
    place._stand_at(wire.DownloadHeader(merged_from=start, merged_into=into), 7, 7)
    assert place.residuals.of(place.fragments[0])["net/w"].tolist() == [expected] * 2


def test_a_site_that_comes_back_takes_the_steps_that_it_is_told_at_once() -> None:
    place = at_its_own_pace(7, lambda *_: None)
    place._fetch = lambda _: wire.DownloadHeader(versions=[7], steps=3, run_step=40)
    assert place.find([7], 40) == (40, False)
    assert (place.steps, place.run_step) == (3, 40)


def test_a_contribution_is_in_a_version_if_it_or_a_later_one_is_in_that_or_one_before() -> None:
    told = wire.DownloadHeader(merged_from=3, merged_into=5)
    assert all(is_merged(told, start, into) for start, into in ((3, 5), (2, 5), (3, 6)))
    assert not is_merged(told, 4, 5) and not is_merged(told, 3, 4)
    assert not is_merged(wire.DownloadHeader(), 0, 5), "nothing of it was ever merged"
