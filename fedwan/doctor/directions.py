"""How contributions lie to each other, by network, from samples of them.

    cosine      of a contribution with the mean of the other sites' latest ones
    agreement   |mean Δ|² / mean |Δ|² over the sites' latest ones: 1 where all are the same,
                1 / sites where they are orthogonal, as those of shards that differ are
    backward    largest cosine of a contribution with what the global weights moved by in the last
                one, two or three updates

Who goes on as the others do lies against the last updates; who trained from old weights asks to
undo them. Of one site alone, or before the first update, there is nothing to compare with.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from fedwan.doctor.sampling import Sample

__all__ = ["Direction", "Directions", "agreement_of", "cosine_of"]

MOVES = 3
"""Updates that `backward` looks back."""


class Direction(NamedTuple):
    """Of one contribution; networks without a comparison are left out."""

    cosines: dict[str, float]
    agreement: dict[str, float]
    backward: dict[str, float]


class Directions:
    """Compares the contributions to one fragment.

    Memory: the latest sample of each site, and four of the global weights.
    """

    def __init__(self) -> None:
        self._latest: dict[str, Sample] = {}
        self._past: deque[Sample] = deque(maxlen=MOVES + 1)

    def compare(self, contributed: Mapping[str, Sample], before: Sample) -> dict[str, Direction]:
        """Directions by site of what one round merged.

        Args:
            contributed: by site.
            before: of the global weights that the round started from.
        """
        self._past.append(before)
        self._latest.update(contributed)
        present = self._past[-1]
        moves = [
            {network: value - past[network] for network, value in present.items()}
            for past in list(self._past)[:-1]
        ]
        agreement = {
            network: agreement_of([sample[network] for sample in self._latest.values()])
            for network in present
            if len(self._latest) > 1
        }
        sums = {
            network: torch.stack([s[network] for s in self._latest.values()]).sum(0)
            for network in present
        }
        return {
            site: Direction(
                self._cosines(sample, sums),
                agreement,
                {
                    network: max(cosine_of(value, move[network]) for move in moves)
                    for network, value in sample.items()
                    if moves
                },
            )
            for site, sample in contributed.items()
        }

    def _cosines(self, sample: Sample, sums: Sample) -> dict[str, float]:
        """With the others' sum, which has the direction of their mean."""
        if len(self._latest) < 2:
            return {}
        return {network: cosine_of(v, sums[network] - v) for network, v in sample.items()}


def cosine_of(one: Tensor, other: Tensor) -> float:
    """Cosine of two vectors; 0 where one of them is 0."""
    norms = float(torch.linalg.vector_norm(one) * torch.linalg.vector_norm(other))
    return float(torch.dot(one, other)) / norms if norms else 0.0


def agreement_of(values: Sequence[Tensor]) -> float:
    """|mean|² / mean |·|² of vectors; 0 where all are 0."""
    stacked = torch.stack(list(values))
    mean_square = float(stacked.square().sum(1).mean())
    return float(stacked.mean(0).square().sum()) / mean_square if mean_square else 0.0
