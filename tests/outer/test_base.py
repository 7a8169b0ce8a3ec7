"""Composition."""

from __future__ import annotations

import torch

from fedwan.outer import chain, clip_by_norm, nesterov, sgd
from fedwan.state import State
from tests.support import same_bits


def deltas() -> list[State]:
    generator = torch.Generator().manual_seed(3)
    return [{"w": torch.randn(6, generator=generator)} for _ in range(5)]


def test_chain_is_one_after_the_other() -> None:
    clip, outer = clip_by_norm(1.0), nesterov(0.7, 0.9)
    both = chain(clip, outer)
    params = {"w": torch.zeros(6)}
    by_hand, together = outer.init(params), both.init(params)
    for delta in deltas():
        clipped, _ = clip.update(delta, {})
        expected, by_hand = outer.update(clipped, by_hand)
        update, together = both.update(delta, together)
        assert same_bits(update, expected)


def test_a_transform_may_stand_in_a_chain_twice() -> None:
    twice = chain(nesterov(1.0, 0.5), nesterov(-1.0, 0.9))
    assert sorted(twice.init({"w": torch.zeros(1)})) == ["0:momentum:w", "1:momentum:w"]


def test_a_chain_of_one_is_that_one() -> None:
    for delta in deltas():
        alone, _ = sgd(0.3).update(delta, {})
        assert same_bits(chain(sgd(0.3)).update(delta, {})[0], alone)


def test_a_chain_is_per_tensor_only_if_all_its_parts_are() -> None:
    assert chain(sgd(1.0), nesterov(1.0, 0.5)).per_tensor
    assert not chain(sgd(1.0), clip_by_norm(1.0)).per_tensor
