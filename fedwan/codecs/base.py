"""A codec: tensors to payload at the sender, payload to tensors at the receiver.

`encode(tensors, residual) -> (payload, residual)` and `decode(payload, layout) -> tensors`. The
residual is what error feedback still owes, an explicit state of the sender; codecs without error
feedback return it as they got it. Parameters go through the codec; everything else (running means,
variances, counters) is written raw, since it is small and must arrive exactly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

from torch import Tensor

from fedwan.codecs.payload import (
    RAW,
    Bytes,
    Payload,
    Record,
    Source,
    build,
    framed_bytes,
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
    decode_tensor: Callable[[Bytes, TensorSpec], Tensor]
    """(record, spec) -> fp32 tensor of the spec's shape; may share the record's memory."""
    record_bytes: Callable[[TensorSpec], int]
    """Exact bytes of a tensor's record."""
    is_exact: bool = False
    """Whether fp32 values come out as they went in, bit for bit."""

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

        def records() -> Iterator[Record]:
            for name, spec in layout.items():
                value = tensors[name]
                if tuple(value.shape) != spec.shape:
                    raise ValueError(f"{name!r} has shape {tuple(value.shape)}, not {spec.shape}")
                if spec.role is Role.PARAMETER:
                    data, owed = self.encode_tensor(value, residual.get(name))
                    if owed is not None:
                        new_residual[name] = owed
                    yield Record(name, self.encoding, spec, data)
                else:
                    yield Record(name, RAW, spec, tensor_bytes(value.to(spec.dtype)))

        return build(records()), new_residual

    def payload_bytes(self, layout: Layout) -> int:
        """Exact length of a payload of this layout, known before any tensor is."""
        return framed_bytes(
            (
                name,
                spec,
                self.record_bytes(spec)
                if spec.role is Role.PARAMETER
                else spec.num_values * spec.dtype.itemsize,
            )
            for name, spec in layout.items()
        )

    def decode_each(self, payload: Source, layout: Layout) -> Iterator[tuple[str, Tensor]]:
        """Decode one tensor at a time: fp32 for parameters, the layout's dtype for the rest.

        Tensors may share memory with the payload: do not write to them, and copy what is to be
        kept when the next one is taken.

        Raises:
            PayloadError: see `read_records`; a wrong checksum shows only after the last tensor.
        """
        for entry, data in read_records(payload, layout, {RAW, self.encoding}):
            is_parameter = entry.spec.role is Role.PARAMETER
            if is_parameter != (entry.encoding == self.encoding):
                raise PayloadError(
                    f"tensor {entry.name!r} is in encoding {entry.encoding}, which does not suit "
                    f"its role {entry.spec.role.value}; refused"
                )
            if is_parameter:
                self._check_size(entry.name, data, self.record_bytes(entry.spec))
                yield entry.name, self.decode_tensor(data, entry.spec)
            else:
                raw_bytes = entry.spec.num_values * entry.spec.dtype.itemsize
                self._check_size(entry.name, data, raw_bytes)
                yield entry.name, tensor_from_bytes(data, entry.spec.dtype, entry.spec.shape)

    def decode(self, payload: Source, layout: Layout) -> State:
        """All tensors of a payload, checked whole before any is returned; copies."""
        return {name: value.clone() for name, value in self.decode_each(payload, layout)}

    @staticmethod
    def _check_size(name: str, data: Bytes, expected: int) -> None:
        if len(data) != expected:
            raise PayloadError(f"record of {name!r} has {len(data)} bytes, expected {expected}")
