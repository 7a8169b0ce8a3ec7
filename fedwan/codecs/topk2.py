"""topk2: of 4096 values the 64 largest, at 2 bits and an index each; the rest is sent later.

SparseLoCo (2508.15706), algorithm 1, with its numbers:

    a  = β e + Δ                 what is owed and what is new; β = 0.95
    Δ' = Q(TopK(a))              per chunk of 4096 values the 64 largest magnitudes
    e  = a - Δ'                  what is owed from now on: the residual

Q gives each value its sign and one of two magnitudes, in bf16, that are best for the chunk: its
sorted magnitudes are cut where the squared error is least, and each part is sent as its mean.
A chunk of fewer values (the last one of a tensor) keeps 64 all the same, as the public
implementations do, or as many as it has: biases are small, cost little and matter much.

Indices ascend and are written as Elias and Fano do: the low 6 bits of each as they are, and of the
upper parts a string of bits in which the one of rank i stands at (upper part + i). That is 8 bits
an index instead of the paper's 12 (the binomial coefficient's logarithm is 7.4), and a chunk of 84
bytes, a 195th of fp32.
"""

# ruff: noqa: D102 (methods are those of `fedwan.codecs.base.Coded`)

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from fedwan.codecs.base import Codec, Coded, span_values, spans
from fedwan.codecs.blocks import MIN_SCALE, Blocks, Record
from fedwan.codecs.payload import Bytes, tensor_from_bytes
from fedwan.errors import PayloadError
from fedwan.state import TensorSpec, tensor_bytes

CHUNK = 4096
LOW_BITS = 6
"""One index in 2^6 values is kept."""
_SHAPES = {1: (8, 1), 2: (4, 1), 6: (4, 3)}
"""Bits of packed numbers -> (numbers, bytes) after which a new byte begins."""
_GROUPS = 256
"""Groups per row in `largest`; a power of two above any k that is asked for."""
_ROWS_AT_ONCE = 4096
"""Chunks that are coded together, once their largest values are known."""


def topk2(beta: float = 0.95) -> Codec:
    """64 of 4096 values at 2 bits, 1/195 of fp32; a share `beta` of what is owed stays owed."""

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        record, owed = _encode(value, residual, beta)
        return tensor_bytes(record), owed

    def record_bytes(spec: TensorSpec) -> int:
        return _RECORD.num_bytes(spec.num_values)

    return Codec("topk2", 6, encode, _SparseCoded, record_bytes, has_feedback=True)


# Records -----------------------------------------------------------------------------------------


def _num_kept(num_values: int) -> int:
    return min(num_values, CHUNK >> LOW_BITS)


def _body_bytes(num_values: int) -> int:
    """Bytes of a chunk without its magnitudes: 10 bits for each value, four by four."""
    return 5 * -(-_num_kept(num_values) // 4)


_RECORD = Record(CHUNK, 2, _body_bytes)
"""Of magnitudes, of the lesser and of the larger values, and of what `_columns` tells apart."""


def _columns(part: Blocks) -> tuple[Tensor, Tensor, Tensor]:
    """Upper parts of k indices, k / 4 bytes a chunk, their lower 6 bits, 3 k / 4, and codes, k / 4.

    A code is 1 for the larger magnitude, and 2 for a minus.
    """
    size = part.codes.shape[1] // 5
    upper, low, codes = torch.split(part.codes, [size, 3 * size, size], dim=1)
    return upper, low, codes


# Bits, filled from the lowest one of the first byte on -------------------------------------------


def pack(numbers: Tensor, bits: int) -> Tensor:
    """Numbers below 2^bits to bytes: int64 [rows, n] to uint8 [rows, ceil(n / per) * size].

    >>> pack(torch.tensor([[1, 2, 3, 0, 1]]), 2).tolist()
    [[57, 1]]
    """
    per, size = _SHAPES[bits]
    rows, count = numbers.shape
    padded = torch.nn.functional.pad(numbers, (0, -count % per)).view(rows, -1, per)
    shifts = torch.arange(0, per * bits, bits, device=numbers.device)
    words = (padded << shifts).sum(2)
    return words.view(torch.uint8).view(rows, -1, 8)[:, :, :size].reshape(rows, -1)


def unpack(data: Tensor, bits: int, count: int) -> Tensor:
    """The inverse of `pack`, for `count` numbers in each row."""
    per, size = _SHAPES[bits]
    rows = len(data)
    parts = data.view(rows, -1, size).long()
    words = (parts << torch.arange(0, 8 * size, 8, device=data.device)).sum(2, keepdim=True)
    shifts = torch.arange(0, per * bits, bits, device=data.device)
    numbers = (words >> shifts) & ((1 << bits) - 1)
    return numbers.view(rows, -1)[:, :count]


def pack_ascending(indices: Tensor) -> tuple[Tensor, Tensor]:
    """Strictly ascending indices below 64 k, int64 [rows, k], as (upper parts, low bits)."""
    rows, count = indices.shape
    rank = torch.arange(count, device=indices.device)
    ones = indices.new_zeros(rows, 2 * count)
    ones.scatter_(1, (indices >> LOW_BITS) + rank, 1)
    return pack(ones, 1), pack(indices & ((1 << LOW_BITS) - 1), LOW_BITS)


def unpack_ascending(upper: Tensor, low: Tensor, count: int) -> Tensor | None:
    """The inverse of `pack_ascending`; None if they are not `count` ascending indices a row.

    They may still be too large.
    """
    ones = unpack(upper, 1, 2 * count)
    if bool((ones.sum(1) != count).any()):
        return None
    rank = torch.arange(count, device=upper.device)
    above = ones.nonzero()[:, 1].view(-1, count) - rank
    indices = (above << LOW_BITS) | unpack(low, LOW_BITS, count)
    return None if bool((indices[:, 1:] <= indices[:, :-1]).any()) else indices


# Writing -----------------------------------------------------------------------------------------


def _encode(value: Tensor, residual: Tensor | None, beta: float) -> tuple[Tensor, Tensor]:
    """A tensor's record, uint8, and what is owed, fp32; both on the tensor's device."""
    owed = value.detach().float().contiguous()
    if residual is not None:
        owed.add_(residual.to(owed.device).view(owed.shape), alpha=beta)
    flat = owed.view(-1)
    record = torch.empty(_RECORD.num_bytes(len(flat)), dtype=torch.uint8, device=owed.device)
    for part in _RECORD.parts(record, len(flat)):
        chunks = flat[part.values].view(-1, part.width)
        for rows in spans(len(chunks), _ROWS_AT_ONCE):
            _encode_rows(chunks[rows], part, rows)
    return record, owed


def _encode_rows(chunks: Tensor, part: Blocks, rows: slice) -> None:
    """Write these chunks' part of the record, and take what was sent out of them."""
    found, where = _largest_in_spans(chunks)
    magnitudes, is_large = _two_magnitudes(found)
    sign = chunks.gather(1, where) < 0
    # Sorted by index; the code rides along in the lowest bits.
    keys = ((where << 2) | (sign.long() << 1) | is_large.long()).sort(1).values
    index, code = keys >> 2, keys & 3
    part.scales[rows] = magnitudes
    packed = (*pack_ascending(index), pack(code, 2))
    for column, data in zip(_columns(part), packed, strict=True):
        column[rows] = data
    chunks.scatter_(1, index, chunks.gather(1, index) - _values(code, magnitudes))


def _largest_in_spans(chunks: Tensor) -> tuple[Tensor, Tensor]:
    """Magnitudes, descending, and indices of what is kept of each chunk."""
    width = chunks.shape[1]
    size = max(1, span_values(chunks.numel(), chunks.device) // width)
    scratch = torch.empty_like(chunks[:size])
    kept = _num_kept(width)
    found = chunks.new_empty(len(chunks), kept)
    where = torch.empty_like(found, dtype=torch.int64)
    for rows in spans(len(chunks), size):
        span = chunks[rows]
        found[rows], where[rows] = largest(torch.abs(span, out=scratch[: len(span)]), kept)
    return found, where


def largest(magnitudes: Tensor, k: int) -> tuple[Tensor, Tensor]:
    """The k largest of each row, in descending order, NaN before all: (values, indices), [rows, k].

    About twice as fast as `torch.topk` alone. A row of 4096 is seen as 256 groups of 16. The 64
    largest values lie in the 64 groups with the largest maxima: a value outside has 64 groups
    before it, each with a value at least as large. Those groups' 1024 values are cut down to 256 in
    the same way, and `topk` has only those to look at. Of equal values, any may be chosen, the same
    ones every time.

    >>> values, indices = largest(torch.tensor([[0.0, 3.0, 1.0]]), 2)
    >>> values.tolist(), indices.tolist()
    ([[3.0, 1.0]], [[1, 2]])
    """
    width = magnitudes.shape[1]
    if k >= _GROUPS or width < 4 * _GROUPS or width % _GROUPS or k & (k - 1):
        return torch.topk(magnitudes, k, dim=1)
    # Group g is every 256th value from g on, so that maxima are taken along whole cache lines.
    by_group = magnitudes.view(len(magnitudes), -1, _GROUPS)
    group = by_group.amax(1).topk(k, 1, sorted=False).indices
    chosen = by_group.gather(2, group.unsqueeze(1).expand(-1, by_group.shape[1], -1))
    values, among = largest(chosen.view(len(magnitudes), -1), k)
    # Value `among` of the chosen is member among // k of group among % k; k is a power of two.
    member = among >> (k.bit_length() - 1)
    return values, group.gather(1, among & (k - 1)).add_(member * _GROUPS)


def _two_magnitudes(found: Tensor) -> tuple[Tensor, Tensor]:
    """The best two magnitudes for each row of descending ones: (bf16 [rows, 2], is large).

    Σ (x - mean)² over both parts is least where S²/j + (T - S)²/(k - j) is largest, S being the
    sum of the first j and T that of all.
    """
    count = found.shape[1]
    sums = found.cumsum(1)
    rest = sums[:, -1:] - sums
    rank = torch.arange(1, count + 1, device=found.device)
    gain = sums.square() / rank
    gain[:, :-1] += rest[:, :-1].square() / (count - rank[:-1])
    cut = gain.argmax(1, keepdim=True)
    large = sums.gather(1, cut) / (cut + 1)
    small = torch.where(cut + 1 < count, rest.gather(1, cut) / (count - 1 - cut), large)
    magnitudes = torch.cat([small, large], 1).bfloat16()
    magnitudes.masked_fill_(magnitudes < MIN_SCALE, 0)
    return magnitudes, rank <= cut + 1


def _values(code: Tensor, magnitudes: Tensor) -> Tensor:
    """What codes stand for, fp32."""
    value = magnitudes.float().gather(1, code & 1)
    return value.mul_(1 - (code & 2)).add_(0.0)  # the zero turns -0 into 0


# Reading -----------------------------------------------------------------------------------------


class _SparseCoded(Coded):
    def __init__(self, data: Bytes, spec: TensorSpec) -> None:
        super().__init__(spec.shape)
        self._num_values = spec.num_values
        self._record = tensor_from_bytes(data, torch.uint8, (len(data),))
        _RECORD.check(self._record, spec.num_values)
        self._index, self._sent = _entries(self._record, spec.num_values)

    def pieces(self, device: torch.device | None = None) -> Iterator[tuple[Tensor, Tensor, None]]:
        if device is None or device == self._record.device:
            yield self._index, self._sent, None
        else:  # the record alone crosses
            yield *_entries(self._record.to(device), self._num_values), None

    def pick(self, index: Tensor) -> Tensor:
        picked = index.new_zeros(len(index), dtype=torch.float32)
        if len(self._index):
            place = torch.searchsorted(self._index, index).clamp_(max=len(self._index) - 1)
            is_sent = self._index[place] == index
            picked[is_sent] = self._sent[place[is_sent]]
        return picked


def _entries(record: Tensor, num_values: int) -> tuple[Tensor, Tensor]:
    """Indices into the flat tensor, ascending, and the values there."""
    indices = [record.new_empty(0, dtype=torch.int64)]
    values = [record.new_empty(0, dtype=torch.float32)]
    for part in _RECORD.parts(record, num_values):
        count = _num_kept(part.width)
        upper, low, codes = _columns(part)
        for rows in spans(len(codes), _ROWS_AT_ONCE):
            index = unpack_ascending(upper[rows], low[rows], count)
            if index is None or bool((index[:, -1] >= part.width).any()):
                raise PayloadError(
                    f"has chunks of {part.width} whose {count} indices are not ascending or "
                    "out of range; refused"
                )
            first = part.values.start + rows.start * part.width
            starts = torch.arange(len(index), device=index.device) * part.width + first
            indices.append((index + starts.unsqueeze(1)).view(-1))
            code = unpack(codes[rows], 2, count)
            values.append(_values(code, part.scales[rows]).view(-1))
    return torch.cat(indices), torch.cat(values)
