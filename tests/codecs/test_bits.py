"""Small numbers and ascending indices as bytes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fedwan.codecs.bits import pack, pack_ascending, unpack, unpack_ascending


@given(
    bits=st.sampled_from([1, 2, 6]),
    rows=st.integers(1, 3),
    count=st.integers(1, 70),
    seed=st.integers(0, 99),
)
def test_numbers_come_back(bits: int, rows: int, count: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    numbers = torch.randint(1 << bits, (rows, count), generator=generator)
    data = pack(numbers, bits)
    assert data.dtype == torch.uint8
    assert torch.equal(unpack(data, bits, count), numbers)


def test_six_bit_numbers_fill_bytes_from_the_lowest_bit_on() -> None:
    assert pack(torch.tensor([[1, 2, 3, 4]]), 6).tolist() == [[0x81, 0x30, 0x10]]


@given(data=st.data(), k=st.integers(1, 80))
def test_ascending_indices_come_back(data: st.DataObject, k: int) -> None:
    wanted = data.draw(st.sets(st.integers(0, 64 * k - 1), min_size=k, max_size=k))
    indices = torch.tensor([sorted(wanted), list(range(64 * k - k, 64 * k)), list(range(k))])
    upper, low = pack_ascending(indices)
    assert upper.shape[1] == -(-2 * k // 8) and low.shape[1] == 3 * -(-k // 4)
    back = unpack_ascending(upper, low, k)
    assert back is not None and torch.equal(back, indices)


@pytest.mark.parametrize("change", ["a bit more", "a bit less", "equal", "descending"])
def test_what_is_not_ascending_is_told(change: str) -> None:
    upper, low = pack_ascending(torch.tensor([[3, 5, 70, 130]]))
    if change == "a bit more":
        upper[0, 0] |= 0x80
    elif change == "a bit less":
        upper[0, 0] &= 0xFE
    elif change == "equal":
        low = pack(torch.tensor([[5, 5, 6, 2]]), 6)
    else:
        low = pack(torch.tensor([[5, 3, 6, 2]]), 6)
    assert unpack_ascending(upper, low, 4) is None
