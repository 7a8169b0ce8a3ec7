"""Merging contributions, by the roles of their tensors."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import permutations
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import Coded, plain
from fedwan.coordinator.merge import Merger
from fedwan.state import Layout, Role, State, clone
from tests.support import random_state, same_bits, spec

LAYOUT: Layout = {
    "g/bn.num_batches_tracked": spec((), Role.COUNTER, torch.int64),
    "g/bn.running_mean": spec((4,), Role.MEAN),
    "g/bn.running_var": spec((4,), Role.VARIANCE),
    "g/weight": spec((4, 3)),
}


def contribution(seed: int) -> State:
    return random_state(seed, LAYOUT)


def merge(
    states: Sequence[State], weights: Sequence[float] | None = None, layout: Layout = LAYOUT
) -> State:
    merger = Merger(layout)
    for state, weight in zip(states, weights or [1.0] * len(states), strict=True):
        merger.add(plain(state).items(), weight)
    return merger.take()


@pytest.mark.parametrize("weight", [1.0, 0.3, 7.0])
def test_a_single_contribution_comes_back_bit_for_bit(weight: float) -> None:
    merger = Merger(LAYOUT)
    for seed in (1, 2):  # which begins anew
        merger.add(plain(contribution(seed)).items(), weight)
        assert same_bits(merger.take(), contribution(seed))
    states = [contribution(seed) for seed in range(3)]
    mean = merge(states, [weight] * 3)["g/weight"]
    assert torch.equal(mean, torch.stack([s["g/weight"] for s in states]).sum(0) / 3)


def test_weights_are_those_of_the_samples_in_any_order_and_inputs_stay_as_they_are() -> None:
    states = [contribution(seed) for seed in range(3)]
    before = [clone(state) for state in states]
    weights = [1.0, 3.0, 0.5]
    expected = {
        name: (
            sum(w * s[name].double() for w, s in zip(weights, states, strict=True)) / 4.5
        ).float()
        for name in ("g/weight", "g/bn.running_mean")
    }
    pairs = list(zip(states, weights, strict=True))
    for order in permutations(pairs):
        merged = merge([state for state, _ in order], [weight for _, weight in order])
        for name, value in expected.items():
            torch.testing.assert_close(merged[name], value, rtol=1e-5, atol=1e-5)
    assert all(same_bits(a, b) for a, b in zip(states, before, strict=True))


@pytest.mark.parametrize(
    ("layout", "rows", "expected"),
    [
        ({"g/n": spec((), Role.COUNTER, torch.int64)}, [[5], [2**40 + 1], [7]], [2**40 + 1]),
        ({"g/seen": spec((), Role.COUNTER, torch.bool)}, [[True], [False]], [True]),
        ({"x/running_var": spec((), Role.VARIANCE)}, [[1.0], [3.0]], [2.0]),  # without its mean
        (
            {"g/seen": spec((), Role.MEAN, torch.float64), "g/w": spec(())},
            [[2.0**25 + 1, 1.0]] * 3,
            [2.0**25 + 1, 1.0],
        ),
    ],
)
def test_what_is_no_parameter_is_merged_by_its_role_and_keeps_its_bits(
    layout: Layout, rows: list[list[Any]], expected: list[Any]
) -> None:
    states = [
        {
            name: torch.tensor(v, dtype=layout[name].dtype)
            for name, v in zip(layout, row, strict=True)
        }
        for row in rows
    ]
    merged = merge(states, layout=layout)
    assert [value.item() for value in merged.values()] == expected
    assert [value.dtype for value in merged.values()] == [spec.dtype for spec in layout.values()]


@settings(deadline=None, max_examples=50)
@given(
    shards=st.lists(st.lists(st.floats(-1e3, 1e3), min_size=1, max_size=8), min_size=1, max_size=5),
    offset=st.sampled_from([0.0, 1e4]),
)
def test_pooled_variances_are_the_variance_of_the_union(
    shards: list[list[float]], offset: float
) -> None:
    values = [torch.tensor(shard, dtype=torch.float64) + offset for shard in shards]
    layout = {"bn.running_mean": spec((), Role.MEAN), "bn.running_var": spec((), Role.VARIANCE)}
    states = [
        {
            "bn.running_mean": shard.mean().float(),
            "bn.running_var": shard.var(correction=0).float(),
        }
        for shard in values
    ]
    merged = merge(states, [float(len(shard)) for shard in shards], layout)
    union = torch.cat(values)
    scale = float(union.abs().max()) + 1.0
    assert merged["bn.running_var"] >= 0
    torch.testing.assert_close(
        merged["bn.running_mean"].double(), union.mean(), rtol=0, atol=1e-6 * scale
    )
    # A mean in fp32 is off by 2^-24 of itself, which the spread of the means inherits.
    spread = float(union.std(correction=0)) + 1e-6 * scale
    torch.testing.assert_close(
        merged["bn.running_var"].double(),
        union.var(correction=0),
        rtol=1e-5,
        atol=4e-6 * scale * spread,
    )


def test_a_tensor_is_merged_from_those_who_have_it() -> None:
    layout = LAYOUT | {f"own/{seed}": spec((4, 3)) for seed in range(3)}
    merger = Merger(layout)
    for seed, weight in ((1, 0.7), (2, 0.3)):
        state = contribution(seed) | {f"own/{seed}": contribution(seed)["g/weight"]}
        merger.add(plain(state).items(), weight)
    merged = merger.take()
    assert "own/0" not in merged, "nobody has it"
    for seed in (1, 2):
        assert torch.equal(merged.pop(f"own/{seed}"), contribution(seed)["g/weight"])
    assert same_bits(merged, merge([contribution(1), contribution(2)], [0.7, 0.3]))


def test_only_means_and_variances_in_pairs_wait_for_the_end_of_a_contribution() -> None:
    moments = {"g/weight|exp_avg": Role.MEAN, "g/weight|exp_avg_sq": Role.VARIANCE}
    merger = Merger(LAYOUT | {name: spec((4, 3), role) for name, role in moments.items()})
    state = contribution(1) | {name: contribution(2)["g/weight"] for name in moments}

    def read() -> Iterator[tuple[str, Coded]]:
        yield from plain(state).items()
        assert state.keys() - merger._sums.keys() == {"g/bn.running_mean", "g/bn.running_var"}

    merger.add(read(), 3.0)
    assert same_bits(merger.take(), state)


def test_a_scale_shrinks_deltas_and_leaves_their_weight() -> None:
    merger = Merger(LAYOUT)
    merger.add(plain(contribution(1)).items(), 2.0, scale=0.5)
    merger.add(plain(contribution(2)).items(), 1.0)
    first, second = contribution(1)["g/weight"], contribution(2)["g/weight"]
    merged = merger.take()
    torch.testing.assert_close(merged["g/weight"], (2 * 0.5 * first + second) / 3)
    means = [contribution(seed)["g/bn.running_mean"] for seed in (1, 2)]
    torch.testing.assert_close(merged["g/bn.running_mean"], (2 * means[0] + means[1]) / 3)


@pytest.mark.parametrize("weight", [1.0, 0.25])
def test_statistics_that_are_kept_count_as_contributions_and_parameters_do_not(
    weight: float,
) -> None:
    merger = Merger(LAYOUT)
    merger.keep(contribution(3), 2.0)
    merger.add(plain(contribution(1)).items(), weight)
    merged = merger.take()
    assert same_bits({"g/weight": merged["g/weight"]}, {"g/weight": contribution(1)["g/weight"]})
    both = merge([contribution(3), contribution(1)], [2.0, weight])
    for name in ("g/bn.running_mean", "g/bn.running_var"):
        torch.testing.assert_close(merged[name], both[name])


def test_one_contribution_on_arrival_takes_no_counter_back() -> None:
    layout = {"g/n": spec((), Role.COUNTER, torch.int64)}
    merger, present = Merger(layout), torch.tensor(100)
    merger.keep({"g/n": present}, 1.0)
    merger.add(plain({"g/n": torch.tensor(60)}).items(), 1.0)
    assert int(merger.take()["g/n"]) == int(present) == 100
