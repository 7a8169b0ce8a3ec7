"""topk2: selection, packed indices, what is owed, and lies."""

from __future__ import annotations

import struct

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import topk2
from fedwan.codecs.topk2 import largest
from fedwan.errors import PayloadError
from tests.support import spec


def record(value: torch.Tensor) -> bytes:
    return bytes(topk2().encode_tensor(value.clone(), None)[0])


def random_values(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) ** 3


def test_the_two_magnitudes_are_the_best_of_all_ways_to_cut() -> None:
    value = random_values(4096)
    found = value.abs().sort(descending=True).values[:64].double()

    def error_of(cut: int) -> float:
        parts = (found[:cut], found[cut:])
        return sum(float((p - p.mean()).square().sum()) for p in parts if len(p))

    sent = topk2().read_tensor(record(value), spec(value.shape)).tensor()
    error = float((sent - value)[sent != 0].double().square().sum())
    best = min(error_of(cut) for cut in range(1, 65))
    assert error == pytest.approx(best, rel=0.05)  # the magnitudes are rounded to bf16


# Lies --------------------------------------------------------------------------------------------


def refusal(data: bytearray, num_values: int) -> str:
    with pytest.raises(PayloadError) as raised:
        topk2().read_tensor(bytes(data), spec((num_values,)))
    return str(raised.value)


def test_a_magnitude_that_is_negative_or_not_finite_is_refused() -> None:
    for which, bits in enumerate((0x7F80, 0x7FC0, -0x8000, -1)):
        data = bytearray(record(random_values(5000)))
        struct.pack_into("<h", data, 2 * which, bits)
        assert f"not finite (scale {which} of 4" in refusal(data, 5000)


@pytest.mark.parametrize(
    ("at", "value"), [(8, 0xFF), (8, 0x00), (8 + 80, 0x3F)], ids=["more", "fewer", "in the tail"]
)
def test_another_number_of_indices_is_refused(at: int, value: int) -> None:
    data = bytearray(record(random_values(5000)))
    assert data[at] != value
    data[at] = value
    assert "indices are not ascending or out of range" in refusal(data, 5000)


@pytest.mark.parametrize("last", [1, 3], ids=["twice", "beyond"])
def test_an_index_twice_or_beyond_a_short_chunk_is_refused(last: int) -> None:
    data = bytearray(record(torch.tensor([1.0, 2.0, 3.0])))
    data[5:8] = (0 | 1 << 6 | last << 12).to_bytes(3, "little")
    assert "chunks of 3 whose 3 indices are not ascending" in refusal(data, 3)


# Bits and selection ------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    shape=st.sampled_from([(1, 4096), (3, 4096), (2, 2048), (2, 8192), (5, 100), (1, 1)]),
    num_different=st.sampled_from([1, 2, 70, 10**6]),
)
def test_the_largest_are_those_that_topk_finds(
    seed: int, shape: tuple[int, int], num_different: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randint(num_different, shape, generator=generator).float()
    k = -(-shape[1] // 64)
    values, indices = largest(rows, k)
    assert torch.equal(values, rows.topk(k, 1).values)
    assert torch.equal(rows.gather(1, indices), values)
    assert all(len(set(row)) == k for row in indices.tolist())
