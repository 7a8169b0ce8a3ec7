"""Copies into the same memory."""

from __future__ import annotations

import torch

from fedwan.site.host_copy import HostCopy


def test_a_copy_stays_as_it_is_while_the_state_moves_on() -> None:
    weight = torch.ones(3, requires_grad=True)
    copied = HostCopy().take({"weight": weight})["weight"]
    with torch.no_grad():
        weight.zero_()
    assert copied.tolist() == [1.0, 1.0, 1.0] and not copied.requires_grad


def test_the_next_copy_takes_the_same_memory_where_the_tensor_is_alike() -> None:
    copy = HostCopy()
    first = copy.take({"a": torch.zeros(3), "b": torch.zeros(3), "gone": torch.zeros(1)})
    second = copy.take({"a": torch.ones(3), "b": torch.ones(4)})
    assert second["a"].data_ptr() == first["a"].data_ptr()
    assert (second["a"].tolist(), second["b"].tolist()) == ([1.0] * 3, [1.0] * 4)
    assert set(second) == {"a", "b"}
