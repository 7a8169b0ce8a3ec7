"""Integers under masks: what many sites send can be added up, and no one's can be read alone.

A value is rounded to one of 2^b steps of a size that all sites share, and a site's integers are
summed modulo 2^w with key streams that only the sum is free of (`fedwan.site.masker`):

    q = round((value + residual) / step), clipped        sent: q + masks mod 2^w
    residual = value + residual - q step                 w = b + ceil(log2 N), so that N add up

A record is the values, w bits each, and then how large they were, in eighths of an octave, 16 bits,
under masks as well: the sum of these says, as the geometric mean of the sites, which step suits the
next version. What is clipped or rounded away is sent later, by error feedback; steps are so large
that the largest value is not clipped to less than an eighth of it, however small the others are.

Bonawitz et al. 2017 ("Practical secure aggregation"); error feedback before masking, and agreed
steps, as in Agarwal et al. 2018 (1805.10559). Memory: a block of values besides the record.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray
from torch import Tensor

from fedwan.codecs.base import Codec, Coded, Piece, spans
from fedwan.codecs.payload import Bytes
from fedwan.errors import PayloadError, UserError
from fedwan.state import Layout, Role, TensorSpec

Integers = NDArray[Any]
"""8 or 16 bits each, unsigned, modulo 2^w."""

BITS = range(3, 9)
MOST_SITES = 63
"""As many sizes of at most 1,023 add up in 16 bits."""
SEED_BYTES = 16
_BLOCK = 1 << 17
"""Values packed together; part of the format."""
_ROW = 8
"""Values that fill whole bytes whatever w is; the last row of a block may be empty in part."""
_MIDDLE, _PER_OCTAVE = 512, 8
_TIMES = 8
"""What is clipped is at most so many times what is sent: it arrives within as many versions."""
FIRST_SIZE = _MIDDLE - 7 * _PER_OCTAVE
"""Before anything was sent: a root mean square of 2^-7."""


class KeyStreams:
    """Adds key streams to integers, or takes them away, one tensor after the other (AES-CTR)."""

    def __init__(self, added: Iterable[bytes], taken: Iterable[bytes] = ()) -> None:
        self._added = [_encryptor(seed) for seed in added]
        self._taken = [_encryptor(seed) for seed in taken]
        self._zeros = memoryview(bytes(2 * _BLOCK))
        self._room = np.empty(2 * _BLOCK + 15, np.uint8)

    def apply(self, values: Integers) -> None:
        """To the next values of each stream, in place; they wrap around."""
        size = values.nbytes
        for streams, combine in ((self._added, np.add), (self._taken, np.subtract)):
            for stream in streams:
                stream.update_into(self._zeros[:size], self._room.data)
                combine(values, self._room[:size].view(values.dtype), out=values)


def _encryptor(seed: bytes) -> Any:
    return Cipher(algorithms.AES(seed), modes.CTR(bytes(16))).encryptor()


class Masked(Coded):
    """A record under masks: only sums of them say anything."""

    def __init__(self, data: Bytes, spec: TensorSpec, width: int) -> None:
        super().__init__(spec.shape)
        self._data, self._num, self._width = data, spec.num_values, width

    def blocks(self) -> Iterator[Integers]:
        """The integers, a block at a time, whole rows; at last their size, alone."""
        data, at = np.frombuffer(self._data, np.uint8), 0
        for part in spans(self._num, _BLOCK):
            rows = -(-(part.stop - part.start) // _ROW)
            yield _unpack(data[at : at + rows * self._width], self._width)
            at += rows * self._width
        yield data[at:].view("<u2").astype(np.uint16)

    def pieces(self, device: torch.device | None = None) -> Iterator[Piece]:
        """Nothing that could be read."""
        yield from ()

    def pick(self, index: Tensor) -> Tensor:
        """Zeros: nothing is known."""
        return index.new_zeros(len(index), dtype=torch.float32)


def width_of(bits: int, sites: int) -> int:
    """Bits of a value on the wire: sums of so many sites' fit in them."""
    return bits + math.ceil(math.log2(max(2, sites)))


def masked(bits: int, sites: int) -> Codec:
    """The codec `masked4` and its like, for the sum of so many sites; `bind` makes it encode."""
    width = width_of(bits, sites)

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        raise AssertionError("bound to keys before anything is encoded")

    def read(data: Bytes, spec: TensorSpec) -> Coded:
        return Masked(data, spec, width)

    def record_bytes(spec: TensorSpec) -> int:
        return 2 + width * -(-spec.num_values // _ROW)

    return Codec(
        *(f"masked{bits}", 16 + bits, encode, read, record_bytes),
        has_feedback=True,
        mask_bits=bits,
    )


def bind(codec: Codec, sites: int, sizes: Sequence[int], masks: KeyStreams) -> Codec:
    """The same, for one payload: `sizes` of its parameters, in their order, and its masks."""
    bits = codec.mask_bits
    width, left = width_of(bits, sites), iter(sizes)

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        owed = value.detach().to("cpu", torch.float32).contiguous()
        if residual is not None:
            owed += residual.to("cpu").view(owed.shape)
        size, flat = next(left), owed.view(-1)
        square = float(torch.dot(flat, flat))
        if not math.isfinite(square):
            raise PayloadError(
                "a delta holds values that are not finite, or too large to square; lower the inner "
                "learning rate or clip the gradients at this site"
            )
        parts: list[Integers] = []
        largest = 0.0
        for part in spans(len(flat), _BLOCK):
            largest = max(largest, float(flat[part].abs().max()))
            integers = _round_off(flat[part], step_of(size, bits), bits, width)
            masks.apply(integers)
            parts.append(_pack(integers, width))
        rms = math.sqrt(square / max(1, len(flat)))
        told = max(rms, largest / (_TIMES * _reach(bits)))
        mine = np.array([size_of(told) or size], np.uint16)
        masks.apply(mine)
        parts.append(mine.astype("<u2").view(np.uint8))
        return np.concatenate(parts).data, owed

    return codec._replace(encode_tensor=encode)


def _round_off(owed: Tensor, step: float, bits: int, width: int) -> Integers:
    """Integers of a block, in whole rows; what they do not say is left in it."""
    most = 1 << (bits - 1)
    whole = (owed / step).round_().clamp_(-most, most - 1)
    owed.sub_(whole, alpha=step)
    integers = np.zeros(-(-len(owed) // _ROW) * _ROW, np.uint8 if width <= 8 else np.uint16)
    small = np.int8 if width <= 8 else np.int16
    integers[: len(owed)] = whole.numpy().astype(small).view(integers.dtype)
    return integers


class Sum:
    """Adds up one tensor's records, and reads the sum once all masks are off."""

    def __init__(self, spec: TensorSpec, bits: int, sites: int) -> None:
        self._shape, self._num, self._bits = spec.shape, spec.num_values, bits
        self._width = width_of(bits, sites)
        self._blocks: list[Integers] = []
        """Of values, which lie one behind the other; at last the sum of sizes, alone."""

    def add(self, record: Masked) -> None:
        """One more."""
        if not self._blocks:
            small = np.uint8 if self._width <= 8 else np.uint16
            self._lay_out(np.zeros(-(-self._num // _ROW) * _ROW, small), 0)
        for mine, other in zip(self._blocks, record.blocks(), strict=True):
            np.add(mine, other, out=mine)

    def state(self) -> tuple[Tensor, int]:
        """What was added up so far, under masks: values, which share its memory, and sizes."""
        return torch.from_numpy(self._values), int(self._blocks[-1][0])

    def load_state(self, values: Tensor, sizes: int) -> None:
        """The inverse."""
        self._lay_out(values.numpy(), sizes)

    def _lay_out(self, values: Integers, sizes: int) -> None:
        self._values = values
        self._blocks = [values[part] for part in spans(len(values), _BLOCK)]
        self._blocks.append(np.array([sizes], np.uint16))

    def read(self, masks: KeyStreams, size: int, count: int) -> tuple[Tensor, int]:
        """The mean of so many sites, fp32, and the size that suits the next version."""
        step = step_of(size, self._bits) / count
        mean = torch.empty(self._num, dtype=torch.float32, device="cpu")
        for part, block in zip(spans(self._num, _BLOCK), self._blocks, strict=False):
            masks.apply(block)
            mean[part] = torch.from_numpy(_signed(block, self._width)[: part.stop - part.start])
        masks.apply(self._blocks[-1])
        total = int(self._blocks[-1][0])
        self._blocks = []
        del self._values
        return mean.mul_(step).view(self._shape), min(1023, max(1, round(total / count)))


def check_maskable(layout: Layout) -> None:
    """Refuse what no sum of integers stands for."""
    if odd := [name for name, spec in layout.items() if spec.role is not Role.PARAMETER]:
        raise UserError(
            f"{odd[0]} and {len(odd) - 1} other tensors are running statistics or moments, which "
            "no sum under masks gives; use networks without batch norm, or set codec.up=int4"
        )


def first_sizes(layout: Layout) -> bytes:
    """What the first contribution is rounded by: a size of 16 bits for each tensor."""
    return np.full(len(layout), FIRST_SIZE, "<u2").tobytes()


def step_of(size: int, bits: int) -> float:
    """Of rounding, for values of this size: 2^b steps reach from -(2 + b/4) to as many sizes."""
    spread = _reach(bits) / (1 << (bits - 1))
    return float(spread * 2.0 ** ((size - _MIDDLE) / _PER_OCTAVE))


def _reach(bits: int) -> float:
    """What is sent at most, in sizes."""
    return 2 + bits / 4


def size_of(rms: float) -> int:
    """A root mean square in eighths of an octave, 1 to 1,023; 0 of nothing."""
    return min(1023, max(1, round(_PER_OCTAVE * math.log2(rms)) + _MIDDLE)) if rms else 0


def _signed(block: Integers, width: int) -> NDArray[Any]:
    """Integers modulo 2^w as what they stand for, from -2^(w-1) on."""
    spare = 8 * block.itemsize - width
    signed: NDArray[Any] = np.left_shift(block, spare).view(f"i{block.itemsize}")
    return (signed >> spare).astype(np.float32)


def _pack(values: Integers, width: int) -> NDArray[Any]:
    """The low `width` bits, 1 to 16, of whole rows of values, which may be spoilt."""
    if width > 8:
        low, high = values.astype(np.uint8), (values >> 8).astype(np.uint8)
        return np.concatenate([low, _pack(high, width - 8)])
    words = values.view(np.uint64)
    for lane in (8, 16, 32):  # two fields become one, three times
        field = width * lane // 8
        mask = _fields(field, lane)
        words = (words & mask) | ((words >> np.uint64(lane) & mask) << np.uint64(field))
    return np.ascontiguousarray(words.view(np.uint8).reshape(-1, 8)[:, :width]).reshape(-1)


def _unpack(data: NDArray[Any], width: int) -> Integers:
    """The inverse; 8 bits each up to that width, else 16."""
    if width > 8:
        num = len(data) * 8 // width
        high = _unpack(data[num:], width - 8).astype(np.uint16)
        both: Integers = data[:num] | (high << 8)
        return both
    rows = np.zeros((len(data) // width, 8), np.uint8)
    rows[:, :width] = data.reshape(-1, width)
    words = rows.reshape(-1).view(np.uint64)
    for lane in (32, 16, 8):
        field = width * lane // 8
        mask = _fields(field, lane)
        words = (words & mask) | ((words >> np.uint64(field) & mask) << np.uint64(lane))
    return words.view(np.uint8)


def _fields(field: int, lane: int) -> np.uint64:
    """A mask of so many low bits in every second lane of a word."""
    return np.uint64(sum(((1 << field) - 1) << at for at in range(0, 64, 2 * lane)))
