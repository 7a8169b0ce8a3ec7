"""A site's own look ahead: the outer step as far as it knows it (see `fedwan.overlap`).

Memory: c, one fp32 copy of every parameter, from its fragment's first landing on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.fragments import Fragment
from fedwan.overlap import Eager
from fedwan.state import Role, State, network_of

__all__ = ["LookAhead"]


class LookAhead:
    """Estimates of the next global weights, fragment by fragment.

    Args:
        parts: what is known, by network.
        base: the global weights, which others move.
    """

    def __init__(self, parts: Mapping[str, Eager], base: State) -> None:
        self._parts = parts
        self._base = base
        self._push: State = {}
        """The momentum's, c."""

    def forget(self) -> None:
        """The momentum is not known any more: c is taken for 0, and found again in some rounds."""
        self._push.clear()

    def estimate(
        self, delta: State, write: Callable[[str, Tensor], object], fragment: Fragment
    ) -> None:
        """E ← g - share Δ + c for a fragment's parameters.

        Args:
            delta: holds Δ.
            write: gets each name and e; it may write into `delta`.
            fragment: which.
        """
        for name, part in self._each(fragment):
            value = torch.add(self._base[name], delta[name], alpha=-part.share)
            if name in self._push:
                value.add_(self._push[name])
            write(name, value)

    def correct(self, estimate: State, fragment: Fragment) -> None:
        """E ← g' - e for a fragment's parameters, in place: by how much the estimate was wrong."""
        for name, _ in self._each(fragment):
            value: Tensor = estimate[name]
            torch.sub(self._base[name], value, out=value)

    def learn(self, payload: Source, fragment: Fragment, codec: Codec) -> None:
        """C ← (μ c + μ² (g' - g)) / (1 + μ), from the update g' - g as it came."""
        parts = dict(self._each(fragment))
        for name, coded in codec.read_each(payload, fragment.layout):
            if name in parts and parts[name].momentum:
                momentum = parts[name].momentum
                if name not in self._push:
                    self._push[name] = torch.zeros_like(self._base[name])
                self._push[name].mul_(momentum / (1 + momentum))
                coded.add_to(self._push[name], momentum**2 / (1 + momentum))

    def _each(self, fragment: Fragment) -> Iterator[tuple[str, Eager]]:
        for name, spec in fragment.layout.items():
            if spec.role is Role.PARAMETER:
                yield name, self._parts[network_of(name)]
