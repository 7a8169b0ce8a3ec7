"""What every codec must do, whatever its arithmetic."""

from __future__ import annotations

import math
import struct
import tracemalloc
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import Codec, bf16, float4, fp32, int4, int8, topk2
from fedwan.codecs import coded as coded_module
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, State, clone, read_tensors, write_tensors
from tests.support import StrictSource, read_all, same_bits, spec

CODECS = {codec.name: codec for codec in (fp32(), bf16(), int8(), int4(), float4(), topk2())}
ERROR = {
    "fp32": (0.0, 0.0),
    "bf16": (2.0**-8, 0.0),
    "int8": (0.0, 0.51 / 127),
    "int4": (0.0, 0.51 / 7),
    "float4": (0.35, 0.76 / 64),
    "topk2": (1.0, 1.0),  # what is not sent is 0; tests/codecs/test_topk2.py has the rest
}
"""Bound of the error, relative to the value and to the largest value of its tensor."""


def parametrize(codecs: Iterable[Codec]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize("codec", codecs, ids=lambda codec: codec.name)


every_codec = parametrize(CODECS.values())
every_float_codec = parametrize([fp32(), bf16()])
every_scaled_codec = parametrize([c for n, c in CODECS.items() if n not in ("fp32", "bf16")])
every_codec_without_feedback = parametrize([c for c in CODECS.values() if not c.has_feedback])
every_codec_with_feedback = parametrize([c for c in CODECS.values() if c.has_feedback])

HEADER_BYTES = 16


def make_state() -> State:
    generator = torch.Generator().manual_seed(5)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    return {
        "d/bf16": normal(5).bfloat16(),
        "d/empty": normal(0, 3),
        "d/fp16": normal(3).half(),
        "d/transposed": normal(4, 3).t(),
        "g/every_second": normal(8)[::2],
        "g/scalar": normal(1)[0],
        "g/weight": normal(3, 2, 2),
        "n/bool": torch.tensor([True, False, True]),
        "n/counter": torch.tensor(12345678901),
        "n/double": normal(2).double() / 3,
        "n/half": normal(2).half(),
        "n/int16": torch.tensor([-7, 300], dtype=torch.int16),
        "n/none": torch.zeros(0),
        "n/running_mean": normal(2),
        "n/running_var": normal(4).square()[::2],
    }


def layout_of_state(state: State) -> Layout:
    roles = {"n/running_var": Role.VARIANCE, "n/counter": Role.COUNTER, "n/bool": Role.COUNTER}
    roles |= {"n/int16": Role.COUNTER}
    return {
        name: spec(
            value.shape,
            roles.get(name, Role.MEAN if name.startswith("n/") else Role.PARAMETER),
            value.dtype,
        )
        for name, value in state.items()
    }


STATE = make_state()
LAYOUT = layout_of_state(STATE)


def encode(codec: Codec, state: State = STATE, layout: Layout = LAYOUT) -> bytes:
    return read_all(codec.encode(state, {}, layout)[0])


def decode(codec: Codec, data: bytes, layout: Layout = LAYOUT) -> State:
    return codec.decode(StrictSource(data), layout)


def signed(data: bytes | bytearray) -> bytes:
    """The same bytes with a checksum that fits them: what a hostile sender would send."""
    return bytes(data[:-8]) + struct.pack("<Q", xxhash.xxh3_64_intdigest(bytes(data[:-8])))


def refusal(codec: Codec, data: bytes, layout: Layout = LAYOUT) -> str:
    """The one line that refuses a payload."""
    with pytest.raises(PayloadError) as raised:
        decode(codec, data, layout)
    text = str(raised.value)
    assert "\n" not in text and len(text) < 600
    return text


def entry_at(data: bytes, name: str) -> int:
    """Where a tensor's entry in the table goes on after its name: encoding, dtype, dimensions."""
    return data.index(struct.pack("<H", len(name)) + name.encode()) + 2 + len(name)


# What goes in comes out --------------------------------------------------------------------------


@every_codec
def test_parameters_come_out_as_fp32_of_the_same_shape_within_the_error_bound(
    codec: Codec,
) -> None:
    decoded = decode(codec, encode(codec))
    assert list(decoded) == list(LAYOUT)
    for name, value in decoded.items():
        if LAYOUT[name].role is Role.PARAMETER:
            assert value.shape == STATE[name].shape and value.dtype == torch.float32
            size = STATE[name].float().abs()
            relative, to_peak = ERROR[codec.name]
            bound = relative * size + to_peak * (size.max() if size.numel() else 0.0)
            assert bool(((value - STATE[name].float()).abs() <= bound).all())


@every_codec
def test_buffers_come_out_bit_for_bit_in_their_own_dtype(codec: Codec) -> None:
    decoded = decode(codec, encode(codec))
    buffers = [name for name, s in LAYOUT.items() if s.role is not Role.PARAMETER]
    assert same_bits({n: decoded[n] for n in buffers}, {n: STATE[n] for n in buffers})


@every_codec
def test_inputs_are_not_mutated_and_decoded_tensors_are_the_callers_own(codec: Codec) -> None:
    before = clone(STATE)
    payload, _ = codec.encode(STATE, {}, LAYOUT)
    for value in codec.decode(payload, LAYOUT).values():
        value.zero_()
    assert same_bits(STATE, before)


@every_codec
def test_the_length_is_known_before_any_tensor_is(codec: Codec) -> None:
    for layout in ({}, LAYOUT, {"é/weight": spec((3,))}):
        state = {n: STATE.get(n, torch.zeros(3)) for n in layout}
        payload, _ = codec.encode(state, {}, layout)
        assert codec.payload_bytes(layout) == payload.num_bytes == len(read_all(payload))


@every_codec
def test_the_same_tensors_give_the_same_bytes(codec: Codec) -> None:
    assert encode(codec) == encode(codec, make_state())


@every_codec
def test_what_was_decoded_encodes_to_itself(codec: Codec) -> None:
    once = decode(codec, encode(codec))
    assert same_bits(decode(codec, encode(codec, once)), once)


@every_codec_without_feedback
def test_a_codec_without_error_feedback_owes_nothing(codec: Codec) -> None:
    assert codec.encode(STATE, {}, LAYOUT)[1] == {}


@every_codec_with_feedback
def test_what_is_owed_has_the_shape_of_its_tensor_and_is_what_was_not_decoded(
    codec: Codec,
) -> None:
    payload, owed = codec.encode(STATE, {}, LAYOUT)
    decoded = codec.decode(payload, LAYOUT)
    assert list(owed) == [n for n, s in LAYOUT.items() if s.role is Role.PARAMETER]
    for name, residual in owed.items():
        assert residual.shape == STATE[name].shape and residual.dtype == torch.float32
        assert torch.equal(residual, STATE[name].float() - decoded[name])


@every_codec_with_feedback
def test_a_residual_is_not_mutated_and_decides_what_is_sent_next(codec: Codec) -> None:
    _, owed = codec.encode(STATE, {}, LAYOUT)
    before = clone(owed)
    first = read_all(codec.encode(STATE, owed, LAYOUT)[0])
    assert same_bits(owed, before)
    assert first != encode(codec)
    assert first == read_all(codec.encode(STATE, before, LAYOUT)[0])


@every_codec_with_feedback
def test_a_sender_that_resumes_from_a_checkpoint_goes_on_bit_for_bit(
    codec: Codec, tmp_path: Path
) -> None:
    owed: State = {}
    for _ in range(3):
        _, owed = codec.encode(STATE, owed, LAYOUT)
    write_tensors(tmp_path / "owed", owed, {})
    resumed, _ = read_tensors(tmp_path / "owed")
    for _ in range(3):
        payload, owed = codec.encode(STATE, owed, LAYOUT)
        again, resumed = codec.encode(STATE, resumed, LAYOUT)
        assert read_all(payload) == read_all(again)
        assert same_bits(owed, resumed)


@every_codec
@settings(max_examples=60, deadline=None)
@given(
    shape=st.lists(st.integers(0, 40), max_size=4).filter(lambda shape: math.prod(shape) < 5000),
    exponent=st.integers(-30, 30),
    seed=st.integers(0, 99),
)
def test_every_shape_and_size_comes_out_alike_in_every_way_of_reading(
    codec: Codec, shape: list[int], exponent: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    value = torch.randn(shape, generator=generator) ** 3 * 2.0**exponent
    layout = {"w": spec(shape)}
    payload, _ = codec.encode({"w": value}, {}, layout)
    assert payload.num_bytes == codec.payload_bytes(layout)
    ((_, coded),) = codec.read_each(payload, layout)
    decoded = coded.tensor()
    assert decoded.shape == value.shape and decoded.dtype == torch.float32
    written = torch.full(shape, 7.0)
    coded.write_to(written)
    assert torch.equal(written, decoded)
    base = torch.randn(shape, generator=generator)
    for weight in (1.0, 0.3):
        target = base.clone()
        coded.add_to(target, weight)
        assert torch.equal(target, base.clone().add_(decoded, alpha=weight))
    square = float(decoded.double().square().sum())
    assert coded.sum_of_squares() == pytest.approx(square, rel=1e-4)
    for places in (torch.arange(decoded.numel()), torch.arange(0, decoded.numel(), 37)):
        assert torch.equal(coded.pick(places), decoded.view(-1)[places])


@every_codec
def test_a_target_of_another_layout_in_memory_or_dtype_is_reached_too(codec: Codec) -> None:
    value = torch.randn(6, 40, generator=torch.Generator().manual_seed(1))
    layout = {"w": spec(value.shape)}
    payload, _ = codec.encode({"w": value}, {}, layout)
    ((_, coded),) = codec.read_each(payload, layout)
    decoded = coded.tensor().clone()
    for target in (torch.ones(40, 6).t(), torch.ones(6, 80)[:, ::2], torch.ones(6, 40).double()):
        expected = target.clone().add_(decoded.to(target.dtype), alpha=0.5)
        coded.add_to(target, 0.5)
        assert torch.equal(target, expected)
        coded.write_to(target)
        assert torch.equal(target, decoded.to(target.dtype))


@every_codec
def test_the_bytes_do_not_depend_on_how_many_values_are_worked_on_at_once(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(3, 20_011, generator=torch.Generator().manual_seed(2))
    layout = {"w": spec(value.shape)}
    results = set()
    for size in (1 << 14, 1 << 15, 1 << 17):
        monkeypatch.setattr(coded_module, "CPU_SPAN", size)
        data = encode(codec, {"w": value}, layout)
        ((_, coded),) = codec.read_each(StrictSource(data), layout)
        target = value.clone()
        coded.add_to(target, 0.7)
        results.add((data, target.numpy().tobytes()))
    assert len(results) == 1


@every_scaled_codec
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("at", [0, 127, 128, 300])
def test_a_value_that_is_not_finite_is_refused_when_it_is_read(
    codec: Codec, value: float, at: int
) -> None:
    state = {"w": torch.ones(301)}
    state["w"][at] = value
    layout = {"w": spec((301,))}
    text = refusal(codec, encode(codec, state, layout), layout)
    assert text.startswith("tensor 'w' holds values that are not finite") and "clip" in text


@every_float_codec
def test_special_values_survive(codec: Codec) -> None:
    value = torch.tensor([0.0, -0.0, float("inf"), float("-inf"), float("nan"), 2.0**-126])
    layout = {"w": spec((6,))}
    decoded = decode(codec, encode(codec, {"w": value}, layout), layout)["w"]
    assert torch.equal(decoded.signbit()[:4], value.signbit()[:4])
    assert torch.equal(decoded.nan_to_num(7.0), value.nan_to_num(7.0))


@every_codec
def test_a_wrong_shape_is_the_callers_error(codec: Codec) -> None:
    with pytest.raises(ValueError, match=r"'w' has shape \(3,\), not \(2,\)"):
        codec.encode({"w": torch.zeros(3)}, {}, {"w": spec((2,))})


@every_codec
def test_a_dtype_that_cannot_travel_is_named(codec: Codec) -> None:
    value = torch.zeros(2, dtype=torch.complex64)
    layout = {"g/phases": spec((2,), Role.COUNTER, torch.complex64)}
    with pytest.raises(ValueError, match="'g/phases' is torch.complex64"):
        codec.encode({"g/phases": value}, {}, layout)


@every_codec
def test_reading_in_any_pieces_gives_the_same_bytes(codec: Codec) -> None:
    payload, _ = codec.encode(STATE, {}, LAYOUT)
    whole = read_all(payload)
    for size in (1, 7, 64, len(whole)):
        pieces = [
            bytes(payload.read(at, min(size, len(whole) - at))) for at in range(0, len(whole), size)
        ]
        assert b"".join(pieces) == whole
    assert bytes(payload.read(len(whole), 0)) == b""


# Damage ------------------------------------------------------------------------------------------


@every_codec
def test_every_truncation_is_refused(codec: Codec) -> None:
    data = encode(codec)
    for length in range(len(data)):
        refusal(codec, data[:length])


@every_codec
def test_a_flipped_byte_anywhere_is_refused(codec: Codec) -> None:
    data = encode(codec)
    for at in range(len(data)):
        for mask in (0x01, 0xFF):
            refusal(codec, data[:at] + bytes([data[at] ^ mask]) + data[at + 1 :])


@every_codec
def test_stray_bytes_behind_a_payload_are_refused(codec: Codec) -> None:
    data = encode(codec)
    for extra in (1, 8, 1000):
        refusal(codec, data + bytes(extra))
        refusal(codec, signed(data + bytes(extra)))


@every_codec
def test_another_magic_or_version_is_refused_with_the_mend(codec: Codec) -> None:
    data = encode(codec)
    assert "install the same fedwan" in refusal(codec, signed(b"PK\x03\x04" + data[4:]))
    text = refusal(codec, signed(data[:4] + b"\x02" + data[5:]))
    assert "version 2" in text and "version 1" in text


@every_codec
def test_a_layout_with_more_or_fewer_tensors_is_refused(codec: Codec) -> None:
    data = encode(codec)
    fewer = dict(list(LAYOUT.items())[:-1])
    refusal(codec, data, fewer)
    refusal(codec, data, {**LAYOUT, "g/more": spec((1,))})
    refusal(codec, data, {})


@every_codec
@pytest.mark.parametrize(
    ("offset", "field", "value"),
    [(8, "<I", 0), (8, "<I", 3), (8, "<I", 2**32 - 1), (12, "<I", 0), (12, "<I", 2**32 - 1)],
)
def test_a_lying_header_is_refused(codec: Codec, offset: int, field: str, value: int) -> None:
    data = bytearray(encode(codec))
    struct.pack_into(field, data, offset, value)
    refusal(codec, signed(data))


LIES: dict[str, tuple[int, str, int]] = {
    "encoding raw": (0, "<B", 0),
    "encoding unknown": (0, "<B", 9),
    "dtype": (1, "<B", 2),
    "dtype unknown": (1, "<B", 200),
    "fewer dimensions": (2, "<B", 2),
    "more dimensions": (2, "<B", 4),
    "255 dimensions": (2, "<B", 255),
    "smaller": (3, "<I", 2),
    "larger": (3, "<I", 2**32 - 1),
    "record of nothing": (15, "<Q", 0),
    "record too short": (15, "<Q", 1),
    "record too long": (15, "<Q", 2**63),
    "record as large as can be": (15, "<Q", 2**64 - 1),
}


@every_codec
@pytest.mark.parametrize("lie", LIES.values(), ids=LIES.keys())
def test_a_lying_table_is_refused(codec: Codec, lie: tuple[int, str, int]) -> None:
    data = bytearray(encode(codec))
    offset, field, value = lie
    struct.pack_into(field, data, entry_at(bytes(data), "g/weight") + offset, value)
    refusal(codec, signed(data))


@every_codec
def test_records_whose_sizes_lie_by_as_much_are_refused(codec: Codec) -> None:
    layout = {"a": spec((2048,)), "b": spec((2048,))}
    data = bytearray(encode(codec, {name: torch.ones(2048) for name in layout}, layout))
    size = codec.record_bytes(layout["a"])
    for name, wrong in (("a", size - 8), ("b", size + 8)):
        struct.pack_into("<Q", data, entry_at(bytes(data), name) + 3 + 4, wrong)
    assert "bytes, expected" in refusal(codec, signed(data), layout)


@every_codec
@pytest.mark.parametrize("name", [b"g/weighs", b"g/\xff\xfeight", b"d/fp16\0\0"])
def test_another_name_is_refused(codec: Codec, name: bytes) -> None:
    data = encode(codec).replace(b"g/weight", name)
    refusal(codec, signed(data))


@every_codec
def test_a_name_as_long_as_can_be_makes_a_short_refusal(codec: Codec) -> None:
    name = "\n" * 60000
    data = encode(codec, {name: torch.ones(2)}, {name: spec((2,))})
    refusal(codec, data, {"w": spec((2,))})


@every_codec
def test_a_name_longer_than_the_table_is_refused(codec: Codec) -> None:
    data = bytearray(encode(codec))
    struct.pack_into("<H", data, HEADER_BYTES, 65535)
    refusal(codec, signed(data))


@every_codec
def test_a_tensor_named_twice_is_refused(codec: Codec) -> None:
    layout = {"ga": spec((2,)), "gb": spec((2,))}
    data = encode(codec, {"ga": torch.ones(2), "gb": torch.ones(2)}, layout)
    assert "twice" in refusal(codec, signed(data.replace(b"gb", b"ga", 1)), layout)


@every_codec
def test_a_buffer_in_the_codecs_encoding_is_refused(codec: Codec) -> None:
    data = bytearray(encode(codec))
    data[entry_at(bytes(data), "n/running_mean")] = codec.encoding
    assert "role" in refusal(codec, signed(data))


def test_another_codecs_payload_is_refused_with_the_mend() -> None:
    layout = {"w": spec((4,))}
    data = encode(fp32(), {"w": torch.ones(4)}, layout)
    assert "set the same codec on both sides" in refusal(bf16(), data, layout)


def test_a_bool_is_0_or_1_whatever_byte_arrives() -> None:
    layout = {"n/bool": spec((3,), Role.COUNTER, torch.bool)}
    data = bytearray(encode(fp32(), {"n/bool": torch.tensor([True, False, True])}, layout))
    data[-16] = 0x80
    decoded = decode(fp32(), signed(data), layout)["n/bool"]
    assert bytes(decoded.view(torch.uint8).numpy()) == b"\1\0\1"


@every_codec
@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_whatever_is_signed_is_decoded_to_the_layout_or_refused(
    codec: Codec, data: st.DataObject
) -> None:
    changed = bytearray(encode(codec))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(changed) - 9))
        changed[at] = data.draw(st.integers(0, 255))
    try:
        decoded = decode(codec, signed(changed))
    except PayloadError:
        return
    assert {n: tuple(v.shape) for n, v in decoded.items()} == {
        n: s.shape for n, s in LAYOUT.items()
    }


@every_codec
@settings(max_examples=100, deadline=None)
@given(data=st.binary(max_size=200))
def test_noise_is_refused(codec: Codec, data: bytes) -> None:
    refusal(codec, data)
    refusal(codec, signed(b"FWPL\1\0\0\0" + data + bytes(24)))


@every_codec
def test_nothing_of_the_size_that_is_claimed_is_allocated(codec: Codec) -> None:
    claims: list[Callable[[bytearray, int], None]] = [
        lambda data, at: struct.pack_into("<Q", data, at + 15, 1 << 40),
        lambda data, at: struct.pack_into("<I", data, at + 3, 1 << 31),
        lambda data, at: struct.pack_into("<I", data, 8, 1 << 20),
        lambda data, at: struct.pack_into("<I", data, 12, 1 << 28),
    ]
    refusal(codec, encode(codec)[:40])  # whatever is imported or cached on first use
    tracemalloc.start()
    try:
        for claim in claims:
            data = bytearray(encode(codec))
            claim(data, entry_at(bytes(data), "g/weight"))
            refusal(codec, signed(data))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20
