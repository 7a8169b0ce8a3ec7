"""Fragments: which tensors travel together, and at which steps.

A part of the generator always travels with its part of the discriminator, so that both networks
carry one version. Each fragment has a version of its own from the start, whatever their number.
"""

from __future__ import annotations

from dataclasses import dataclass

from fedwan.state import Layout, Role

__all__ = ["Fragment", "is_due", "whole"]


@dataclass(frozen=True)
class Fragment:
    """Named tensors that travel together."""

    index: int
    """Its number on the wire."""
    layout: Layout
    """What it holds, in name order."""
    offset: int = 0
    """Steps by which its uploads are shifted in the schedule, below H."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors as fp32 parameters and raw buffers, before any framing."""
        return sum(
            spec.num_values * (4 if spec.role is Role.PARAMETER else spec.dtype.itemsize)
            for spec in self.layout.values()
        )


def whole(layout: Layout) -> tuple[Fragment, ...]:
    """All tensors in one fragment: DiLoCo (2311.08105) and federated averaging."""
    return (Fragment(0, dict(sorted(layout.items()))),)


def is_due(fragment: Fragment, step: int, h: int) -> bool:
    """Whether the fragment is uploaded after completed step `step` (counted from 1).

    >>> f = whole({})[0]
    >>> [step for step in range(1, 9) if is_due(f, step, 4)]
    [4, 8]
    """
    return step > fragment.offset and (step - fragment.offset) % h == 0
