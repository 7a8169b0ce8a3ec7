"""Copies of weights that optimisers keep, such as masters in fp32 of weights in bf16.

The next step would put them back in the place of weights that were merged, so that they follow
these. Which of an optimiser's tensors are copies is known by their values.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from fedwan.config import InnerConfig
from fedwan.optim_state import NamedOptimizers
from fedwan.pieces import local
from fedwan.state import State, network_of

log = logging.getLogger(__name__)

Pair = tuple[Tensor, Tensor]
"""A local weight, and what an optimiser keeps for it."""
_NEAR = 0.3
"""Of the weights' norm; a moment that has nothing to do with them is at least 1 away."""


class Copies:
    """Of the `live` weights by name, in the optimisers' state.

    `config` says by network what becomes of that state when an update lands: copies follow where it
    is kept. With `is_silent` nothing is told of values that are close to the weights.
    """

    def __init__(
        self,
        inner: NamedOptimizers,
        live: State,
        config: Mapping[str, InnerConfig],
        *,
        is_silent: bool = False,
    ) -> None:
        self._inner = inner
        self._live = live
        self._config = config
        self._is_silent = is_silent
        self._apart: set[str] = set()
        """What optimisers keep by `optimizer:field`, and is no copy of the weights."""
        self._num_apart = 0
        """How many tensors and numbers they kept when all of it was known as that."""

    @contextmanager
    def following(self, names: Iterable[str]) -> Iterator[None]:
        """While these local weights are written to; their copies follow.

        Meanwhile they hold what they differ by, so that it takes no memory.
        """
        # What is the weight itself, as a master of fp32 weights may be, follows anyway.
        pairs = [(live, copy) for live, copy in self._find(set(names)) if not _is_one(live, copy)]
        for live, copy in pairs:
            copy.sub_(live.to(copy.device))
        try:
            yield
        finally:
            for live, copy in pairs:
                now = live.to(copy.device)
                copy.add_(now)
                # Where another exponent rounds otherwise: next time it is to be known again.
                copy.copy_(torch.where(copy.to(now.dtype) == now, copy, now))

    def _find(self, names: set[str]) -> list[Pair]:
        """Of these, local weights and a copy that is kept, but for what is rounded away.

        Decided by field, for all parameters at once: what was another value once is no copy.
        """
        num = sum(len(s) for o in self._inner.optimizers.values() for s in o.state.values())
        if num == self._num_apart:
            return []
        fields: dict[str, dict[str, Pair]] = {}
        for moment, value in self._inner.state().items():
            field, _, name = moment.partition("|")
            config = self._config.get(network_of(name), InnerConfig())
            is_wanted = config.state in ("keep", "ema") and name in self._live
            if is_wanted and field not in self._apart and not field.endswith(":step"):
                fields.setdefault(field, {})[name] = local(self._live[name]), local(value)
        if not fields:
            self._num_apart = num
        found = []
        for field, named in fields.items():
            if not (pairs := [pair for name, pair in named.items() if name in names]):
                continue
            if all(map(_is_copy, pairs)):
                # Of zeros nothing is known yet.
                found += pairs if any(bool(live.any()) for live, _ in pairs) else []
            elif all(bool(live.isfinite().all()) for live, _ in pairs):
                self._apart.add(field)
                if not self._is_silent and _is_near(pairs):
                    key, _, kept = field.rpartition(":")
                    log.warning(
                        "optimizers[%r] keeps %r, which is close to the weights and does not "
                        "follow what is merged; if its steps lead there, as those of schedule-free "
                        "optimisers and Lookahead do, set inner.%s.state=reset",
                        *(key, kept, network_of(next(iter(named)))),
                    )
        return found


def _is_copy(pair: Pair) -> bool:
    live, value = pair
    return value.shape == live.shape and torch.equal(value.to(live), live)


def _is_one(live: Tensor, copy: Tensor) -> bool:
    return live.untyped_storage().data_ptr() == copy.untyped_storage().data_ptr()


def _is_near(pairs: Sequence[Pair]) -> bool:
    """Whether values are of their weights' shapes, and closer to them than other tensors are."""
    if any(value.shape != live.shape or not value.is_floating_point() for live, value in pairs):
        return False
    apart = [float(torch.dist(value.to(live).float(), live.float())) for live, value in pairs]
    return math.hypot(*apart) < _NEAR * math.hypot(*(float(live.norm()) for live, _ in pairs))
