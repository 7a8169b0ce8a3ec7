"""The payload's bytes, as docs/wire.md shows them, and reading while they are made."""

from __future__ import annotations

import hashlib
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from fedwan.codecs import Codec, Payload, bf16, fp32, int4, int8, topk2
from fedwan.codecs.payload import tensor_from_bytes
from fedwan.errors import FedwanError
from fedwan.state import Layout, Role, State, clone
from tests.support import random_state, read_all, same_bits, spec

STATE = {"g/n": torch.tensor(3), "g/w": torch.tensor([1.0, -2.5])}
LAYOUT = {"g/n": spec((), Role.COUNTER, torch.int64), "g/w": spec((2,))}

CODECS = (fp32(), bf16(), int8(), int4(), topk2())

# Half of SHA-256, of the example's payload and the record of `long_value`, which has whole blocks
# and chunks and short ones.
GOLDEN = {
    "fp32": "261a709b8a70293f6235c3996eeafcc3",
    "bf16": "8a5f41c8b5123fbafd71d28f65167575",
    "int8": "a38ccd7204059059331fab133fd5cdb5",
    "int4": "7616c6bcdc54a183b6bc56482fd6519e",
    "topk2": "3356d3f2d44a6515f3d09d02be35a283",
}

every_codec = pytest.mark.parametrize("codec", CODECS, ids=lambda codec: codec.name)


def long_value() -> torch.Tensor:
    """9,001 values of many sizes, no two magnitudes alike, the same on every machine."""
    numbers = (torch.arange(9001) * 7919) % 9001 + 1
    return (numbers**3).float() * torch.where(numbers % 3 == 0, -1.0, 1.0)


@every_codec
def test_the_bytes_are_those_that_were_committed(codec: Codec) -> None:
    data = read_all(codec.encode(clone(STATE), {}, LAYOUT)[0])
    record, _ = codec.encode_tensor(long_value(), None)
    assert hashlib.sha256(data + bytes(record)).hexdigest()[:32] == GOLDEN[codec.name]


def test_the_documentation_shows_the_bytes_of_fp32() -> None:
    data = read_all(fp32().encode(STATE, {}, LAYOUT)[0])
    head = "4657504c0100000002000000240000000300672f6e0004000800000000000000"
    rest = "0300672f77010001020000000800000000000000000000000300000000000000"
    assert data.hex() == f"{head}{rest}0000803f000020c0880bf6757b93ef31"


def test_a_payload_of_several_buffers_reads_like_one() -> None:
    payload = Payload([b"", b"abc", b"", b"defg", b"h"])
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


class Gated(dict[str, torch.Tensor]):
    """Tensors that are made only once somebody opens the gate in front of them."""

    def __init__(self, state: State) -> None:
        super().__init__(state)
        self.gates = {name: threading.Event() for name in state}

    def __getitem__(self, name: str) -> torch.Tensor:
        assert self.gates[name].wait(30)
        return super().__getitem__(name)


@every_codec
def test_a_reader_decodes_each_tensor_before_the_next_one_is_made(codec: Codec) -> None:
    state = random_state(5, GROWN)
    payload, _ = codec.encode(clone(state), {}, GROWN)
    expected = codec.decode(payload, GROWN)
    gated, growing = Gated(state), codec.grow(GROWN)

    def encode() -> None:
        codec.encode_into(growing, gated, {}, GROWN)
        growing.finish()

    with ThreadPoolExecutor(2) as pool:
        encoding = pool.submit(encode)
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
    codec, state = int4(), random_state(5, GROWN)
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


def test_readers_are_told_of_a_payload_that_ends_too_early() -> None:
    growing = int4().grow(GROWN)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(growing.read, growing.num_bytes - 8, 8)
        with pytest.raises(AssertionError, match="not as long"):
            growing.finish()
        with pytest.raises(FedwanError, match="could not be encoded"):
            waiting.result(30)


def test_any_byte_but_0_is_true_and_a_bool_of_it_is_1() -> None:
    made = tensor_from_bytes(b"\x00\x02\xff\x01", torch.bool, (2, 2))
    assert made.view(torch.uint8).tolist() == [[0, 1], [1, 1]]


def test_the_checksum_tells_attempts_apart_and_is_of_the_bytes_where_they_are_known() -> None:
    assert len({int4().grow(GROWN).checksum for _ in range(9)}) == 9
    state = random_state(5, GROWN)
    payloads = [int4().encode(state, {}, GROWN)[0] for _ in range(2)]
    trailer = int.from_bytes(read_all(payloads[0])[-8:], "little")
    assert [payload.checksum for payload in payloads] == [trailer, trailer]
