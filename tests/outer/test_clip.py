"""Clipping the merged delta."""

from __future__ import annotations

import torch

from fedwan.outer import clip_by_norm


def test_a_larger_norm_is_cut_to_the_limit_over_all_tensors_together() -> None:
    update, _ = clip_by_norm(1.0).update({"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}, {})
    torch.testing.assert_close(update, {"a": torch.tensor([0.6]), "b": torch.tensor([0.8])})


def test_a_smaller_norm_is_left_as_it_is() -> None:
    delta = {"a": torch.tensor([3.0]), "b": torch.tensor([4.0])}
    update, _ = clip_by_norm(5.1).update(delta, {})
    assert torch.equal(update["a"], delta["a"]) and torch.equal(update["b"], delta["b"])


def test_zeros_stay_zeros() -> None:
    update, _ = clip_by_norm(1.0).update({"a": torch.zeros(3)}, {})
    assert torch.equal(update["a"], torch.zeros(3))


def test_it_is_not_per_tensor() -> None:
    assert not clip_by_norm(1.0).per_tensor
