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

A tensor that some sites do not contribute is merged from those that do, with W the sum of theirs.

Late contributions are scaled: their parameters' deltas by s_i, while their weight w_i stays in W.

Buffers of fp64 are added up in fp64.

Memory: one accumulator of the fragment's size, however many sites there are, and copies of the
running means and variances of the contribution at hand that go in pairs, which are small. All else
is added as it is read, parameters from their coded form: no decoded copy of these exists.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch
from torch import Tensor

from fedwan.buffers import lend
from fedwan.codecs import Coded, Plain
from fedwan.doctor.sampling import Sample, Sampler
from fedwan.state import Layout, Role, State, TensorSpec, means_of_variances


def sum_dtype(spec: TensorSpec) -> torch.dtype:
    """What it is added up in: fp32, or more of a buffer that has more."""
    if spec.role is Role.PARAMETER:
        return torch.float32
    return torch.promote_types(spec.dtype, torch.float32)


class Merger:
    """Accumulates contributions of one fragment."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._mean_of = means_of_variances(layout)
        self._in_pairs = {*self._mean_of, *self._mean_of.values()}
        self.sampler = Sampler(layout)
        self._sums: State = {}
        self._room: State = {}
        """Where the sums of parameters will lie."""
        self._units: dict[str, float] = {}
        """By tensor, the weight that counts as 1."""
        self._totals: defaultdict[str, float] = defaultdict(float)
        """By tensor, the weights so far, in units."""

    def keep(self, state: State, weight: float) -> None:
        """Let present statistics and counters take part: one contribution must not replace them."""
        assert not self._sums, "statistics are kept before contributions are added"
        for name, spec in self._layout.items():
            self._units[name] = 1.0
            if spec.role in (Role.MEAN, Role.VARIANCE):
                self._sums[name] = state[name].to(sum_dtype(spec)) * weight
                self._totals[name] = weight
            elif spec.role is Role.COUNTER:
                self._sums[name] = state[name].clone()

    def add(
        self, tensors: Iterable[tuple[str, Coded]], weight: float, scale: float = 1.0
    ) -> Sample:
        """Add one checked contribution; a sample of its deltas, not scaled."""
        assert weight > 0, f"weight {weight} of a contribution"
        held: State = {}
        sample: Sample = {}
        for name, coded in self.sampler.tap(tensors, sample):
            spec = self._layout[name]
            role = spec.role
            if role is Role.COUNTER:
                value = coded.tensor()
                self._sums[name] = torch.maximum(self._sums.get(name, value), value)
            elif role is Role.PARAMETER:
                self._add(name, coded, weight, scale)
            elif name in self._in_pairs:
                held[name] = coded.tensor().to(sum_dtype(spec), copy=True)
            else:
                self._add(name, Plain(coded.tensor().to(sum_dtype(spec))), weight)
        # Variances before means: they need the mean of those that came before.
        for name in self._mean_of.keys() & held.keys():
            self._pool(name, held.pop(name), held.get(self._mean_of[name]), weight)
        for name, value in held.items():
            self._add(name, Plain(value), weight)
        return sample

    def _place(self, name: str) -> Tensor:
        if name not in self._room:
            specs = self._layout.items()
            self._room = lend({n: spec for n, spec in specs if spec.role is Role.PARAMETER})
        return self._room.pop(name)

    def _share(self, name: str, weight: float) -> float:
        """A weight in the units of this tensor."""
        return weight / self._units.setdefault(name, weight)

    def _add(self, name: str, coded: Coded, weight: float, scale: float = 1.0) -> None:
        """Σ w_i Δ_i, scaled, or Σ w_i m_i."""
        share = self._share(name, weight)
        if name in self._sums:
            coded.add_to(self._sums[name], share * scale)
        else:
            spec = self._layout[name]
            if spec.role is Role.PARAMETER:
                self._sums[name] = self._place(name)
            else:
                self._sums[name] = torch.empty(spec.shape, dtype=sum_dtype(spec))
            coded.write_to(self._sums[name])
            if share * scale != 1.0:
                self._sums[name].mul_(share * scale)
        self._totals[name] += share

    def _pool(self, name: str, value: Tensor, mean: Tensor | None, weight: float) -> None:
        """Σ w_i v_i, and w W / (w + W) times the squared distance of the means."""
        if (total := self._totals[name]) and mean is not None:
            distance = mean - self._sums[self._mean_of[name]] / total
            between = total / (total + self._share(name, weight))
            value = torch.add(value, distance.square(), alpha=between)
        self._add(name, Plain(value), weight)

    def take(self) -> State:
        """The merged contribution, the caller's to keep; the accumulator starts anew.

        What nobody contributed is not in it. Parameters, means and variances are fp32, of fp64
        buffers fp64; counters keep their dtype.
        """
        assert self._sums, "nothing was merged"
        merged, self._sums, self._room = self._sums, {}, {}
        for name, total in self._totals.items():
            if total != 1.0:
                merged[name].div_(total)
        self._units.clear()
        self._totals.clear()
        return {name: merged[name] for name in self._layout if name in merged}
