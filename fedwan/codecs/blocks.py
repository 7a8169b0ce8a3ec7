"""int8, int4, int2: a block's values share a bf16 scale, each is a small number times it.

A record holds the scales of all blocks, then the codes of all blocks; the last block may be
shorter (docs/wire.md). A scale has 8 significant bits and a code few, so that their product is
exact in fp32: decoded values have the same bits on every device, with or without fused
multiply-add, and adding a record to a tensor rounds once.

Values are worked on in spans that stay in the cache, with every operation on many rows at a time:
on a CPU the time is that of the passes over the cache. A GPU gets the blocks of many tensors at
once: to start a dozen kernels takes longer than most tensors take to code.

Two codes of 4 bits to a byte: byte j of a block of w values holds the code of value j in its lower
half and that of value j + ceil(w / 2) in its upper half, so that packing moves whole rows. Four
codes of 2 bits likewise.
"""

# ruff: noqa: D102 (methods are those of `fedwan.codecs.base.Coded`)

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.codecs.base import Codec, Coded, Piece, span_values, spans, with_feedback
from fedwan.codecs.payload import Bytes, tensor_from_bytes
from fedwan.errors import PayloadError
from fedwan.state import TensorSpec, tensor_bytes

BLOCK = 128
"""Values that share a scale; those of `int2` are `WIDE`."""
WIDE = 512
STEP = 1.6
"""Of `int2`'s levels, in units of a block's mean magnitude."""
MIN_SCALE = 2.0**-126
"""Below this a block is written as zeros: products would lose bits to underflow."""
_INFINITY = 0x7F80
"""Infinity in bf16, as an integer; below it are zero and the positive finite numbers."""


class Blocks(NamedTuple):
    """Equal blocks of a record: all the full ones, or the short one behind them."""

    values: slice  # of the flat tensor
    width: int  # values of a block
    scales: Tensor  # bf16 [blocks, scales of a block]
    codes: Tensor  # uint8 [blocks, bytes]


class Record(NamedTuple):
    """The scales of equal blocks, then their codes; the last block may be shorter."""

    width: int
    num_scales: int
    """Of a block."""
    code_bytes: Callable[[int], int]
    """Of a block of so many values."""

    def num_bytes(self, num_values: int) -> int:
        num_full, rest = divmod(num_values, self.width)
        codes = num_full * self.code_bytes(self.width) + self.code_bytes(rest)
        return self._scale_bytes(num_values) + codes

    def parts(self, data: Tensor, num_values: int) -> list[Blocks]:
        """Its blocks, which share the memory of `data`, uint8."""
        num_full, rest = divmod(num_values, self.width)
        begin = self._scale_bytes(num_values)
        scales = data[:begin].view(torch.bfloat16).view(-1, self.num_scales)
        cut = begin + num_full * self.code_bytes(self.width)
        end, parts = num_full * self.width, []
        if num_full:
            codes = data[begin:cut].view(num_full, -1)
            parts.append(Blocks(slice(0, end), self.width, scales[:num_full], codes))
        if rest:
            codes = data[cut:].view(1, -1)
            parts.append(Blocks(slice(end, num_values), rest, scales[num_full:], codes))
        return parts

    def check(self, data: Tensor, num_values: int) -> None:
        """Refuse a record of which a scale is negative or not finite."""
        scales = data[: self._scale_bytes(num_values)].view(torch.int16)
        bad = ((scales < 0) | (scales >= _INFINITY)).nonzero()
        if len(bad):
            at = int(bad[0])
            seen = float(scales[at : at + 1].view(torch.bfloat16))
            raise PayloadError(
                f"holds values that are not finite (scale {at} of {len(scales)} is {seen}); "
                "lower the inner learning rate or clip the gradients at that site"
            )

    def _scale_bytes(self, num_values: int) -> int:
        return 2 * self.num_scales * -(-num_values // self.width)


class _Format(NamedTuple):
    """What tells one block-wise codec from another."""

    bits: int
    """Of a code: 8, or 4 with two codes to a byte, or 2 with four."""
    width: int
    """Values of a block."""
    scales: Callable[[Tensor, int | Tensor], Tensor]
    """Of magnitudes [rows, width], in each row so many and then zeros: [rows, 1]."""
    pack: Callable[[Tensor, Tensor], None]
    """(values in units of the scale [rows, width], rounded; codes [rows, bytes], int8, written).
    The width fills whole bytes."""
    unpack: Callable[[Tensor, Tensor], None]
    """The inverse: (codes, values, written). Every byte means something finite."""
    shift: float = 0.0
    """What `pack` leaves in the values, and this, is what the codes mean."""

    def code_bytes(self, num_values: int) -> int:
        """Of a block."""
        return -(-num_values * self.bits // 8)

    def padded(self, num_values: int) -> int:
        """Values of a block once its last byte is full."""
        return self.code_bytes(num_values) * 8 // self.bits

    @property
    def record(self) -> Record:
        return Record(self.width, 1, self.code_bytes)


def int8() -> Codec:
    """8.125 bits a value: code = value / scale, -127 … 127, an error of half a scale at most."""
    form = _Format(8, BLOCK, _largest_over(127.0), _pack_bytes, _unpack_bytes)
    return _block_codec("int8", 3, form)


def int4() -> Codec:
    """4.125 bits a value: code -7 … 7, an error of 1/14 of the block's largest value at most."""
    form = _Format(4, BLOCK, _largest_over(7.0), _pack_halves, _unpack_halves)
    return _block_codec("int4", 4, form)


def int2() -> Codec:
    """2.03 bits a value: ± 0.8 or ± 2.4 of the block's mean magnitude, with error feedback.

    For normal values the mean square error is 0.145 of the values' own, where the best four levels
    there are have 0.118 (Max 1960), near ± 0.6 and ± 1.9; but small codes are more frequent, so
    that packing makes 1.77 bits of them, and not 1.94. What is lost is added to the next delta.
    """
    form = _Format(2, WIDE, _step, _pack_quarters, _unpack_quarters, 0.5)
    return with_feedback(_block_codec("int2", 7, form))


def _block_codec(name: str, encoding: int, form: _Format) -> Codec:
    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, None]:
        flat = value.detach().reshape(-1)
        return tensor_bytes(_encode(form, flat)), None

    def encode_owing(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor]:
        owed = value.detach().float().contiguous().view(-1)
        before = None if residual is None else residual.to(owed.device).view(-1)
        record = _encode(form, owed, before, is_spare=True)
        return tensor_bytes(record), owed.view(value.shape)

    return Codec(
        name,
        encoding,
        encode,
        lambda data, spec: _BlockCoded(form, data, spec),
        lambda spec: form.record.num_bytes(spec.num_values),
        encode_owing=encode_owing,
        encode_many=partial(_encode_many, form),
        add_many=partial(_add_many, form),
    )


def _largest_over(units: float) -> Callable[[Tensor, int | Tensor], Tensor]:
    return lambda magnitudes, _: magnitudes.amax(1, keepdim=True) / units


def _step(magnitudes: Tensor, num: int | Tensor) -> Tensor:
    return magnitudes.sum(1, keepdim=True) / num * STEP


# Codes -------------------------------------------------------------------------------------------


def _pack_bytes(values: Tensor, packed: Tensor) -> None:
    packed.copy_(torch.round(values, out=values))


def _unpack_bytes(packed: Tensor, values: Tensor) -> None:
    values.copy_(packed)


def _pack_halves(values: Tensor, packed: Tensor) -> None:
    codes, half = values.round_().to(torch.int8), values.shape[1] // 2
    torch.bitwise_or(codes[:, :half] & 15, codes[:, half:] << 4, out=packed)


def _unpack_halves(packed: Tensor, values: Tensor) -> None:
    half = packed.shape[1]
    code = packed << 4
    values[:, :half].copy_(code.bitwise_right_shift_(4))
    values[:, half:].copy_(torch.bitwise_right_shift(packed, 4, out=code))


def _pack_quarters(values: Tensor, packed: Tensor) -> None:
    codes = values.floor_().clamp_(-2, 1).chunk(4, dim=1)
    total = torch.add(codes[0], codes[1], alpha=4).add_(codes[2], alpha=16)
    total.add_(codes[3], alpha=64)  # from -170 to 85, the lowest of which is to be 0
    packed.copy_(total.add_(170 - 128)).bitwise_xor_(-128)


def _unpack_quarters(packed: Tensor, values: Tensor) -> None:
    for index, part in enumerate(values.chunk(4, dim=1)):
        part.copy_(packed >> 2 * index & 3)
    values.sub_(1.5)


# Records -----------------------------------------------------------------------------------------


def _encode(
    form: _Format, flat: Tensor, residual: Tensor | None = None, is_spare: bool = False
) -> Tensor:
    """A flat tensor's record, uint8, on the tensor's device.

    To one that is spare a residual is added, and what the record does not say is left in it.
    """
    record = torch.empty(form.record.num_bytes(len(flat)), dtype=torch.uint8, device=flat.device)
    for part in form.record.parts(record, len(flat)):
        num_blocks = len(part.scales)
        size = span_values(num_blocks * part.width, flat.device) // part.width
        scratch = flat.new_zeros(size, form.padded(part.width), dtype=torch.float32)
        for rows in spans(num_blocks, size):
            at = part.values.start + rows.start * part.width
            where = slice(at, at + (rows.stop - rows.start) * part.width)
            span = flat[where].view(-1, part.width)
            if residual is not None:
                span += residual[where].view(-1, part.width)
            work = scratch[: len(span)]
            values = work[:, : part.width]
            torch.abs(span.float(), out=values)
            unit = _scale_into(part.scales[rows], form, values, part.width)
            torch.mul(span, _inverse(unit), out=values)
            codes = part.codes[rows].view(torch.int8)
            form.pack(work, codes)
            if is_spare:
                _subtract(form, span, work, codes, unit)
    return record


def _scale_into(place: Tensor, form: _Format, magnitudes: Tensor, num: int | Tensor) -> Tensor:
    """Write the scales of rows, bf16 [rows, 1], and give them in fp32."""
    # A scale that is not finite passes through, so that every reader sees it.
    scale = form.scales(magnitudes, num).bfloat16()
    place.copy_(scale.masked_fill_(scale < MIN_SCALE, 0))
    return scale.float()


def _inverse(unit: Tensor) -> Tensor:
    return unit.reciprocal().masked_fill_(unit == 0, 0)


def _subtract(form: _Format, span: Tensor, work: Tensor, codes: Tensor, unit: Tensor) -> None:
    """Leave of a span's values what their codes do not say; `work` is as packing left it."""
    if form.shift:
        work += form.shift
    span.addcmul_(work[:, : span.shape[1]], unit, value=-1)  # the product is exact: rounded once


def _encode_many(
    form: _Format, tensors: Sequence[Tensor], residuals: Sequence[Tensor | None] | None
) -> tuple[list[list[memoryview]], list[Tensor]]:
    """The records of tensors on one device, in parts, and with residuals what is owed.

    Bytes are those of `_encode`. All blocks lie in one matrix, a row each: the values of a short
    one where packing a whole row brings them into the row's first bytes.
    """
    flats = [tensor.detach().reshape(-1) for tensor in tensors]
    ends = list(accumulate(-(-len(flat) // form.width) for flat in flats))
    blocks = flats[0].new_zeros(ends[-1], form.width, dtype=torch.float32)
    places = [_places(form, blocks, len(flat), end) for flat, end in zip(flats, ends, strict=True)]

    def runs_of(values: Sequence[Tensor | None]) -> tuple[list[Tensor], list[Tensor]]:
        pairs = [(v, p) for v, p in zip(values, places, strict=True) if v is not None]
        in_blocks = [there for _, place in pairs for _, there in place]
        return in_blocks, [value.view(-1)[run] for value, place in pairs for run, _ in place]

    torch._foreach_copy_(*runs_of(flats))
    if residuals is not None and any(residual is not None for residual in residuals):
        there, owed_before = runs_of(residuals)
        torch._foreach_add_(there, [run.to(blocks.device) for run in owed_before])
    num = torch.full((len(blocks), 1), form.width, dtype=torch.float32, device="cpu")
    for flat, end in zip(flats, ends, strict=True):
        if rest := len(flat) % form.width:
            num[end - 1] = rest
    work = blocks.abs()
    scales = torch.empty_like(num, dtype=torch.bfloat16, device=blocks.device)
    unit = _scale_into(scales, form, work, num.to(blocks.device, non_blocking=True))
    torch.mul(blocks, _inverse(unit), out=work)
    codes = scales.new_empty(len(blocks), form.code_bytes(form.width), dtype=torch.int8)
    form.pack(work, codes)
    owed: list[Tensor] = []
    if residuals is not None:
        _subtract(form, blocks, work, codes, unit)
        owed = [torch.empty_like(flat, dtype=torch.float32) for flat in flats]
        there, here = runs_of(owed)
        torch._foreach_copy_(here, there)
    said, coded = tensor_bytes(scales), tensor_bytes(codes)
    records, start = [], 0
    for flat, end in zip(flats, ends, strict=True):
        num_bytes = form.record.num_bytes(len(flat)) - 2 * (end - start)
        first = start * codes.shape[1]
        records.append([said[2 * start : 2 * end], coded[first : first + num_bytes]])
        start = end
    return records, [rest.view(t.shape) for rest, t in zip(owed, tensors, strict=False)]


def _add_many(form: _Format, coded: Sequence[Coded], targets: Sequence[Tensor]) -> None:
    """Flat fp32 targets of one device += decoded, with the bits of `Coded.add_to`.

    All blocks lie in one matrix, as in `_encode_many`; one copy each brings scales and codes.
    """
    device, width = targets[0].device, form.code_bytes(form.width)
    ends = list(accumulate(-(-len(target) // form.width) for target in targets))
    room = torch.empty(ends[-1] * (2 + width), dtype=torch.uint8, pin_memory=device.type == "cuda")
    scales, codes = room[: 2 * ends[-1]], room[2 * ends[-1] :]
    starts = [0, *ends]
    for one, start, end in zip(coded, starts, ends, strict=False):
        assert isinstance(one, _BlockCoded), "of another codec"
        cut, first = 2 * (end - start), start * width
        scales[2 * start : 2 * end] = one.record[:cut]
        codes[first : first + len(one.record) - cut] = one.record[cut:]
    moved = room.to(device, non_blocking=True)
    values = torch.empty(ends[-1], form.width, dtype=torch.float32, device=device)
    form.unpack(moved[2 * ends[-1] :].view(torch.int8).view(-1, width), values)
    values.mul_(moved[: 2 * ends[-1]].view(torch.bfloat16).view(-1, 1).float())
    pairs = [
        (target[run], there)
        for target, end in zip(targets, ends, strict=True)
        for run, there in _places(form, values, len(target), end)
    ]
    if pairs:
        torch._foreach_add_(*map(list, zip(*pairs, strict=True)))


def _places(form: _Format, blocks: Tensor, num: int, end: int) -> list[tuple[slice, Tensor]]:
    """Runs of a flat tensor of so many values, and where they lie in its rows up to `end`."""
    num_full, rest = divmod(num, form.width)
    cut, first = num - rest, end - -(-num // form.width)
    places = [(slice(0, cut), blocks[first : first + num_full].view(-1))] if cut else []
    for part, run in enumerate(spans(rest, form.code_bytes(rest))):
        column = part * form.code_bytes(form.width)
        row = blocks[end - 1, column : column + run.stop - run.start]
        places.append((slice(cut + run.start, cut + run.stop), row))
    return places


class _BlockCoded(Coded):
    def __init__(self, form: _Format, data: Bytes, spec: TensorSpec) -> None:
        super().__init__(spec.shape)
        self._form, self._num_values = form, spec.num_values
        self.record = tensor_from_bytes(data, torch.uint8, (len(data),))
        form.record.check(self.record, spec.num_values)

    def pick(self, index: Tensor) -> Tensor:
        picked = index.new_empty(len(index), dtype=torch.float32)
        for part in self._form.record.parts(self.record, self._num_values):
            inside = (index >= part.values.start) & (index < part.values.stop)
            place = index[inside] - part.values.start
            if not len(place):
                continue
            rows, which = torch.unique_consecutive(place // part.width, return_inverse=True)
            units = index.new_empty(len(rows), self._form.padded(part.width), dtype=torch.float32)
            self._form.unpack(part.codes[rows].view(torch.int8), units)
            values = units.mul_(part.scales[rows].float())
            picked[inside] = values[which, place % part.width]
        return picked

    def pieces(self, device: torch.device | None = None) -> Iterator[Piece]:
        record = self.record.to(device)
        for part in self._form.record.parts(record, self._num_values):
            width, first = part.width, part.values.start
            size = span_values(part.values.stop - first, record.device) // width
            scratch = record.new_empty(size, self._form.padded(width), dtype=torch.float32)
            for rows in spans(len(part.scales), size):
                work = scratch[: rows.stop - rows.start]
                self._form.unpack(part.codes[rows].view(torch.int8), work)
                where = slice(first + rows.start * width, first + rows.stop * width)
                yield where, work[:, :width], part.scales[rows].float()
