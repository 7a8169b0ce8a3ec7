"""Payloads that are read while they are encoded."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedwan.codecs import Codec, GrowingPayload, bf16, float4, fp32, int4, int8, topk2
from fedwan.errors import FedwanError
from fedwan.state import Layout, Role, State
from tests.support import read_all, same_bits, spec

LAYOUT: Layout = {
    "g/a": spec((40, 128)),
    "g/b": spec((7,)),
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/w": spec((3, 1000)),
}

every_codec = pytest.mark.parametrize(
    "codec", [fp32(), bf16(), int8(), int4(), float4(), topk2()], ids=lambda codec: codec.name
)


def make_state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.tensor(5)
        if s.role is Role.COUNTER
        else torch.randn(s.shape, generator=generator)
        for name, s in LAYOUT.items()
    }


class Gated(Mapping[str, torch.Tensor]):
    """Tensors that are made only once somebody opens the gate in front of them."""

    def __init__(self, state: State) -> None:
        self._state = state
        self.gates = {name: threading.Event() for name in state}

    def __getitem__(self, name: str) -> torch.Tensor:
        assert self.gates[name].wait(30)
        return self._state[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._state)

    def __len__(self) -> int:
        return len(self._state)


@every_codec
def test_it_ends_as_the_payload_that_encode_makes(codec: Codec) -> None:
    state = make_state()
    payload, owed = codec.encode(state, {}, LAYOUT)
    growing = codec.grow(LAYOUT)
    assert growing.num_bytes == payload.num_bytes
    assert same_bits(codec.encode_into(growing, state, {}, LAYOUT), owed)
    assert read_all(growing) == read_all(payload)


@every_codec
def test_a_reader_decodes_each_tensor_before_the_next_one_is_made(codec: Codec) -> None:
    state = make_state()
    expected = codec.decode(codec.encode(state, {}, LAYOUT)[0], LAYOUT)
    gated, growing = Gated(state), codec.grow(LAYOUT)
    with ThreadPoolExecutor(1) as pool:
        encoding = pool.submit(codec.encode_into, growing, gated, {}, LAYOUT)
        try:
            reading = codec.read_each(growing, LAYOUT)
            for name in LAYOUT:
                assert not encoding.done()
                gated.gates[name].set()
                read, coded = next(reading)
                assert read == name
                assert same_bits({name: coded.tensor()}, {name: expected[name]})
            assert next(reading, None) is None  # the checksum holds
        finally:
            for gate in gated.gates.values():
                gate.set()
        encoding.result(30)


def test_reading_ahead_waits_for_the_bytes() -> None:
    codec, gated = int4(), Gated(make_state())
    growing = codec.grow(LAYOUT)
    with ThreadPoolExecutor(3) as pool:
        encoding = pool.submit(codec.encode_into, growing, gated, {}, LAYOUT)
        last = pool.submit(growing.read, growing.num_bytes - 8, 8)
        assert len(growing.read(0, 16)) == 16
        for gate in gated.gates.values():
            assert not last.done()
            gate.set()
        assert bytes(last.result(30)) == read_all(growing)[-8:]
        encoding.result(30)


def test_readers_are_told_that_encoding_failed_and_what_is_there_is_good() -> None:
    codec, state = int4(), make_state()
    payload, _ = codec.encode(state, {}, LAYOUT)
    state["g/b"] = torch.zeros(8)
    growing = codec.grow(LAYOUT)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(growing.read, growing.num_bytes - 8, 8)
        with pytest.raises(ValueError, match="'g/b' has shape"):
            codec.encode_into(growing, state, {}, LAYOUT)
        with pytest.raises(FedwanError, match=r"could not be encoded \(ValueError: 'g/b'"):
            waiting.result(30)
    with pytest.raises(FedwanError):
        growing.read(0, growing.num_bytes)
    there = codec.grow({}).num_bytes + codec.record_bytes(LAYOUT["g/a"])
    assert growing.read(0, there) == payload.read(0, there)


def test_two_attempts_are_told_apart() -> None:
    assert len({int4().grow(LAYOUT).checksum for _ in range(9)}) == 9


def test_records_that_are_missing_or_too_long_are_our_own_bug() -> None:
    growing = GrowingPayload(b"head....", 32)
    with pytest.raises(AssertionError, match="missing"):
        growing.finish()
    with pytest.raises(AssertionError, match="longer"):
        growing.append(bytes(100))
