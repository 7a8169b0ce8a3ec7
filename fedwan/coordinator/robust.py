"""Merging that bears contributions which lie: n contributions, of which b may hold anything.

    trimmed_mean    by value, the mean without the b largest and the b smallest
                    (Yin et al. 2018, 1803.01498, definition 2)
    median          by value, of an even n the mean of the middle two (the same, definition 1)
    centered_clip   by network, v + mean of min(1, t / |x_i - v|) (x_i - v), where v is the median
                    and t the (n - b)-th smallest |x_i - v| (Karimireddy et al. 2021, 2012.10333,
                    equation CC, one iteration; v there is the round's before)
    krum            by network, the mean of the n - b - 2 contributions that are closest to their
                    n - b - 2 nearest others (Blanchard et al. 2017, 1703.02757; so many are safe
                    by El Mhamdi et al. 2019, 1905.04374)

    closest         by network, the mean of the n - b contributions that are closest to their
                    n - b - 1 nearest others, where any that are shorter than the median are
                    compared at its length (lengths made alike as by Cao et al. 2021, 2012.13995):
                    a short one is near to all others, whichever way it points; one of zeros
                    points nowhere, and is compared as if at a right angle to all

That is for parameters. Of all else, whatever the rule for these: means by value as above (trimmed,
or their median), variances likewise, of v_i + (m_i - m)² with m the merged mean, and of counters
the (b + 1)-th largest, which an honest site vouches for.

Contributions count alike, since weights are what their sites say. Where fewer come than b needs,
which takes sites that were drained or ejected, b is what their number bears.

Memory: the merged fragment, and n times its largest tensor, coded and decoded, and n running means.
Time: every payload is read once as it comes and once to be merged, a second time by those rules
that go by network.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from fedwan.codecs import Coded
from fedwan.codecs.base import span_values, spans
from fedwan.coordinator.merge import sum_dtype
from fedwan.doctor.sampling import Sample, Sampler
from fedwan.state import Layout, Role, State, is_moment, means_of_variances, network_of

Rule = Literal["trimmed_mean", "median", "centered_clip", "krum", "closest"]

Tensors = Iterable[tuple[str, Coded]]


class RobustMerger:
    """Merges contributions of one fragment once all of them are there; as `merge.Merger`."""

    def __init__(self, layout: Layout, rule: Rule, bad: int) -> None:
        self._layout = layout
        self._mean_of = means_of_variances(layout)
        self._rule = rule
        self._bad = bad
        self.sampler = Sampler(layout)
        self._contributions: list[Tensors] = []

    def add(self, tensors: Tensors, weight: float = 1.0, scale: float = 1.0) -> Sample:
        """Add one checked contribution, which is read again by `take`; a sample of its deltas."""
        assert iter(tensors) is not tensors, "a contribution is read more than once"
        sample: Sample = {}
        for _ in self.sampler.tap(tensors, sample):
            pass
        self._contributions.append(tensors)
        return sample

    def take(self) -> State:
        """The merged contribution as `merge.Merger` has it; begins anew."""
        assert self._contributions, "nothing was merged"
        if self._rule in ("trimmed_mean", "median"):
            merged = {name: value for name, value, _ in self._values()}
        else:
            merged = self._by_network()
        self._contributions = []
        return {name: merged[name] for name in self._layout}

    def _values(self, is_whole: bool = True) -> Iterator[tuple[str, Tensor, list[Tensor]]]:
        """Each tensor merged by value, and decoded; without `is_whole`, parameters are 0.

        What is decoded is good until the next one is taken, so that there is n times one tensor.
        """
        apart: dict[str, Tensor] = {}
        for name, coded in self._side_by_side():
            values, spec = [each.tensor() for each in coded], self._layout[name]
            if is_whole or spec.role is not Role.PARAMETER:
                yield name, self._by_value(name, values, apart), values
            else:
                yield name, torch.zeros(spec.shape, dtype=torch.float32), values
            values.clear()

    def _by_value(self, name: str, values: Sequence[Tensor], apart: dict[str, Tensor]) -> Tensor:
        """One tensor merged; `apart` has the squared distances of means until their variances."""
        spec, bad = self._layout[name], trim_of(len(values), self._bad)
        if spec.role is Role.COUNTER:
            return _middle(torch.stack(list(values)), bad).amax(0)
        if name in self._mean_of:
            between = apart.pop(self._mean_of[name])
            values = [v + d for v, d in zip(values, between, strict=True)]
        merged = torch.empty(spec.shape, dtype=sum_dtype(spec))
        middle_of(values, bad if self._rule == "trimmed_mean" else (len(values) - 1) // 2, merged)
        if name in self._mean_of.values():
            apart[name] = (torch.stack(list(values)).to(merged.dtype) - merged).square()
        return merged

    def _side_by_side(self) -> Iterator[tuple[str, list[Coded]]]:
        """Each tensor of all contributions."""
        for parts in zip(*self._contributions, strict=True):
            yield parts[0][0], [coded for _, coded in parts]

    def _by_network(self) -> State:
        """In two passes: distances or inner products, then each one's share."""
        is_clip = self._rule == "centered_clip"
        merged: State = {}
        total: defaultdict[str, Any] = defaultdict(float)
        for name, value, values in self._values(is_whole=is_clip):
            merged[name] = value
            if self._layout[name].role is Role.PARAMETER and not is_moment(name):
                found = squares(values, value) if is_clip else products(values)
                total[network_of(name)] += found
        shares = {network: self._shares(found) for network, found in total.items()}
        for name, coded in self._side_by_side():
            if self._layout[name].role is Role.PARAMETER:
                share = shares[network_of(name)]
                if is_clip:
                    merged[name].mul_(1.0 - sum(share))
                for each, part in zip(coded, share, strict=True):
                    if part:  # one that was not chosen may hold anything
                        each.add_to(merged[name], part)
        return merged

    def _shares(self, found: Tensor) -> list[float]:
        """What each contribution is multiplied by, from a network's `squares` or `products`."""
        if self._rule == "centered_clip":
            return clip_shares(found.sqrt().tolist(), self._bad)
        if self._rule == "krum":
            chosen = krum_choice(distances(found), self._bad)
        else:
            chosen = closest_choice(distances(lengthened(found)), self._bad)
        return [(place in chosen) / len(chosen) for place in range(len(found))]


def trim_of(num: int, bad: int) -> int:
    """How many of so many can be left out at either end, `bad` of them at most.

    >>> trim_of(4, 1), trim_of(2, 1)
    (1, 0)
    """
    return min(bad, (num - 1) // 2)


def _middle(rows: Tensor, cut: int) -> Tensor:
    """Rows but for the `cut` largest and smallest by value, in place: 2 cut (n - 1) exchanges.

    A tenth of the time of `torch.sort` along the first of two dimensions, with few rows.
    """
    last = len(rows) - 1
    for done in range(cut):
        for i in range(done, last - done):
            _exchange(rows[i], rows[i + 1])
        for i in range(last - done - 1, done, -1):
            _exchange(rows[i - 1], rows[i])
    return rows[cut : len(rows) - cut]


def _exchange(low: Tensor, high: Tensor) -> None:
    """Smaller values into the one, larger ones into the other."""
    lower = torch.minimum(low, high)
    torch.maximum(low, high, out=high)
    low.copy_(lower)


def middle_of(values: Sequence[Tensor], cut: int, into: Tensor) -> None:
    """By value, the mean of all but the `cut` largest and smallest, into a tensor of their shape.

    With cut = (n - 1) // 2 their median. The same bits on any number of threads.
    """
    flat, target = [value.reshape(-1) for value in values], into.view(-1)
    for span in spans(len(target), span_values(len(target), target.device)):
        middle = _middle(torch.stack([each[span].to(into.dtype) for each in flat]), cut)
        for row in middle[1:]:
            middle[0] += row
        target[span] = middle[0].div_(len(middle))


def squares(values: Sequence[Tensor], centre: Tensor) -> Tensor:
    """Squared distances from a centre (n,)."""
    total = torch.zeros(len(values), dtype=torch.float64)
    for span, rows in _rows(values):
        rows -= centre.reshape(-1)[span]
        total += torch.linalg.vecdot(rows, rows)
    return total


def products(values: Sequence[Tensor]) -> Tensor:
    """Inner products of all pairs (n, n)."""
    total = torch.zeros(len(values), len(values), dtype=torch.float64)
    for _, rows in _rows(values):
        total += rows @ rows.T
    return total


def _rows(values: Sequence[Tensor]) -> Iterator[tuple[slice, Tensor]]:
    """Tensors side by side in fp64, a span at a time: no fp32 value is too large to be squared."""
    flat = [value.reshape(-1) for value in values]
    for span in spans(len(flat[0]), span_values(len(flat[0]), flat[0].device)):
        yield span, torch.stack([each[span].double() for each in flat])


def distances(products: Tensor) -> Tensor:
    """Squared distances of all pairs (n, n), from their inner products.

    >>> distances(torch.tensor([[4.0, 2.0], [2.0, 1.0]]))
    tensor([[0., 1.],
            [1., 0.]])
    """
    squares = products.diagonal()
    return squares + squares[:, None] - 2.0 * products


def lengthened(products: Tensor) -> Tensor:
    """Inner products (n, n) as they were if none were shorter than the (lower) median.

    >>> lengthened(torch.tensor([[4.0, 2.0, 2.0], [2.0, 1.0, 1.0], [2.0, 1.0, 9.0]]))
    tensor([[4., 4., 2.],
            [4., 4., 2.],
            [2., 2., 9.]])
    """
    squares = products.diagonal()
    times = torch.where(squares > 0, squares.median() / squares, 1.0).sqrt().clamp(min=1.0)
    longer = products * times * times[:, None]
    longer.diagonal()[squares == 0] = squares.median()
    return longer


def clip_shares(distances: Sequence[float], bad: int) -> list[float]:
    """What each contribution's distance from the centre is multiplied by: min(1, t / d_i) / n.

    t is the (n - bad)-th smallest distance: an honest one is as large.

    >>> clip_shares([1.0, 2.0, 1e17, 1.5], bad=1)
    [0.25, 0.25, 5e-18, 0.25]
    """
    num = len(distances)
    most = sorted(distances)[num - 1 - trim_of(num, bad)]
    return [min(1.0, most / d) / num if d else 1.0 / num for d in distances]


def krum_choice(squares: Tensor, bad: int) -> list[int]:
    """Places of the n - bad - 2 contributions that krum keeps, ascending; all of fewer than three.

    A score is the sum of squared distances to the n - bad - 2 nearest others, from squares (n, n).
    Of equal scores the first in site order is kept.
    """
    num = len(squares)
    if num < 3:
        return list(range(num))
    count = num - 2 - max(0, min(bad, (num - 3) // 2))
    return _lowest(squares, count, count)


def closest_choice(squares: Tensor, bad: int) -> list[int]:
    """Places of the n - bad contributions that are closest to their n - bad - 1 nearest others.

    >>> closest_choice(torch.tensor([[0.0, 1.0, 9.0], [1.0, 0.0, 8.0], [9.0, 8.0, 0.0]]), 1)
    [0, 1]
    """
    kept = len(squares) - trim_of(len(squares), bad)
    return _lowest(squares, kept - 1, kept)


def _lowest(squares: Tensor, near: int, kept: int) -> list[int]:
    """Places of the lowest sums of the squared distances to the `near` nearest others."""
    scores = squares.sort(1).values[:, 1 : near + 1].sum(1).tolist()
    return sorted(sorted(range(len(scores)), key=scores.__getitem__)[:kept])
