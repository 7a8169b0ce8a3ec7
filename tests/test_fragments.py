"""Fragments and their schedule."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.fragments import Fragment, is_due, whole
from fedwan.state import Role
from tests.support import spec


def test_whole_holds_every_tensor_of_every_network_in_name_order() -> None:
    layout = {"g/b": spec((2,)), "d/a": spec((1,)), "g/a": spec(())}
    (fragment,) = whole(layout)
    assert (fragment.index, fragment.offset) == (0, 0)
    assert list(fragment.layout.items()) == sorted(layout.items())


def test_bytes_count_parameters_in_fp32_and_buffers_as_they_are() -> None:
    layout = {
        "g/half": spec((3,), dtype=torch.bfloat16),
        "g/mean": spec((2,), Role.MEAN, torch.float64),
        "g/n": spec((), Role.COUNTER, torch.int64),
        "g/none": spec((0,)),
    }
    assert whole(layout)[0].num_bytes == 3 * 4 + 2 * 8 + 8


@settings(deadline=None)
@given(h=st.integers(1, 50), offset=st.integers(0, 49), rounds=st.integers(1, 5))
def test_a_fragment_is_due_once_in_every_h_steps(h: int, offset: int, rounds: int) -> None:
    fragment = Fragment(0, {}, offset % h)
    due = [step for step in range(1, rounds * h + fragment.offset + 1) if is_due(fragment, step, h)]
    assert due == [fragment.offset + h * k for k in range(1, rounds + 1)]


def test_a_fragment_cannot_be_changed() -> None:
    with pytest.raises(AttributeError):
        whole({})[0].index = 1  # type: ignore[misc]
