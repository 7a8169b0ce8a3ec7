"""A codec: tensors to payload at the sender, payload to tensors at the receiver.

`encode(tensors, residual, layout) -> (payload, residual)`. `read_each(payload, layout)` gives coded
tensors, which a receiver adds to what it holds without a decoded copy; `decode` gives copies. The
residual is what error feedback still owes, an explicit state of the sender. Parameters go through
the codec; all else (running means, counters) is written raw: it is small and must arrive exactly.
"""

from __future__ import annotations

# ruff: noqa: D102 (what a `Coded` does is said once)
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.codecs.payload import (
    RAW,
    Bytes,
    Entry,
    Payload,
    Source,
    framed_bytes,
    make_head,
    read_records,
    tensor_from_bytes,
)
from fedwan.errors import PayloadError, UserError
from fedwan.state import Layout, Role, State, TensorSpec, tensor_bytes

CPU_SPAN = 1 << 18
"""Values worked on at a time on a CPU, 1 MiB of fp32: of fewer, starting the operations shows."""
DEVICE_SPAN = 1 << 25
"""Values at a time elsewhere: few launches, and temporaries of 128 MiB at most."""
_MOST_AT_ONCE = DEVICE_SPAN // 2
"""Values of tensors that are coded together, each with all temporaries that it takes."""


Piece = tuple[slice | Tensor, Tensor, Tensor | None]
"""Where in the flat tensor (a slice, or indices, all in one piece, and 0 elsewhere); values there,
(n,) or [rows, n]; and what each row is still to be multiplied by, [rows, 1], exactly."""


class Coded(ABC):
    """One tensor of a payload, still coded; good until the next one is taken.

    All ways to read it give the same bits. Targets have the tensor's shape and may be on any
    device; only coded bytes cross to it. What the record claims (indices, scales) was checked
    when this was made, so that nothing is half added when a payload lies.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        self.shape = shape

    @abstractmethod
    def pieces(self, device: torch.device | None = None) -> Iterator[Piece]:
        """All values, on a device, or where the record is.

        Where there is a factor, they are the caller's to spoil until the next are taken.
        """

    @abstractmethod
    def pick(self, index: Tensor) -> Tensor:
        """A copy, fp32 (n,), of the values at places of the flat tensor, int64 (n,), ascending."""

    def tensor(self) -> Tensor:
        """The decoded tensor; it may share the payload's memory: do not write to it."""
        # Whatever a script has made torch's default.
        target = torch.empty(self.shape, dtype=torch.float32, device="cpu")
        self.write_to(target)
        return target

    def write_to(self, target: Tensor) -> None:
        """Target = decoded, in place."""
        if not is_run(target):
            target.copy_(self.tensor())
            return
        flat = target.view(-1)
        for where, values, factor in self.pieces(target.device):
            if isinstance(where, Tensor):
                flat.zero_().index_copy_(0, where, values)
                continue
            rows = flat[where].view(values.shape)
            rows.copy_(values) if factor is None else torch.mul(values, factor, out=rows)

    def add_to(self, target: Tensor, weight: float = 1.0) -> None:
        """Target += weight * decoded, in place; rounded as `target.add_(decoded, alpha=weight)`."""
        if not is_run(target):
            target.add_(self.tensor().to(target.device, target.dtype), alpha=weight)
            return
        flat = target.view(-1)
        for where, values, factor in self.pieces(target.device):
            rows = flat[where].view(values.shape)
            if isinstance(where, Tensor):
                flat.index_copy_(0, where, rows.add_(values, alpha=weight))
            elif factor is None:
                rows.add_(values, alpha=weight)
            elif weight == 1.0:
                rows.addcmul_(values, factor)  # the product is exact: one rounding, fused or not
            else:
                rows.add_(values.mul_(factor), alpha=weight)

    def sum_of_squares(self) -> float:
        """Of the decoded values; not finite if one of them is not, or is too large to square."""
        total = 0.0
        for _, values, factor in self.pieces():
            flat = (values if factor is None else values.mul_(factor)).reshape(-1)
            total += float(torch.dot(flat, flat))
        return total


def is_run(target: Tensor) -> bool:
    """Whether coded values can be written straight into it."""
    return target.dtype == torch.float32 and target.is_contiguous()


def span_values(num_values: int, device: torch.device) -> int:
    """How many values of so many to work on at a time."""
    return min(num_values, CPU_SPAN if device.type == "cpu" else DEVICE_SPAN)


def spans(num_values: int, size: int) -> Iterator[slice]:
    """Cut so many values into spans of a size; the last one may be shorter."""
    for start in range(0, num_values, max(1, size)):
        yield slice(start, min(start + size, num_values))


class Plain(Coded):
    """Values in some dtype, which may share the payload's memory; decoded to `dtype`, or as is."""

    def __init__(self, value: Tensor, dtype: torch.dtype | None = None) -> None:
        super().__init__(tuple(value.shape))
        self._value, self._dtype = value, dtype or value.dtype

    def tensor(self) -> Tensor:
        return self._value.to(self._dtype)

    def write_to(self, target: Tensor) -> None:
        target.copy_(self._value)

    def add_to(self, target: Tensor, weight: float = 1.0) -> None:
        if self._value.dtype == target.dtype:
            target.add_(self._value.to(target.device), alpha=weight)
        else:
            super().add_to(target, weight)

    def pieces(self, device: torch.device | None = None) -> Iterator[Piece]:
        flat = self._value.to(device).reshape(-1)
        for span in spans(len(flat), span_values(len(flat), flat.device)):
            # Half precision is widened: its squares overflow long before its values do.
            part = flat[span]
            yield span, part if part.dtype is torch.float64 else part.float(), None

    def pick(self, index: Tensor) -> Tensor:
        return self._value.reshape(-1)[index].to(self._dtype).float()


def plain(state: Mapping[str, Tensor]) -> dict[str, Coded]:
    """Tensors that were never coded, for who reads coded ones; no copies."""
    return {name: Plain(value) for name, value in state.items()}


EncodeMany = Callable[
    [Sequence[Tensor], Sequence[Tensor | None] | None],
    tuple[list[list[memoryview]], list[Tensor]],
]


class Codec(NamedTuple):
    """How parameters are written. A new codec is a file that makes one of these."""

    name: str
    """As in the config: `fp32`, `bf16`, …"""
    encoding: int
    """Its number in a payload's table, from 1 on."""
    encode_tensor: Callable[[Tensor, Tensor | None], tuple[memoryview, Tensor | None]]
    """(value, residual or None) -> (record, residual or None). With feedback what is owed may take
    the value's memory, and had better."""
    read_tensor: Callable[[Bytes, TensorSpec], Coded]
    """(record of the right length, spec) -> coded tensor, which decodes to fp32 of the spec's shape
    and may share the record's memory. Raises a `PayloadError`, whose text goes on after the
    tensor's name, if the record claims what cannot be."""
    record_bytes: Callable[[TensorSpec], int]
    """Exact bytes of a tensor's record."""
    is_exact: bool = False
    """Whether fp32 values come out as they went in, bit for bit."""
    has_feedback: bool = False
    """Whether it keeps a residual: what it did not send now, it sends later."""
    encode_owing: Callable[[Tensor, Tensor | None], tuple[memoryview, Tensor | None]] | None = None
    """`encode_tensor` with error feedback, where that can be had in the same pass."""
    encode_many: EncodeMany | None = None
    """`encode_tensor` of tensors of one device at once, for a GPU: (values, residuals or None
    without feedback) -> (the parts of each record, what each owes)."""
    add_many: Callable[[Sequence[Coded], Sequence[Tensor]], None] | None = None
    """`Coded.add_to` of many at once, for a GPU: (coded, flat fp32 targets of one device)."""
    mask_bits: int = 0
    """Of a value under masks, which only the sum of all sites is free of; 0 without masks."""

    def encode(
        self, tensors: Mapping[str, Tensor], residual: State, layout: Layout
    ) -> tuple[Payload, State]:
        """Encode a layout's tensors, of any device and float dtype; `residual` starts as {}.

        They are taken one at a time: a lazy mapping holds no more than one. With feedback, what is
        owed may take a tensor's own memory, so that the tensor is lost; the residual stays.
        """
        payload = self.grow(layout)
        owed = self.encode_into(payload, tensors, residual, layout)
        payload.checksum = payload.digest()
        payload.finish()
        return payload, owed

    def grow(self, layout: Layout) -> Payload:
        """An empty payload of this layout, for `encode_into`; it can be read from at once."""
        return Payload([make_head(self._entries(layout))], num_bytes=self.payload_bytes(layout))

    def encode_into(
        self, payload: Payload, tensors: Mapping[str, Tensor], residual: State, layout: Layout
    ) -> State:
        """As `encode`, into what `grow` made; readers get each tensor as soon as it is coded.

        They wait for its end until `Payload.finish`, and are told of whatever stops the encoding.
        """
        owed: State = {}
        try:
            group: State = {}
            held = 0
            for name, spec in layout.items():
                value = tensors[name]
                if tuple(value.shape) != spec.shape:
                    raise ValueError(f"{name!r} has shape {tuple(value.shape)}, not {spec.shape}")
                if group and value.device != next(iter(group.values())).device:
                    owed |= self._put(payload, group, residual, layout)
                    group, held = {}, 0
                group[name], held = value, held + value.numel()
                if held > _MOST_AT_ONCE or value.device.type == "cpu":
                    owed |= self._put(payload, group, residual, layout)
                    group, held = {}, 0
            owed |= self._put(payload, group, residual, layout)
        except BaseException as error:
            payload.fail(error)
            raise
        return owed

    def _put(
        self, payload: Payload, values: Mapping[str, Tensor], residual: State, layout: Layout
    ) -> State:
        """Append the records of some tensors; what they owe."""
        params = {n: v for n, v in values.items() if layout[n].role is Role.PARAMETER}
        small = {n: v for n, v in params.items() if v.numel() <= _MOST_AT_ONCE}
        records: dict[str, list[memoryview]] = {}
        owed: State = {}
        if self.encode_many is not None and len(small) > 1:
            before = [residual.get(name) for name in small] if self.has_feedback else None
            found, rests = self.encode_many(list(small.values()), before)
            records = dict(zip(small, found, strict=True))
            owed = dict(zip(small, rests, strict=False))
        for name, value in values.items():
            if name in params and name not in records:
                record, rest = self.encode_tensor(value, residual.get(name))
                records[name] = [record]
                if len(record) != (said := self.record_bytes(layout[name])):
                    raise UserError(
                        f"codec {self.name} made {len(record)} bytes of {name!r}, where its "
                        f"record_bytes says {said}"
                    )
                if rest is not None:
                    owed[name] = rest
            payload.append(*records.get(name) or [tensor_bytes(value.to(layout[name].dtype))])
        return owed

    def payload_bytes(self, layout: Layout) -> int:
        """Exact length of a payload of this layout, known before any tensor is."""
        return framed_bytes(self._entries(layout))

    def _entries(self, layout: Layout) -> list[Entry]:
        return [
            Entry(name, self.encoding, spec, self.record_bytes(spec))
            if spec.role is Role.PARAMETER
            else Entry(name, RAW, spec, spec.num_values * spec.dtype.itemsize)
            for name, spec in layout.items()
        ]

    def read_each(self, payload: Source, layout: Layout) -> Iterator[tuple[str, Coded]]:
        """One coded tensor at a time: fp32 for parameters, the layout's dtype for the rest.

        It is good until the next one is taken, unless the source's bytes stay, as a `Payload`'s do.
        A `PayloadError` as of `read_records`, or where a record claims what cannot be.
        """
        for (name, _, spec, _), data in read_records(payload, self._entries(layout)):
            if spec.role is not Role.PARAMETER:
                yield name, Plain(tensor_from_bytes(data, spec.dtype, spec.shape))
                continue
            try:
                coded = self.read_tensor(data, spec)
            except PayloadError as error:
                raise PayloadError(f"tensor {name!r} {error}") from None
            except Exception as error:  # of a codec of somebody's own
                text = f"{type(error).__name__}: {error}"
                raise PayloadError(f"codec {self.name} cannot read {name!r}: {text}") from error
            yield name, coded

    def add_each(self, pairs: Iterable[tuple[Coded, Tensor]]) -> None:
        """Target += decoded, in place, of coded tensors that stay good; on a GPU many at once."""
        group: list[tuple[Coded, Tensor]] = []
        held = 0

        def add() -> None:
            if self.add_many is not None and group:
                coded, targets = zip(*group, strict=True)
                self.add_many(coded, [target.view(-1) for target in targets])
            group.clear()

        for coded, target in pairs:
            if self.add_many is None or target.device.type == "cpu" or not is_run(target):
                coded.add_to(target)
                continue
            held += target.numel()
            if group and (held > _MOST_AT_ONCE or target.device != group[0][1].device):
                add()
                held = target.numel()
            group.append((coded, target))
        add()

    def decode(self, payload: Source, layout: Layout) -> State:
        """All tensors of a payload, checked whole before any is returned; copies."""
        return {name: coded.tensor().clone() for name, coded in self.read_each(payload, layout)}


class Reading:
    """A payload's coded tensors, to be read any number of times; each as `Codec.read_each`."""

    def __init__(self, codec: Codec, payload: Source, layout: Layout) -> None:
        self._read = partial(codec.read_each, payload, layout)

    def __iter__(self) -> Iterator[tuple[str, Coded]]:
        return self._read()


def with_feedback(codec: Codec) -> Codec:
    """Error feedback around any codec: what its coding loses now is sent with the next value.

        a = e + value        sent: Q(a)        e = a - Q(a)

    Seide et al. 2014; Karimireddy et al. 2019 (1901.09847), algorithm 2. The same on the wire; an
    exact codec, and one that has feedback, as they are. Memory: the residual, fp32, in place of
    what is encoded where that is fp32 and contiguous. Time: a decoding besides.
    """
    if codec.is_exact or codec.has_feedback:
        return codec
    if codec.encode_owing:
        return codec._replace(encode_tensor=codec.encode_owing, has_feedback=True)

    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        owed = value.detach().float().contiguous()
        if residual is not None:
            owed += residual.to(owed.device).view(owed.shape)
        record, _ = codec.encode_tensor(owed, None)
        spec = TensorSpec(tuple(owed.shape), torch.float32, Role.PARAMETER)
        with suppress(PayloadError):  # values that are not finite: every reader refuses it
            codec.read_tensor(record, spec).add_to(owed, -1.0)
        return record, owed

    return codec._replace(encode_tensor=encode, has_feedback=True)


def fp32() -> Codec:
    """32 bits a value, exact. No copy is made of a contiguous fp32 CPU tensor."""
    return _float_codec("fp32", 1, torch.float32, is_exact=True)


def bf16() -> Codec:
    """16 bits a value, rounded to nearest even."""
    return _float_codec("bf16", 2, torch.bfloat16)


def _float_codec(name: str, encoding: int, dtype: torch.dtype, is_exact: bool = False) -> Codec:
    def encode(value: Tensor, residual: Tensor | None) -> tuple[memoryview, Tensor | None]:
        return tensor_bytes(value.detach().to(dtype)), None

    def read(data: Bytes, spec: TensorSpec) -> Coded:
        return Plain(tensor_from_bytes(data, dtype, spec.shape), torch.float32)

    def record_bytes(spec: TensorSpec) -> int:
        return dtype.itemsize * spec.num_values

    return Codec(name, encoding, encode, read, record_bytes, is_exact)
