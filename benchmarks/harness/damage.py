"""Payloads that a site with a certificate could send: damaged by a seed, with a checksum that fits.

Each begins as a good one, and has one to three of its parts changed: bits and bytes, numbers at the
ends of their range in one place or all over a tensor, parts cut out, doubled, or put where another
tensor's are; seldom it is one of another layout or codec. Most changes are to what is coded, since
a table that differs is refused by its first difference.
"""

from __future__ import annotations

import random
import struct
from collections.abc import Callable
from typing import NamedTuple

import torch
import xxhash

from fedwan.codecs import Codec, codec_by_name, fp32
from fedwan.codecs.masked import KeyStreams, bind, first_sizes
from fedwan.state import Layout, Role, State, TensorSpec

SITES = 3
TRAILER_BYTES = 8
"""At the end of a payload: its XXH3-64."""
SPECS: Layout = {
    "d/bias": TensorSpec((5,), torch.bfloat16, Role.PARAMETER),
    "d/empty": TensorSpec((0, 3), torch.float32, Role.PARAMETER),
    "d/scalar": TensorSpec((), torch.float32, Role.PARAMETER),
    "g/bn.num_batches_tracked": TensorSpec((), torch.int64, Role.COUNTER),
    "g/bn.running_mean": TensorSpec((3,), torch.float32, Role.MEAN),
    "g/bn.running_var": TensorSpec((3,), torch.float32, Role.VARIANCE),
    "g/fine.running_mean": TensorSpec((2,), torch.float64, Role.MEAN),
    "g/fine.running_var": TensorSpec((2,), torch.float64, Role.VARIANCE),
    "g/half": TensorSpec((3,), torch.float16, Role.MEAN),
    "g/long": TensorSpec((600,), torch.float32, Role.PARAMETER),
    "g/mask": TensorSpec((3,), torch.bool, Role.COUNTER),
    "g/short": TensorSpec((3, 7), torch.float32, Role.PARAMETER),
    "g/short|exp_avg_sq": TensorSpec((3, 7), torch.float32, Role.VARIANCE),
    "g/short|step": TensorSpec((), torch.float32, Role.COUNTER),
}
"""Every role; blocks that are full and such that are not."""
LAYOUTS = tuple(
    {name: spec for name, spec in SPECS.items() if name.startswith(prefixes)}
    for prefixes in (
        ("d/bias", "g/bn"),
        ("d/empty", "d/scalar", "g/half", "g/long", "g/mask"),
        ("g/fine", "g/short"),
    )
)
"""Few tensors each: a payload has one to three places damaged, and all else takes time."""
LONG = {"topk2": 4100}
"""Values of `g/long` for codecs whose blocks are longer."""


def _numbers() -> list[bytes]:
    """Ends of ranges, as integers and floats of all widths."""
    found = [bytes([value]) for value in (0, 1, 127, 128, 255)]
    for code, bits in (("H", 16), ("I", 32), ("Q", 64)):
        ends = (0, 1, 2 ** (bits - 1) - 1, 2 ** (bits - 1), 2**bits - 1)
        found += [struct.pack(f"<{code}", value) for value in ends]
    values = (float("nan"), float("inf"), -float("inf"), -0.0, -1.0, 1e-40, 1.8e19, -1.8e19, 3e38)
    for dtype in (torch.bfloat16, torch.float16, torch.float32, torch.float64):
        each = torch.tensor([*values, -3e38, 1e300], dtype=dtype).view(torch.uint8)
        found += [bytes(one.numpy()) for one in each.view(-1, dtype.itemsize)]
    return found


NUMBERS = _numbers()


class Good(NamedTuple):
    """A payload to begin with."""

    codec: Codec
    layout: Layout
    data: bytes
    parts: list[tuple[int, int]]
    """Where the table and each tensor's record begin and end."""


def good_payload(codec_name: str, specs: Layout = LAYOUTS[1], seed: int = 0) -> Good:
    """One of a codec, of values as deltas have them; under masks of parameters alone."""
    codec = codec_by_name(codec_name, SITES)
    layout = {
        name: spec
        for name, spec in specs.items()
        if spec.role is Role.PARAMETER or not codec.mask_bits
    }
    if "g/long" in layout and codec_name in LONG:
        layout["g/long"] = layout["g/long"]._replace(shape=(LONG[codec_name],))
    values = values_of(layout, seed)
    writer = codec
    if codec.mask_bits:
        sizes = memoryview(first_sizes(layout)).cast("H")
        writer = bind(codec, SITES, sizes.tolist(), KeyStreams([bytes(16)]))
    payload, _ = writer.encode(values, {}, layout)
    data = bytes(payload.read(0, payload.num_bytes))
    sizes_of = [codec.record_bytes(spec) if spec.role is Role.PARAMETER else
                spec.num_values * spec.dtype.itemsize for spec in layout.values()]  # fmt: skip
    padded = [size + -size % 8 for size in sizes_of]
    at = len(data) - TRAILER_BYTES - sum(padded)
    parts = [(0, at)]
    for size, room in zip(sizes_of, padded, strict=True):
        parts.append((at, at + size))
        at += room
    return Good(codec, layout, data, parts)


def values_of(layout: Layout, seed: int) -> State:
    """Of a site that does not lie."""
    generator = torch.Generator().manual_seed(seed)

    def draw(spec: TensorSpec) -> torch.Tensor:
        if spec.role is Role.COUNTER:
            return torch.ones(spec.shape, dtype=spec.dtype)
        value = torch.randn(spec.shape, generator=generator, dtype=torch.float64)
        return (value.square() if spec.role is Role.VARIANCE else value).to(spec.dtype)

    return {name: draw(spec) for name, spec in layout.items()}


# Changes, in place, of data from one place to another --------------------------------------------


def _flip(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(begin, end)] ^= 1 << rng.randrange(8)


def _replace(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    first = rng.randrange(begin, end)
    size = min(rng.randint(1, 16), end - first)
    data[first : first + size] = rng.randbytes(size)


def _number(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    number = rng.choice(NUMBERS)
    if len(number) <= end - begin:
        first = begin + rng.randrange((end - begin) // len(number)) * len(number)
        data[first : first + len(number)] = number


def _fill(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    number = rng.choice(NUMBERS)
    count = (end - begin) // len(number)
    data[begin : begin + count * len(number)] = number * count


def _take(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    first, last = rng.choice(good.parts)
    size = min(end - begin, last - first)
    data[begin : begin + size] = good.data[first : first + size]


def _cut(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    first = rng.randrange(begin, end)
    size = rng.choice((1, 8, end - first, len(data) - first))
    del data[first : first + size]
    if rng.random() < 0.7:  # what follows is in the wrong place, and the length as it was
        data[-TRAILER_BYTES:-TRAILER_BYTES] = bytes(max(0, len(good.data) - len(data)))


def _double(rng: random.Random, data: bytearray, begin: int, end: int, good: Good) -> None:
    data[end:end] = data[begin:end]
    if rng.random() < 0.7:
        del data[len(good.data) - TRAILER_BYTES : -TRAILER_BYTES]


Change = Callable[[random.Random, bytearray, int, int, Good], None]
CHANGES: tuple[Change, ...] = (_flip, _replace, _number, _fill, _take, _cut, _double)
WEIGHTS = (4, 4, 6, 3, 2, 1, 1)


def damaged(rng: random.Random, good: Good, others: list[bytes]) -> bytes:
    """A payload of a seed, its checksum mended; now and then all of it is another's."""
    data = bytearray(rng.choice(others) if rng.random() < 0.02 else good.data)
    places = [part for part in good.parts[1:] if part[1] > part[0]]
    for change in rng.choices(CHANGES, WEIGHTS, k=rng.choice((1, 1, 1, 2, 3))):
        begin, end = good.parts[0] if rng.random() < 0.06 else rng.choice(places)
        end = min(end, len(data) - TRAILER_BYTES)
        if begin < end:
            change(rng, data, begin, end, good)
    if rng.random() < 0.005 and data:
        del data[rng.randrange(len(data)) :]
    body = memoryview(data)[: max(0, len(data) - TRAILER_BYTES)]
    return bytes(body) + xxhash.xxh3_64_intdigest(body).to_bytes(TRAILER_BYTES, "little")


def other_payloads() -> list[bytes]:
    """Of another codec, of another layout, of none."""
    none, _ = fp32().encode({}, {}, {})
    good = [good_payload(name).data for name in ("fp32", "int4", "topk2", "masked4")]
    return [bytes(none.read(0, none.num_bytes)), good_payload("fp32", LAYOUTS[0]).data, *good]
