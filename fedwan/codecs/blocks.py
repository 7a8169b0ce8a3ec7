"""Block-wise codes: 128 values share a scale in bf16, each value is a small number times it.

A record holds the scales of all blocks, then the codes of all blocks; the last block may be
shorter (docs/wire.md). A scale has 8 significant bits and a code few, so that their product is
exact in fp32: decoded values have the same bits on every device, with or without fused
multiply-add, and adding a record to a tensor rounds once.

Values are worked on in spans that stay in the cache, with every operation on many rows at a time:
on a CPU the time is that of the passes over the cache, on a GPU that of a few kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.codecs.base import Codec
from fedwan.codecs.coded import span_values, spans
from fedwan.codecs.payload import Bytes, tensor_bytes, tensor_from_bytes
from fedwan.codecs.scales import check_scales
from fedwan.state import TensorSpec

__all__ = ["BLOCK", "BlockFormat", "block_codec"]

BLOCK = 128
"""Values that share a scale."""


class BlockFormat(NamedTuple):
    """What tells one block-wise codec from another."""

    bits: int
    """Of a code: 8, or 4 with two codes to a byte."""
    peak: float
    """What the largest value of a block is in units of its scale."""
    min_scale: float
    """Below this a block is written as zeros: products would lose bits to underflow."""
    pack: Callable[[Tensor, Tensor], None]
    """(values in units of the scale [rows, width], codes [rows, bytes], int8, written); may spoil
    the values. Their width is even where two codes make a byte."""
    unpack: Callable[[Tensor, Tensor], None]
    """The inverse: (codes, values, written). Every byte means something finite."""

    def code_bytes(self, num_values: int) -> int:
        """Bytes of the codes of a block of so many values."""
        return -(-num_values * self.bits // 8)

    def padded(self, num_values: int) -> int:
        """Values of such a block once its last byte is full."""
        return self.code_bytes(num_values) * 8 // self.bits

    def record_bytes(self, num_values: int) -> int:
        """Exact bytes of a tensor's record."""
        num_full, rest = divmod(num_values, BLOCK)
        codes = num_full * self.code_bytes(BLOCK) + self.code_bytes(rest)
        return 2 * (num_full + (rest > 0)) + codes


class _Part(NamedTuple):
    """Equal blocks of a record: all the full ones, or the short one behind them."""

    values: slice
    """Of the flat tensor."""
    width: int
    """Values of a block; odd at most for the last."""
    scales: Tensor
    """bf16 [blocks, 1]."""
    codes: Tensor
    """int8 [blocks, bytes]."""


def _parts(record: Tensor, num_values: int, form: BlockFormat) -> list[_Part]:
    """The blocks of a record; its tensors share the record's memory."""
    num_full, rest = divmod(num_values, BLOCK)
    num_blocks = num_full + (rest > 0)
    scales = record[: 2 * num_blocks].view(torch.bfloat16).unsqueeze(1)
    codes = record[2 * num_blocks :].view(torch.int8)
    cut = num_full * form.code_bytes(BLOCK)
    parts = []
    if num_full:
        full = slice(0, num_full * BLOCK)
        rows = codes[:cut].view(num_full, -1)
        parts.append(_Part(full, BLOCK, scales[:num_full], rows))
    if rest:
        short = slice(num_full * BLOCK, num_values)
        parts.append(_Part(short, rest, scales[num_full:], codes[cut:].view(1, -1)))
    return parts


# Writing -----------------------------------------------------------------------------------------


def _encode(form: BlockFormat, value: Tensor) -> Tensor:
    """A tensor's record, uint8, on the tensor's device."""
    flat = value.detach().reshape(-1)
    record = torch.empty(form.record_bytes(len(flat)), dtype=torch.uint8, device=value.device)
    for part in _parts(record, len(flat), form):
        _encode_part(form, flat[part.values], part)
    return record


def _encode_part(form: BlockFormat, flat: Tensor, part: _Part) -> None:
    size = span_values(len(flat), flat.device) // part.width
    scratch = flat.new_zeros(size, form.padded(part.width), dtype=torch.float32)
    for rows in spans(len(part.scales), size):
        span = flat[rows.start * part.width : rows.stop * part.width].view(-1, part.width)
        work = scratch[: len(span)]
        values = work[:, : part.width]
        torch.abs(span.float(), out=values)
        # A scale that is not finite passes through, so that every reader sees it.
        scale = (values.amax(1, keepdim=True) / form.peak).bfloat16()
        scale.masked_fill_(scale < form.min_scale, 0)
        part.scales[rows] = scale
        unit = scale.float()
        inverse = unit.reciprocal().masked_fill_(unit == 0, 0)
        torch.mul(span, inverse, out=values)
        form.pack(work, part.codes[rows])


# Reading -----------------------------------------------------------------------------------------


class _BlockCoded:
    """Implements `Coded` for a record.

    Raises:
        PayloadError: a scale is negative or not finite.
    """

    def __init__(self, form: BlockFormat, data: Bytes, spec: TensorSpec) -> None:
        self._form = form
        self._spec = spec
        self._record = tensor_from_bytes(data, torch.uint8, (len(data),))
        check_scales(self._record[: 2 * -(-spec.num_values // BLOCK)].view(torch.int16))

    def tensor(self) -> Tensor:
        """See `Coded`."""
        target = torch.empty(self._spec.shape)
        self.write_to(target)
        return target

    def write_to(self, target: Tensor) -> None:
        """See `Coded`."""
        if not _is_plain(target):
            target.copy_(self.tensor())
            return
        flat = target.view(-1)
        for where, units, scale in self._units(target.device):
            torch.mul(units, scale, out=flat[where].view(units.shape))

    def add_to(self, target: Tensor, weight: float = 1.0) -> None:
        """See `Coded`."""
        if not _is_plain(target):
            target.add_(self.tensor().to(target.device, target.dtype), alpha=weight)
            return
        flat = target.view(-1)
        for where, units, scale in self._units(target.device):
            rows = flat[where].view(units.shape)
            if weight == 1.0:
                rows.addcmul_(units, scale)  # the product is exact: one rounding, fused or not
            else:
                rows.add_(units.mul_(scale), alpha=weight)

    def sum_of_squares(self) -> float:
        """See `Coded`."""
        total = 0.0
        for _, units, scale in self._units(self._record.device):
            values = units.mul_(scale).reshape(-1)
            total += float(torch.dot(values, values))
        return total

    def pick(self, index: Tensor) -> Tensor:
        """See `Coded`. Decodes the blocks that the values lie in, 128 for one at most."""
        picked = torch.empty(len(index))
        for part in _parts(self._record, self._spec.num_values, self._form):
            inside = (index >= part.values.start) & (index < part.values.stop)
            place = index[inside] - part.values.start
            if not len(place):
                continue
            rows, which = torch.unique_consecutive(place // part.width, return_inverse=True)
            units = torch.empty(len(rows), self._form.padded(part.width))
            self._form.unpack(part.codes[rows], units)
            values = units.mul_(part.scales[rows].float())
            picked[inside] = values[which, place % part.width]
        return picked

    def _units(self, device: torch.device) -> Iterator[tuple[slice, Tensor, Tensor]]:
        """Where in the flat tensor, values in units of their scale [rows, width], scales [rows, 1].

        The values are the caller's to spoil, until the next ones are taken.
        """
        record = self._record.to(device)
        for part in _parts(record, self._spec.num_values, self._form):
            width = part.width
            size = span_values(part.values.stop - part.values.start, device) // width
            scratch = torch.empty(size, self._form.padded(width), device=device)
            for rows in spans(len(part.scales), size):
                work = scratch[: rows.stop - rows.start]
                self._form.unpack(part.codes[rows], work)
                first = part.values.start
                where = slice(first + rows.start * width, first + rows.stop * width)
                yield where, work[:, :width], part.scales[rows].float()


def _is_plain(target: Tensor) -> bool:
    return target.dtype == torch.float32 and target.is_contiguous()


def block_codec(name: str, encoding: int, form: BlockFormat) -> Codec:
    """The codec that a block format makes."""

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        return tensor_bytes(_encode(form, value)), None

    return Codec(
        name,
        encoding,
        encode,
        lambda data, spec: _BlockCoded(form, data, spec),
        lambda spec: form.record_bytes(spec.num_values),
    )
