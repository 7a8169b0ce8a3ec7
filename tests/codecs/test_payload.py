"""The payload's bytes, as docs/wire.md shows them, and reading while they are made."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedwan.codecs import Codec, Payload, bf16, float4, fp32, int4, int8, topk2
from fedwan.errors import FedwanError
from fedwan.state import Layout, Role, State
from tests.support import StrictSource, read_all, same_bits, spec

STATE = {"g/n": torch.tensor(3), "g/w": torch.tensor([1.0, -2.5])}
LAYOUT = {"g/n": spec((), Role.COUNTER, torch.int64), "g/w": spec((2,))}

CODECS = (fp32(), bf16(), int8(), int4(), float4(), topk2())

# Made by:
# python -c "from tests.codecs.test_payload import *; print(*map(hex_of, CODECS))"
_HEAD = "4657504c0100000002000000240000000300672f6e0004000800000000000000"
GOLDEN = {
    "fp32": f"{_HEAD}0300672f77010001020000000800000000000000000000000300000000000000"
    "0000803f000020c0880bf6757b93ef31",
    "bf16": f"{_HEAD}0300672f77020001020000000400000000000000000000000300000000000000"
    "803f20c0000000000f23ec9415fe4881",
    "int8": f"{_HEAD}0300672f77030001020000000400000000000000000000000300000000000000"
    "a13c338100000000b628d11ab9234fac",
    "int4": f"{_HEAD}0300672f77040001020000000300000000000000000000000300000000000000"
    "b73e930000000000dd542f494184d242",
    "float4": f"{_HEAD}0300672f77050001020000000300000000000000000000000300000000000000"
    "2040f6000000000098cb441a8865fa70",
    "topk2": f"{_HEAD}0300672f77060001020000000900000000000000000000000300000000000000"
    "803f2040034000000c0000000000000011396d09d6d2e368",
}
DECODED = {
    "fp32": [1.0, -2.5],
    "bf16": [1.0, -2.5],
    "int8": [51 * 161 * 2.0**-13, -127 * 161 * 2.0**-13],
    "int4": [3 * 183 * 2.0**-9, -7 * 183 * 2.0**-9],
    "float4": [1.25, -2.5],
    "topk2": [1.0, -2.5],
}
# SHA-256 of the record of `long_value`, which has whole blocks and chunks and short ones.
LONG = {
    "fp32": "eec30e881ec50e8c10e6c9b452d7fdc674669c3a7c67035cd21470f1cbd63646",
    "bf16": "e79263b09912fd4892364015e804bb9397d0c7850c42069e9d68e90871303770",
    "int8": "5281e89a18cea83b0056e4a359bbaf0e59a0270f5777003920cb98e339d706be",
    "int4": "683436b1f2d4c4cadae8a7453a19eeecb522b0bc85a2f11746a14132a43fc52f",
    "float4": "047c285a9f8832278d78bb2b7cd12af38ac2fb9d08af06871fcbd954ed9d2cf1",
    "topk2": "4023afdab4ccd7c5428923d90b2c54b06f2f28751a206be56ee6dccbf69a2fc2",
}

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def hex_of(codec: Codec) -> str:
    """The example's payload."""
    return read_all(codec.encode(STATE, {}, LAYOUT)[0]).hex()


def long_value() -> torch.Tensor:
    """9,001 values of many sizes, no two magnitudes alike, the same on every machine."""
    numbers = (torch.arange(9001) * 7919) % 9001 + 1
    return (numbers**3).float() * torch.where(numbers % 3 == 0, -1.0, 1.0)


@every_codec
def test_the_bytes_are_those_that_were_committed_and_are_still_read(codec: Codec) -> None:
    assert hex_of(codec) == GOLDEN[codec.name]
    data, _ = codec.encode_tensor(long_value(), None)
    assert hashlib.sha256(data).hexdigest() == LONG[codec.name]
    payload = StrictSource(bytes.fromhex(GOLDEN[codec.name]))
    expected = STATE | {"g/w": torch.tensor(DECODED[codec.name])}
    assert same_bits(codec.decode(payload, LAYOUT), expected)


def test_a_payload_of_several_buffers_reads_like_one() -> None:
    payload = Payload([b"", b"abc", b"", b"defg", b"h"], 0)
    whole = b"abcdefgh"
    assert payload.num_bytes == len(whole)
    for begin in range(len(whole) + 1):
        for end in range(begin, len(whole) + 1):
            assert bytes(payload.read(begin, end - begin)) == whole[begin:end]


# While it is encoded -----------------------------------------------------------------------------


GROWN: Layout = {
    "g/a": spec((40, 128)),
    "g/b": spec((7,)),
    "g/n": spec((), Role.COUNTER, torch.int64),
    "g/w": spec((3, 1000)),
}


def grown_state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {
        name: torch.tensor(5)
        if s.role is Role.COUNTER
        else torch.randn(s.shape, generator=generator)
        for name, s in GROWN.items()
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
def test_a_reader_decodes_each_tensor_before_the_next_one_is_made(codec: Codec) -> None:
    state = grown_state()
    payload, _ = codec.encode(state, {}, GROWN)
    expected = codec.decode(payload, GROWN)
    gated, growing = Gated(state), codec.grow(GROWN)
    with ThreadPoolExecutor(2) as pool:
        encoding = pool.submit(codec.encode_into, growing, gated, {}, GROWN)
        last = pool.submit(growing.read, growing.num_bytes - 8, 8)
        try:
            reading = codec.read_each(growing, GROWN)
            for name in GROWN:
                assert not encoding.done() and not last.done()
                gated.gates[name].set()
                read, coded = next(reading)
                assert read == name
                assert same_bits({name: coded.tensor()}, {name: expected[name]})
            assert next(reading, None) is None  # the checksum holds
        finally:
            for gate in gated.gates.values():
                gate.set()
        assert bytes(last.result(30)) == read_all(payload)[-8:]
    assert read_all(growing) == read_all(payload)


def test_readers_are_told_that_encoding_failed_and_what_is_there_is_good() -> None:
    codec, state = int4(), grown_state()
    payload, _ = codec.encode(state, {}, GROWN)
    state["g/b"] = torch.zeros(8)
    growing = codec.grow(GROWN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(growing.read, growing.num_bytes - 8, 8)
        with pytest.raises(ValueError, match="'g/b' has shape"):
            codec.encode_into(growing, state, {}, GROWN)
        with pytest.raises(FedwanError, match=r"could not be encoded \(ValueError: 'g/b'"):
            waiting.result(30)
    there = codec.grow({}).num_bytes + codec.record_bytes(GROWN["g/a"])
    assert growing.read(0, there) == payload.read(0, there)


def test_the_checksum_tells_attempts_apart_and_is_of_the_bytes_where_they_are_known() -> None:
    assert len({int4().grow(GROWN).checksum for _ in range(9)}) == 9
    state = grown_state()
    payloads = [int4().encode(state, {}, GROWN)[0] for _ in range(2)]
    trailer = int.from_bytes(read_all(payloads[0])[-8:], "little")
    assert [payload.checksum for payload in payloads] == [trailer, trailer]
