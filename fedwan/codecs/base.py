"""A codec: tensors to payload at the sender, payload to tensors at the receiver.

`encode(tensors, residual) -> (payload, residual)`. `read_each(payload, layout)` gives coded
tensors, which a receiver adds to what it holds without a decoded copy; `decode` gives copies. The
residual is what error feedback still owes, an explicit state of the sender; codecs without error
feedback return it as they got it. Parameters go through the codec; everything else (running means,
variances, counters) is written raw, since it is small and must arrive exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from fedwan.codecs.coded import Coded, Plain
from fedwan.codecs.growing import GrowingPayload
from fedwan.codecs.payload import (
    RAW,
    Bytes,
    Payload,
    Record,
    Source,
    build,
    framed_bytes,
    make_head,
    read_records,
    tensor_bytes,
    tensor_from_bytes,
)
from fedwan.errors import PayloadError
from fedwan.state import Layout, Role, State, TensorSpec

__all__ = ["Codec"]


class Codec(NamedTuple):
    """How parameters are written; one file per codec makes one of these."""

    name: str
    """As in the config: `fp32`, `bf16`, …"""
    encoding: int
    """Its number in a payload's table."""
    encode_tensor: Callable[[Tensor, Tensor | None], tuple[memoryview, Tensor | None]]
    """(value, residual or None) -> (record, residual or None)."""
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

    def encode(
        self, tensors: Mapping[str, Tensor], residual: State, layout: Layout
    ) -> tuple[Payload, State]:
        """Encode the tensors of a layout, taking them from the mapping one at a time.

        A lazy mapping thus never holds more than one unencoded tensor. Inputs are not mutated.

        Args:
            tensors: at least the layout's names; parameters on any device, in any float dtype.
            residual: what earlier calls still owe; start with {}.
            layout: names, shapes, dtypes and roles, known to the receiver too.
        """
        new_residual: State = {}
        records = self._records(tensors, residual, layout, new_residual)
        return build(records), new_residual

    def grow(self, layout: Layout) -> GrowingPayload:
        """An empty payload of this layout, for `encode_into`; it can be read from at once."""
        head = make_head(
            (name, self._encoding_of(name, spec), spec, self._bytes_of(name, spec))
            for name, spec in layout.items()
        )
        return GrowingPayload(head, self.payload_bytes(layout))

    def encode_into(
        self,
        growing: GrowingPayload,
        tensors: Mapping[str, Tensor],
        residual: State,
        layout: Layout,
    ) -> State:
        """As `encode`, into what `grow` made; readers get each tensor as soon as it is coded.

        Raises:
            Exception: whatever stopped the encoding; readers are told too.
        """
        new_residual: State = {}
        try:
            for record in self._records(tensors, residual, layout, new_residual):
                growing.append(record.data)
            growing.finish()
        except BaseException as error:
            growing.fail(error)
            raise
        return new_residual

    def _records(
        self, tensors: Mapping[str, Tensor], residual: State, layout: Layout, owed: State
    ) -> Iterator[Record]:
        """Each tensor's record in turn; what is owed from now on goes into `owed`."""
        for name, spec in layout.items():
            value = tensors[name]
            if tuple(value.shape) != spec.shape:
                raise ValueError(f"{name!r} has shape {tuple(value.shape)}, not {spec.shape}")
            if spec.role is Role.PARAMETER:
                data, rest = self.encode_tensor(value, residual.get(name))
                if rest is not None:
                    owed[name] = rest
            else:
                data = tensor_bytes(value.to(spec.dtype))
            yield Record(name, self._encoding_of(name, spec), spec, data)

    def _encoding_of(self, name: str, spec: TensorSpec) -> int:
        return self.encoding if spec.role is Role.PARAMETER else RAW

    def _bytes_of(self, name: str, spec: TensorSpec) -> int:
        if spec.role is Role.PARAMETER:
            return self.record_bytes(spec)
        return spec.num_values * spec.dtype.itemsize

    def payload_bytes(self, layout: Layout) -> int:
        """Exact length of a payload of this layout, known before any tensor is."""
        return framed_bytes(
            (name, spec, self._bytes_of(name, spec)) for name, spec in layout.items()
        )

    def read_each(self, payload: Source, layout: Layout) -> Iterator[tuple[str, Coded]]:
        """One coded tensor at a time: fp32 for parameters, the layout's dtype for the rest.

        A coded tensor is good until the next one is taken, unless the source's bytes stay where
        they are, as a `Payload`'s do.

        Raises:
            PayloadError: see `read_records`; a wrong checksum shows only after the last tensor. Or
                a record claims what cannot be: scales that are not finite, indices out of range.
        """
        known = {RAW, self.encoding}
        for entry, data in read_records(payload, layout, known):
            name, spec = entry.name, entry.spec
            encoding, num_bytes = self._encoding_of(name, spec), self._bytes_of(name, spec)
            if entry.encoding != encoding:
                raise PayloadError(
                    f"tensor {name!r} of role {spec.role.value} is in encoding {entry.encoding}, "
                    f"expected {encoding}; set the same codec on both sides"
                )
            if len(data) != num_bytes:
                raise PayloadError(
                    f"record of {name!r} has {len(data)} bytes, expected {num_bytes}"
                )
            if spec.role is not Role.PARAMETER:
                yield name, Plain(tensor_from_bytes(data, spec.dtype, spec.shape))
                continue
            try:
                coded = self.read_tensor(data, spec)
            except PayloadError as error:
                raise PayloadError(f"tensor {name!r} {error}") from None
            yield name, coded

    def decode_each(self, payload: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """As `read_each`, decoded.

        Tensors may share memory with the payload: do not write to them, and copy what is to be
        kept when the next one is taken.
        """
        for name, coded in self.read_each(payload, layout):
            yield name, coded.tensor()

    def decode(self, payload: Source, layout: Layout) -> State:
        """All tensors of a payload, checked whole before any is returned; copies."""
        return {name: value.clone() for name, value in self.decode_each(payload, layout)}
