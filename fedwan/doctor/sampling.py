"""A fixed random sample of what sites contribute, from which directions are compared.

Cosines between contributions need all of them at once, while the merger holds one accumulator
whatever the number of sites. So 4,096 places of each network are drawn, in runs of eight, the same
for all sites and rounds, and the values there are kept as each contribution is merged: 16 KiB for
each site and network. A cosine of such samples differs from that of the whole by about
1 / sqrt(4096) = 0.016 where values are of like size, by more where few values are most of the norm
(sparse codecs: about 0.12 at 1.6 % of the values); agreement by as much. Smaller networks are kept
whole.

For each contribution it costs some 10 microseconds a tensor of fp32 and 170 of block-wise codes,
whatever their size, and comparing them 0.3 ms a round of 4 sites. Picking only reads: the merged
bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import torch
from torch import Tensor

from fedwan.codecs import Coded
from fedwan.rng import derive_seed
from fedwan.state import Layout, Role, network_of

__all__ = ["NUM_PLACES", "Sample", "Sampler"]

NUM_PLACES = 4096
"""Of each network's part of a fragment."""
RUN = 8
"""Places that follow each other: block-wise codes are decoded by the block."""

Sample = dict[str, Tensor]
"""Values at the places of each network, fp32 (places,)."""


class Sampler:
    """The places of one fragment.

    Args:
        layout: of the fragment.
        num_places: of each network, at most.
    """

    def __init__(self, layout: Layout, num_places: int = NUM_PLACES) -> None:
        self._places: dict[str, Tensor] = {}
        """Places in each flat tensor, ascending."""
        by_network: dict[str, list[str]] = {}
        for name, spec in layout.items():
            if spec.role is Role.PARAMETER and spec.num_values:
                by_network.setdefault(network_of(name), []).append(name)
        for network, names in by_network.items():
            sizes = [layout[name].num_values for name in names]
            places = _draw(sum(sizes), num_places, network)
            first = 0
            for name, size in zip(names, sizes, strict=True):
                inside = places[(places >= first) & (places < first + size)]
                if len(inside):
                    self._places[name] = inside - first
                first += size

    def tap(
        self, tensors: Iterable[tuple[str, Coded]], into: Sample
    ) -> Iterator[tuple[str, Coded]]:
        """Pass coded tensors on, and keep their sample.

        Args:
            tensors: all of the layout, in its order.
            into: filled once the last tensor has been taken.
        """
        parts: dict[str, list[Tensor]] = {}
        for name, coded in tensors:
            if name in self._places:
                # Before the consumer has it, who may change what it is given.
                parts.setdefault(network_of(name), []).append(coded.pick(self._places[name]))
            yield name, coded
        into.update({network: torch.cat(values) for network, values in parts.items()})

    def of(self, state: Mapping[str, Tensor]) -> Sample:
        """The sample of plain tensors; a copy."""
        parts: dict[str, list[Tensor]] = {}
        for name, places in self._places.items():
            value = state[name].reshape(-1)[places].float()
            parts.setdefault(network_of(name), []).append(value)
        return {network: torch.cat(values) for network, values in parts.items()}


def _draw(size: int, num_places: int, network: str) -> Tensor:
    """Ascending places among so many values; a few less than asked for where some coincide."""
    if size <= num_places:
        return torch.arange(size)
    generator = torch.Generator().manual_seed(derive_seed("doctor", network, size))
    drawn = torch.randint(size // RUN, (num_places // RUN,), generator=generator).sort().values
    is_new = torch.ones(len(drawn), dtype=torch.bool)
    is_new[1:] = drawn[1:] != drawn[:-1]
    return (drawn[is_new].unsqueeze(1) * RUN + torch.arange(RUN)).flatten()
