"""What every codec must do, whatever its arithmetic."""

from __future__ import annotations

import math
import struct
import tracemalloc

import pytest
import torch
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from fedwan.codecs import (
    Codec,
    Coded,
    base,
    bf16,
    codec_by_name,
    fp32,
    int2,
    int4,
    int8,
    topk2,
    with_feedback,
)
from fedwan.config import CODECS as SETTINGS
from fedwan.errors import ConfigError, PayloadError, UserError
from fedwan.state import Layout, Role, State, TensorSpec, clone
from tests.support import StrictSource, other_defaults, read_all, same_bits, spec

CODECS = {codec.name: codec for codec in (fp32(), bf16(), int8(), int4(), int2(), topk2())}
ERROR = {
    "fp32": (0.0, 0.0),
    "bf16": (2.0**-8, 0.0),
    "int8": (0.0, 0.51 / 127),
    "int4": (0.0, 0.51 / 7),
    "int2": (1.0, 0.5),
    "topk2": (1.0, 1.0),  # what is not sent is 0; tests/codecs/test_topk2.py has the rest
}
"""Bound of the error, relative to the value and to the largest value of its tensor."""

every_codec = pytest.mark.parametrize("codec", CODECS.values(), ids=CODECS.keys())
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
    return read_all(codec.encode(clone(state), {}, layout)[0])  # which may spoil them


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


def test_a_codec_is_found_by_its_name_and_a_typo_is_told_the_nearest() -> None:
    assert [codec_by_name(name).name for name in SETTINGS[1:]] == [*CODECS]
    with pytest.raises(ConfigError, match="'int5' does not exist.*int4"):
        codec_by_name("int5")


# What goes in comes out --------------------------------------------------------------------------


@every_codec
def test_nothing_depends_on_what_a_script_has_made_torchs_default(codec: Codec) -> None:
    layout = {name: s for name, s in LAYOUT.items() if s.role is Role.PARAMETER}
    index, turned = torch.tensor([1, 5, 9]), torch.zeros(4, 3).t()

    def passed() -> tuple[list[bytes], State, State, State]:
        payload, owed = with_feedback(codec).encode(clone(STATE), {}, layout)
        picked = {n: c.pick(index) for n, c in codec.read_each(payload, layout) if n == "g/weight"}
        added = {"t": turned.clone()}
        next(c for n, c in codec.read_each(payload, layout) if n == "d/transposed").add_to(
            added["t"]
        )
        return [read_all(payload)], owed, codec.decode(payload, layout), picked | added

    expected = passed()
    for dtype in (torch.bfloat16, torch.float64):
        with other_defaults(dtype):
            found = passed()
        assert found[0] == expected[0] and all(map(same_bits, found[1:], expected[1:]))


@every_codec
def test_parameters_come_out_within_the_error_bound_and_buffers_bit_for_bit(codec: Codec) -> None:
    given = clone(STATE)
    payload, _ = codec.encode(given, {}, LAYOUT)
    decoded = codec.decode(payload, LAYOUT)
    assert list(decoded) == list(LAYOUT)
    for name, value in decoded.items():
        if LAYOUT[name].role is Role.PARAMETER:
            assert value.shape == STATE[name].shape and value.dtype == torch.float32
            size = STATE[name].float().abs()
            relative, to_peak = ERROR[codec.name]
            bound = relative * size + to_peak * (size.max() if size.numel() else 0.0)
            assert bool(((value - STATE[name].float()).abs() <= bound).all())
        else:
            assert same_bits({name: value}, {name: STATE[name]})
        value.zero_()  # the caller's own
    assert same_bits(given, STATE) or codec.has_feedback


@every_codec
def test_the_same_tensors_give_the_same_bytes_of_a_known_length(codec: Codec) -> None:
    for layout in ({}, LAYOUT, {"é/weight": spec((3,))}):
        state = {n: STATE.get(n, torch.zeros(3)) for n in layout}
        assert codec.payload_bytes(layout) == len(encode(codec, state, layout))
    assert encode(codec) == encode(codec, make_state())
    once = decode(codec, encode(codec))
    if codec.name != "int2":  # its scale is no value of the block
        assert same_bits(decode(codec, encode(codec, once)), once)


@every_codec
@settings(max_examples=25, deadline=None)
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
    base_value = torch.randn(shape, generator=generator)
    for weight in (1.0, 0.3):
        target = base_value.clone()
        coded.add_to(target, weight)
        assert torch.equal(target, base_value.clone().add_(decoded, alpha=weight))
    # Of another layout in memory, or dtype.
    for target in (torch.ones(*shape, 2)[..., 0], base_value.double()):
        expected = target.clone().add_(decoded.to(target.dtype), alpha=0.5)
        coded.add_to(target, 0.5)
        assert torch.equal(target, expected)
        coded.write_to(target)
        assert torch.equal(target, decoded.to(target.dtype))
    square = float(decoded.double().square().sum())
    assert coded.sum_of_squares() == pytest.approx(square, rel=1e-4)
    for places in (torch.arange(decoded.numel()), torch.arange(0, decoded.numel(), 37)):
        assert torch.equal(coded.pick(places), decoded.view(-1)[places])


@every_codec
def test_the_bytes_do_not_depend_on_how_many_values_are_worked_on_at_once(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    value = torch.randn(3, 20_011, generator=torch.Generator().manual_seed(2))
    layout = {"w": spec(value.shape)}
    results = set()
    for size in (1 << 14, 1 << 17):
        monkeypatch.setattr(base, "CPU_SPAN", size)
        data = encode(codec, {"w": value}, layout)
        ((_, coded),) = codec.read_each(StrictSource(data), layout)
        target = value.clone()
        coded.add_to(target, 0.7)
        results.add((data, target.numpy().tobytes()))
    assert len(results) == 1


@every_codec
def test_a_value_that_is_not_finite_survives_or_is_refused_when_it_is_read(codec: Codec) -> None:
    layout = {"w": spec((301,))}
    for at, value in ((0, math.nan), (127, math.inf), (300, -math.inf)):
        state = {"w": torch.ones(301)}
        state["w"][at] = value
        data = encode(codec, state, layout)
        if codec.name in ("fp32", "bf16"):
            decoded = decode(codec, data, layout)["w"]
            assert torch.equal(decoded.nan_to_num(7.0), state["w"].nan_to_num(7.0))
        else:
            text = refusal(codec, data, layout)
            assert text.startswith("tensor 'w' holds values that are not finite") and "clip" in text


def test_fp32_parameters_come_out_bit_for_bit_and_are_not_copied() -> None:
    assert fp32().is_exact
    bits = torch.randint(-(2**31), 2**31 - 1, (1000,), generator=torch.Generator().manual_seed(1))
    value, layout = bits.to(torch.int32).view(torch.float32), {"w": spec((1000,))}
    payload, _ = fp32().encode({"w": value}, {}, layout)
    decoded = fp32().decode(payload, layout)["w"]
    assert torch.equal(decoded.view(torch.int32), value.view(torch.int32))
    value[-1] = 1.0
    assert bytes(payload.read(payload.num_bytes - 12, 4)) == struct.pack("<f", 1.0)


def test_a_wrong_shape_and_a_dtype_that_cannot_travel_are_the_callers_error() -> None:
    with pytest.raises(ValueError, match=r"'w' has shape \(3,\), not \(2,\)"):
        int4().encode({"w": torch.zeros(3)}, {}, {"w": spec((2,))})
    layout = {"g/phases": spec((2,), Role.COUNTER, torch.complex64)}
    with pytest.raises(UserError, match="'g/phases' is torch.complex64"):
        int4().encode({"g/phases": torch.zeros(2, dtype=torch.complex64)}, {}, layout)


# Error feedback ----------------------------------------------------------------------------------


FED = [topk2(), int2(), with_feedback(int4()), with_feedback(bf16())]
every_codec_with_feedback = pytest.mark.parametrize("codec", FED, ids=lambda codec: codec.name)


@every_codec
def test_only_a_codec_with_error_feedback_owes_anything(codec: Codec) -> None:
    assert bool(codec.encode(clone(STATE), {}, LAYOUT)[1]) is codec.has_feedback
    fed = with_feedback(codec)
    assert fed.has_feedback is not codec.is_exact
    assert with_feedback(fed) is fed and (fed is codec) is (codec.is_exact or codec.has_feedback)
    assert fed.payload_bytes(LAYOUT) == codec.payload_bytes(LAYOUT)


@every_codec_with_feedback
def test_what_is_owed_is_what_was_not_decoded_and_decides_what_is_sent_next(codec: Codec) -> None:
    given = clone(STATE)
    payload, owed = codec.encode(given, {}, LAYOUT)
    decoded = codec.decode(payload, LAYOUT)
    assert list(owed) == [n for n, s in LAYOUT.items() if s.role is Role.PARAMETER]
    for name, residual in owed.items():
        assert residual.shape == STATE[name].shape and residual.dtype == torch.float32
        assert torch.equal(residual, STATE[name].float() - decoded[name])
        # No second copy of what is as it has to be.
        is_apt = given[name].is_contiguous() and given[name].dtype == torch.float32
        assert not residual.numel() or (residual.data_ptr() == given[name].data_ptr()) is is_apt
    before = clone(owed)
    assert read_all(codec.encode(clone(STATE), owed, LAYOUT)[0]) != encode(codec)
    assert same_bits(owed, before)


# Damage and lies ---------------------------------------------------------------------------------


@every_codec
def test_every_truncation_every_flipped_byte_and_stray_bytes_are_refused(codec: Codec) -> None:
    data = encode(codec)
    for at in range(len(data)):
        refusal(codec, data[:at])
        refusal(codec, data[:at] + bytes([data[at] ^ 0x01]) + data[at + 1 :])
    for extra in (1, 8, 1000):
        refusal(codec, data + bytes(extra))
        assert "padded" in refusal(codec, signed(data + bytes(extra)))


def test_another_version_layout_name_or_codec_is_refused_with_the_mend() -> None:
    data = encode(int4())
    assert "install the same fedwan" in refusal(int4(), signed(b"PK\x03\x04" + data[4:]))
    text = refusal(int4(), signed(data[:4] + b"\x02" + data[5:]))
    assert "version 2" in text and "version 1" in text
    for layout in (dict(list(LAYOUT.items())[:-1]), {**LAYOUT, "g/more": spec((1,))}, {}):
        assert "payload's table is not that" in refusal(int4(), data, layout)
    for name in (b"g/weighs", b"g/\xff\xfeight", b"d/fp16\0\0"):
        assert "15 tensors" in refusal(int4(), signed(data.replace(b"g/weight", name)))
    layout = {"w": spec((4,))}
    assert "same codecs" in refusal(bf16(), encode(fp32(), {"w": torch.ones(4)}, layout), layout)


LIES: dict[str, tuple[int, str, int]] = {
    "encoding raw": (0, "<B", 0),
    "encoding unknown": (0, "<B", 9),
    "dtype": (1, "<B", 2),
    "dtype unknown": (1, "<B", 200),
    "fewer dimensions": (2, "<B", 2),
    "255 dimensions": (2, "<B", 255),
    "larger": (3, "<I", 2**32 - 1),
    "record of nothing": (15, "<Q", 0),
    "record too long": (15, "<Q", 2**63),
}


@every_codec
def test_a_lying_header_or_table_is_refused_and_nothing_of_its_size_is_allocated(
    codec: Codec,
) -> None:
    data = encode(codec)
    at = entry_at(data, "g/weight")
    lies = [(at + offset, field, value) for offset, field, value in LIES.values()]
    lies += [(offset, "<I", value) for offset in (8, 12) for value in (0, 3, 1 << 28, 2**32 - 1)]
    lies += [(HEADER_BYTES, "<H", 65535), (entry_at(data, "n/running_mean"), "<B", codec.encoding)]
    refusal(codec, data[:40])  # whatever is imported or cached on first use
    tracemalloc.start()
    try:
        for offset, field, value in lies:
            lying = bytearray(data)
            struct.pack_into(field, lying, offset, value)
            refusal(codec, signed(lying))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 1 << 20


def test_a_codec_of_one_s_own_that_is_wrong_is_named_with_the_tensor() -> None:
    layout = {"net/w": TensorSpec((4,), torch.float32, Role.PARAMETER)}
    values = {"net/w": torch.ones(4)}

    def read(data: object, spec: TensorSpec) -> Coded:
        raise ValueError("bad scale")

    short = fp32()._replace(name="short", record_bytes=lambda spec: 8)
    with pytest.raises(UserError, match="codec short made 16 bytes of 'net/w', where .* says 8"):
        short.encode(values, {}, layout)
    deaf = fp32()._replace(name="deaf", read_tensor=read)
    payload, _ = deaf.encode(values, {}, layout)
    with pytest.raises(PayloadError, match="codec deaf cannot read 'net/w': ValueError: bad scale"):
        deaf.decode(payload, layout)
