"""Merging: contributions become one, in fp32, added in the order in which they are given.

The engine gives them in site order, whatever order they arrived in, so that a run with the same
seed ends with the same bits. Per tensor, by its role (weights w_i, W their sum):

    parameter   Σ w_i Δ_i / W
    mean        Σ w_i m_i / W
    variance    Σ w_i (v_i + (m_i - m)²) / W, the total variance, with m the merged mean
    counter     the largest value

Variances are pooled one contribution at a time (Chan, Golub and LeVeque 1979, eq. 2.1): every term
is a square times a weight, so that nothing cancels and the result is never below zero. Weights
count in units of the first one: contributions of equal weight are summed without any rounding of
weights, and a single contribution is returned as it is.

Where the strategy has it so, parameters are summed instead: Σ w_i Δ_i / w_1.

Late contributions are scaled: their parameters' deltas by s_i, while their weight w_i stays in W.

Memory: one accumulator of the fragment's size, however many sites there are, and copies of the
running means and variances of the contribution at hand, which are small. Its parameters are added
from their coded form, so that no decoded copy of them exists.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from fedwan.codecs import Coded
from fedwan.doctor.sampling import Sample, Sampler
from fedwan.state import Layout, Role, State


def _mean_of_variance(name: str) -> str:
    return name.removesuffix("running_var") + "running_mean"


class Merger:
    """Accumulates contributions of one fragment; parameters' are summed if `is_sum`."""

    def __init__(self, layout: Layout, *, is_sum: bool = False) -> None:
        self._layout = layout
        self._is_sum = is_sum
        self.sampler = Sampler(layout)
        self._sums: State = {}
        self._unit = 0.0
        self._total = 0.0
        self._stats_total = 0.0
        """As `_total`, with the weight of statistics that were kept."""

    @property
    def total_weight(self) -> float:
        """Sum of the weights so far."""
        return self._total * self._unit

    def keep(self, state: State, weight: float) -> None:
        """Let present running statistics take part: one contribution must not replace them."""
        assert not self._total, "statistics are kept before contributions are added"
        self._unit = 1.0
        for name, spec in self._layout.items():
            if spec.role in (Role.MEAN, Role.VARIANCE):
                self._sums[name] = state[name].to(torch.float32) * weight
        self._stats_total = weight

    def add(
        self, tensors: Iterable[tuple[str, Coded]], weight: float, scale: float = 1.0
    ) -> Sample:
        """Add one checked contribution; a sample of its deltas, not scaled."""
        assert weight > 0, f"weight {weight} of a contribution"
        self._unit = self._unit or weight
        share = weight / self._unit
        means: State = {}
        variances: State = {}
        sample: Sample = {}
        for name, coded in self.sampler.tap(tensors, sample):
            role = self._layout[name].role
            if role is Role.COUNTER:
                value = coded.tensor()
                self._sums[name] = torch.maximum(self._sums.get(name, value), value).clone()
            elif role is Role.VARIANCE:
                variances[name] = coded.tensor().to(torch.float32, copy=True)
            elif role is Role.MEAN:
                means[name] = coded.tensor().to(torch.float32, copy=True)
            elif self._total:
                coded.add_to(self._sums[name], share * scale)
            else:
                self._sums[name] = torch.empty(self._layout[name].shape)
                coded.write_to(self._sums[name])
                if share * scale != 1.0:
                    self._sums[name].mul_(share * scale)
        # Variances before means: they need the mean of those that came before.
        for name, value in variances.items():
            self._pool(name, value, means.get(_mean_of_variance(name)), share)
        for name, value in means.items():
            self._accumulate(name, value, share)
        self._total += share
        self._stats_total += share
        return sample

    def _accumulate(self, name: str, value: Tensor, share: float) -> None:
        if self._stats_total:
            self._sums[name].add_(value, alpha=share)
        else:
            self._sums[name] = value

    def _pool(self, name: str, value: Tensor, mean: Tensor | None, share: float) -> None:
        """Σ w_i v_i, and w W / (w + W) times the squared distance of the means."""
        if self._stats_total and mean is not None:
            distance = mean - self._sums[_mean_of_variance(name)] / self._stats_total
            between = self._stats_total / (self._stats_total + share)
            value = torch.add(value, distance.square(), alpha=between)
        self._accumulate(name, value, share)

    def take(self) -> State:
        """The merged contribution, the caller's to keep; the accumulator starts anew.

        Parameters, means and variances are fp32; counters keep their dtype.
        """
        assert self._total > 0, "nothing was merged"
        merged, self._sums = self._sums, {}
        for name, value in merged.items():
            role = self._layout[name].role
            total = self._total if role is Role.PARAMETER else self._stats_total
            if role is Role.PARAMETER and self._is_sum:
                continue
            if role is not Role.COUNTER and total != 1.0:
                value.div_(total)
        self._unit = self._total = self._stats_total = 0.0
        return {name: merged[name] for name in self._layout}
