"""Fragments and their schedule."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from fedwan.fragments import Fragment, due_step, next_due, often, reached_step, rounds_done, strided
from fedwan.state import ema_name, layout_of, network_of
from tests.support import spec


@settings(deadline=None)
@given(h=st.integers(1, 50), offset=st.integers(0, 49), rounds=st.integers(1, 5))
def test_every_fragment_has_all_its_versions_by_the_last_step(
    h: int, offset: int, rounds: int
) -> None:
    fragment = Fragment(0, {}, offset % h)
    due = [due_step(fragment, version, h, rounds * h) for version in range(rounds)]
    assert due[-1] == rounds * h
    assert due[:-1] == [fragment.offset + h * k for k in range(1, rounds)]


def test_a_site_stands_where_its_latest_version_was_due_and_before_what_it_still_owes() -> None:
    fragments = [Fragment(index, {}, 2 * index) for index in range(3)]
    assert reached_step(fragments, [0, 0, 0], 6, 18) == 0
    assert reached_step(fragments, [2, 1, 1], 6, 18) == 12
    assert reached_step(fragments, [2, 2, 1], 6, 18) == 14
    assert reached_step(fragments, [3, 3, 3], 6, 18) == 18
    # A snapshot between two updates that are due after the same step.
    assert reached_step(fragments, [3, 3, 2], 6, 18) == 17
    both = [Fragment(0, {}), Fragment(1, {}, per_round=3)]
    assert reached_step(both, [1, 2], 6, 18) == 5
    assert reached_step(both, [1, 3], 6, 18) == 6
    assert reached_step(both, [1, 4], 6, 18) == 8


@settings(deadline=None)
@given(
    share=st.integers(1, 8),
    times=st.lists(st.integers(1, 3), max_size=3),
    count=st.integers(1, 4),
    rounds=st.integers(1, 4),
)
def test_rounds_are_taken_in_the_order_in_which_sites_send(
    share: int, times: list[int], count: int, rounds: int
) -> None:
    h = 6 * share
    fragments = [Fragment(index, {}, index * h // count) for index in range(count)]
    fragments += [Fragment(count + i, {}, per_round=k) for i, k in enumerate(times)]
    versions, order = [0] * len(fragments), []
    while any(v < rounds * f.per_round for f, v in zip(fragments, versions, strict=True)):
        chosen = next_due(fragments, versions, h, rounds)
        order.append(due_step(chosen, versions[chosen.index], h, rounds * h))
        versions[chosen.index] += 1
    assert order == sorted(order)
    assert versions == [rounds * f.per_round for f in fragments]
    assert rounds_done(fragments, versions) == rounds
    assert next_due(fragments[:1], [rounds], h, rounds) is fragments[0]


def test_networks_that_travel_often_are_fragments_of_their_own() -> None:
    layout = layout_of({n: deep(4) for n in ("generator", "discriminator", "critic")})
    fragments = often({"discriminator": 4, "critic": 4}, strided(2, 8))(layout)
    assert [(f.index, f.offset, f.per_round) for f in fragments] == [
        (0, 0, 1),
        (1, 4, 1),
        (2, 0, 4),
    ]
    assert {network_of(name) for f in fragments[:2] for name in f.layout} == {"generator"}
    assert {network_of(name) for name in fragments[2].layout} == {"discriminator", "critic"}
    assert sorted(n for f in fragments for n in f.layout) == list(layout)
    assert [f.steps(8) for f in fragments] == [8, 8, 2]


def deep(num_layers: int = 12) -> nn.Module:
    layers = (nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6)) for _ in range(num_layers))
    return nn.Sequential(*layers)


@pytest.mark.parametrize("count", [1, 2, 3, 5, 12])
def test_every_tensor_is_in_one_fragment_and_modules_stay_whole(count: int) -> None:
    layout = layout_of({"generator": deep(), "discriminator": deep(3)})
    fragments = strided(count, 24)(layout)
    assert [f.index for f in fragments] == list(range(count))
    assert [f.offset for f in fragments] == [24 * i // count for i in range(count)]
    names = [name for f in fragments for name in f.layout]
    assert sorted(names) == list(layout)
    home = {name: f.index for f in fragments for name in f.layout}
    for name in layout:
        module = name.rpartition(".")[0]
        siblings = {home[n] for n in layout if n.rpartition(".")[0] == module}
        assert siblings == {home[name]}
    assert all(f.layout for f in fragments)


def test_what_travels_beside_a_parameter_is_in_its_fragment() -> None:
    names = ["net/place", *(f"net/{index}.weight" for index in range(3))]
    layout = {name: spec((3, 3)) for each in names for name in (each, ema_name(each))}
    fragments = strided(4, 8)(dict(sorted(layout.items())))
    assert sorted(map(len, (f.layout for f in fragments))) == [2, 2, 2, 2]
    assert all(ema_name(min(f.layout)) == max(f.layout) for f in fragments)


def test_no_fragment_is_left_empty_by_tensors_without_values() -> None:
    layout = {f"net/{i}.weight": spec((3, num)) for i, num in enumerate((0, 0, 3))}
    assert all(f.layout for f in strided(3, 24)(layout))


def test_fragments_weigh_about_the_same_and_hold_parts_of_every_network() -> None:
    fragments = strided(5, 10)(layout_of({"generator": deep(40), "discriminator": deep(20)}))
    sizes = [f.num_bytes for f in fragments]
    assert max(sizes) <= 1.1 * min(sizes)
    for fragment in fragments:
        assert {network_of(name) for name in fragment.layout} == {"generator", "discriminator"}
