"""Merging: contributions become one, in fp32, added in the order in which they are given.

The engine gives them in site order, whatever order they arrived in, so that a run with the same
seed ends with the same bits. Per tensor, by its role (weights w_i, W their sum):

    parameter   Σ w_i Δ_i / W
    mean        Σ w_i m_i / W
    variance    Σ w_i (v_i + m_i²) / W - m², the total variance, with m the merged mean; never < 0
    counter     the largest value

Memory: one accumulator of the fragment's size, however many sites there are, and one tensor of the
contribution at hand.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedwan.state import Layout, Role, State

__all__ = ["Merger"]


def _mean_of_variance(name: str) -> str:
    return name.removesuffix("running_var") + "running_mean"


class Merger:
    """Accumulates contributions of one fragment.

    Args:
        layout: of the fragment.
    """

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._sums: State = {}
        self._total = 0.0

    @property
    def total_weight(self) -> float:
        """Sum of the weights so far."""
        return self._total

    def add(self, tensors: Iterable[tuple[str, Tensor]], weight: float) -> None:
        """Add one checked contribution.

        Args:
            tensors: name and decoded value, all of the layout; taken one at a time.
            weight: above 0, e.g. samples over nominal samples (1 for an ordinary contribution, so
                that nothing is rounded for equal sites).
        """
        is_first = self._total == 0.0
        means: State = {}
        variances: State = {}
        for name, value in tensors:
            role = self._layout[name].role
            if role is Role.COUNTER:
                old = self._sums.get(name, value)
                self._sums[name] = torch.maximum(old, value).clone()
            elif role is Role.VARIANCE:
                variances[name] = value.float()
            else:
                if role is Role.MEAN:
                    means[name] = value.float()
                self._accumulate(name, value, weight, is_first)
        for name, value in variances.items():
            mean = means.get(_mean_of_variance(name))
            second = value if mean is None else value + mean.square()
            self._accumulate(name, second, weight, is_first)
        self._total += weight

    def _accumulate(self, name: str, value: Tensor, weight: float, is_first: bool) -> None:
        if not is_first:
            self._sums[name].add_(value, alpha=weight)
        else:
            self._sums[name] = value.float().mul(weight)

    def take(self) -> State:
        """The merged contribution, the caller's to keep; the accumulator starts anew.

        Parameters and means are fp32; counters keep their dtype.
        """
        assert self._total > 0, "nothing was merged"
        merged, self._sums = self._sums, {}
        for name, value in merged.items():
            if self._layout[name].role is not Role.COUNTER and self._total != 1.0:
                value.div_(self._total)
        for name in merged:
            if self._layout[name].role is Role.VARIANCE:
                mean = merged.get(_mean_of_variance(name))
                if mean is not None:
                    merged[name] = (merged[name] - mean.square()).clamp_min_(0.0)
        self._total = 0.0
        return {name: merged[name] for name in self._layout}
