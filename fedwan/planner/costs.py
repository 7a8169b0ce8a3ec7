"""What coding, merging and copying take, in seconds per value of the model.

Defaults are one core of the machine of docs/results.md: `benchmarks/codecs.py` for the codecs,
docs/log.md ("codecs in plain torch") for the rest. A calibration replaces those of the codecs by
what it measures on the machine at hand. What packing takes is left out: it goes on beside sending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

__all__ = ["Costs", "Speed"]


class Speed(NamedTuple):
    """Of a codec, seconds per value."""

    encode_s: float
    add_s: float
    """To decode and add."""
    packed: float = 1.0
    """What packing leaves of its bytes (`fedwan.link.framing`)."""


def _of_table(encode_mb: float, add_mb: float, packed: float) -> Speed:
    """From MB/s of fp32, as docs/results.md has them; packed, what is left of normal values."""
    return Speed(4e-6 / encode_mb, 4e-6 / add_mb, packed)


def _codecs() -> dict[str, Speed]:
    return {
        "fp32": _of_table(26_991, 10_079, 0.924),
        "bf16": _of_table(5_909, 7_143, 0.777),
        "int8": _of_table(3_034, 6_777, 0.938),
        "int4": _of_table(2_840, 4_845, 0.845),
        "float4": _of_table(1_810, 3_885, 0.872),
        "topk2": _of_table(588, 3_325, 1.0),
    }


_LOGGED_VALUES = 57_182_660
"""Of the model whose times docs/log.md has."""


@dataclass(frozen=True)
class Costs:
    """Seconds per value."""

    codecs: Mapping[str, Speed] = field(default_factory=_codecs)
    """By name; one that is missing costs as much as the slowest of them."""
    check_s: float = 0.040 / _LOGGED_VALUES
    """To check a contribution: layout, checksum, all values finite."""
    outer_s: float = (0.105 + 0.043 + 0.015) / _LOGGED_VALUES
    """Outer step, commit and moving average, once a round."""
    copy_s: float = 0.3e-9
    """To copy or blend a value that is in memory: 12 bytes at 40 GB/s."""

    stands_for: float = 1.0
    """Sites for which each simulated one stands, whose contributions are merged as well, and whose
    updates are fetched where each makes one."""

    packs: bool = True
    """Whether what travels is packed: the link is slow enough, and nobody forbade it."""

    def left(self, codec: str) -> float:
        """Share of a codec's bytes that travels."""
        return self.speed(codec).packed if self.packs else 1.0

    def speed(self, codec: str) -> Speed:
        """Of a codec."""
        if codec in self.codecs:
            return self.codecs[codec]
        known = self.codecs.values()
        return Speed(*(max(figures) for figures in zip(*known, strict=True)))
