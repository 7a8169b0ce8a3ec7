"""Who of a site's processes steps which parameters, and gradients that are kept by who steps them.

ZeRO (Rajbhandari et al. 2020, 1910.02054, section 5): a parameter's moments live with one process,
which takes the optimiser's step for it and tells the others its new value. At stage 2 its averaged
gradient lives there alone, too: each network's gradients are averaged in buckets while its backward
pass makes them, and dropped elsewhere.

Parameters are dealt out whole, the largest first, each to who has least so far, as torch's
`ZeroRedundancyOptimizer` does. Any optimiser may step them: it skips parameters without gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from fedwan.site.holding import Own
from fedwan.site.team import BUCKET_VALUES, Team
from fedwan.state import network_of
from fedwan.workloads.base import Workload
from fedwan.workloads.optim import full_norm, joint_norm

__all__ = ["GradientPieces", "Shares", "Turns", "deal"]

FEWEST_BUCKETS = 8
"""Of a network: a bucket is what its gradients cost at most while a backward pass makes them."""


def deal(sizes: Mapping[str, int], num: int) -> dict[str, int]:
    """Which of `num` processes owns each tensor.

    Args:
        sizes: number of values by name, in an order that all processes share.
        num: of processes.

    >>> deal({"a": 1, "b": 5, "c": 3, "d": 1}, 2)
    {'b': 0, 'c': 1, 'a': 1, 'd': 1}
    """
    loads = [0] * num
    owners: dict[str, int] = {}
    for name in sorted(sizes, key=lambda name: -sizes[name]):
        owners[name] = loads.index(min(loads))
        loads[owners[name]] += sizes[name]
    return owners


class Shares:
    """What is whose, among a site's processes.

    Args:
        workload: of this process.
        team: that it belongs to.
        keeps_gradients: whether averaged gradients are shared out, too.

    Attributes:
        params: those that are trained, by name.
        own: this process's holding.
        team: the same.
        owners: rank by parameter.
        keeps_gradients: the same.
        is_alone: whether this process takes a step without the others.
    """

    cuts_weights: Literal[False] = False
    cuts_batch = True

    def __init__(self, workload: Workload, team: Team, *, keeps_gradients: bool) -> None:
        self.params = {n: p for n, p in Own(workload).params.items() if p.requires_grad}
        self.owners = deal({name: p.numel() for name, p in self.params.items()}, team.size)
        self.own = Own(workload, {n for n, rank in self.owners.items() if rank == team.rank})
        self.team = team
        self.keeps_gradients = keeps_gradients
        self.is_alone = False

    def of(self, names: Iterable[str], rank: int) -> list[str]:
        """Those of these parameters that a process owns."""
        return [name for name in names if self.owners[name] == rank]

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Steps that this process takes without the others."""
        self.is_alone = True
        try:
            yield
        finally:
            self.is_alone = False


class Turns:
    """Has each process step what it owns, and all have the weights that come of it.

    Args:
        workload: of this process, whose optimisers are hooked into.
        shares: of its parameters.
    """

    def __init__(self, workload: Workload, shares: Shares) -> None:
        self._shares = shares
        self._params = shares.params
        self._put_by: dict[str, Tensor] = {}
        for network, optimizer in workload.optimizers.items():
            names = [name for name in self._params if network_of(name) == network]
            optimizer.register_step_pre_hook(partial(self._before, names))
            optimizer.register_step_post_hook(partial(self._after, names))

    def _before(self, names: Sequence[str], *_: object) -> None:
        """Gradients of what others step are put by."""
        shares = self._shares
        for name in names if not shares.is_alone else ():
            param = self._params[name]
            if shares.owners[name] != shares.team.rank and param.grad is not None:
                self._put_by[name], param.grad = param.grad, None

    def _after(self, names: Sequence[str], *_: object) -> None:
        shares = self._shares
        if shares.is_alone:
            return
        for name in names:
            if name in self._put_by:
                self._params[name].grad = self._put_by.pop(name)
        for rank in range(shares.team.size):
            shares.team.share([self._params[name] for name in shares.of(names, rank)], rank)


class GradientPieces:
    """Implements `fedwan.workloads.descent.Others`: gradients are averaged as they are made.

    Memory: the averaged gradients of what this process owns, and a network's bucket.

    Args:
        shares: of this process's parameters, which are hooked into.
    """

    def __init__(self, shares: Shares) -> None:
        self._shares = shares
        self._params = shares.params
        self._kept: dict[str, Tensor] = {}
        self._buckets = _buckets({name: param.numel() for name, param in self._params.items()})
        self._waiting: dict[str, list[list[str]]] = {}
        self._made: set[str] = set()
        for name, param in self._params.items():
            hook = partial(self._note, name)
            param.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]

    def leaves(self, network: str) -> Sequence[Tensor]:
        """See `Others`."""
        return [param for name, param in self._params.items() if network_of(name) == network]

    def kept(self, networks: Sequence[str]) -> list[Tensor]:
        """See `Others`."""
        params = [p for name, p in self._params.items() if network_of(name) in networks]
        return [param.grad for param in params if param.grad is not None]

    def forget(self) -> None:
        """See `Others`."""
        self._kept.clear()

    def collect(self, network: str) -> None:
        """See `Others`."""
        if self._shares.is_alone:
            return
        for bucket in self._waiting.pop(network, self._buckets[network]):
            self._average(bucket)
        self._made.clear()

    def settle(self, networks: Sequence[str]) -> None:
        """See `Others`."""
        if self._shares.is_alone:
            return
        for name, param in self._params.items():
            if network_of(name) in networks:
                param.grad = self._kept.pop(name, None)

    def agree(self, is_fine: bool) -> bool:
        """See `Others`."""
        if self._shares.is_alone:
            return is_fine
        return int(self._shares.team.sum(torch.tensor(int(not is_fine)))) == 0

    def norm(self, network: str) -> Tensor | None:
        """See `Others`; the same bits as if one process held all gradients."""
        named = {n: p.grad for n, p in self._params.items() if network_of(n) == network}
        device = next(iter(self._params.values())).device
        # Of each parameter its gradient's norm, and whether there is a gradient.
        norms = torch.zeros(2, len(named), device=device)
        for index, gradient in enumerate(named.values()):
            if gradient is not None:
                norms[0, index], norms[1, index] = full_norm(gradient), 1.0
        if not self._shares.is_alone:
            self._shares.team.sum(norms)
        return joint_norm(list(norms[0][norms[1] > 0]))

    def _note(self, name: str, _: Tensor) -> None:
        """A gradient is complete. Buckets leave in one order, whatever order these come in."""
        if self._shares.is_alone:
            return
        network = network_of(name)
        self._made.add(name)
        waiting = self._waiting.setdefault(network, list(self._buckets[network]))
        while waiting and self._made.issuperset(waiting[0]):
            self._average(waiting.pop(0))

    def _average(self, bucket: Sequence[str]) -> None:
        for rank in range(self._shares.team.size):
            names = self._shares.of(bucket, rank)
            made = {n: self._params[n].grad for n in names if self._params[n].grad is not None}
            gradients = [gradient for gradient in made.values() if gradient is not None]
            means = self._shares.team.mean_at(rank, gradients) if gradients else []
            for name in names:
                self._params[name].grad = None
            for name, mean in zip(made, means, strict=False):  # none at other ranks
                self._kept[name] = self._kept[name].add_(mean) if name in self._kept else mean


def _buckets(sizes: Mapping[str, int]) -> dict[str, list[list[str]]]:
    """Each network's parameters, the last first, as a backward pass comes by them, in buckets."""
    buckets: dict[str, list[list[str]]] = {}
    for network in dict.fromkeys(map(network_of, sizes)):
        mine = {name: size for name, size in sizes.items() if network_of(name) == network}
        limit = min(BUCKET_VALUES, sum(mine.values()) // FEWEST_BUCKETS)
        buckets[network] = [[]]
        num_values = 0
        for name in reversed(mine):
            if num_values and num_values + mine[name] > limit:
                buckets[network].append([])
                num_values = 0
            buckets[network][-1].append(name)
            num_values += mine[name]
    return buckets
