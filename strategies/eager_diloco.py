"""Eager DiLoCo: a site takes its own outer step at once, and hears of the others' later.

Kale et al. 2025 (2502.12996), algorithm 2: with Δ_i its own delta, a site goes on from where the
outer step would lead had the others not moved, OuterOpt(θ, Δ_i / M), and is put right by what they
did when the update lands τ steps later. Without outer momentum by default: a push that is felt
before it is corrected swings (docs/log.md), so that long overlaps diverge with 0.9.

With l the site's weights, g the global ones, g' the new ones and c the momentum's push:

    at departure, l ← e with e = g - share (g - l) + c
    at landing,   l ← l + (g' - e)

For outer SGD with learning rate η and Nesterov momentum μ over M sites, share = η (1 + μ) / M, and
c = -η μ² b with b the momentum buffer, which a site follows from the updates alone:
c' = (μ c + μ² (g' - g)) / (1 + μ).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import NamedTuple

import torch

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.config import Config, OuterConfig
from fedwan.fragments import Fragment
from fedwan.pieces import is_cut, local, piece_like
from fedwan.recipes import (
    IN_ROUNDS,
    NO_EMA,
    STREAM,
    deltas_in_rounds,
    streamed,
    with_momentum,
)
from fedwan.site.replica import Replica
from fedwan.state import Role, State, network_of
from fedwan.strategy import Landing, SiteHook, Strategy

USES = (*IN_ROUNDS, NO_EMA, "outer.*", "stream.fragments", "stream.tau")
DEFAULTS = {"h": 20, **STREAM, "outer.*": OuterConfig(lr=1.0, momentum=0.0)}


def build(config: Config) -> Strategy:
    """The recipe."""
    known = {
        network: Eager(o.lr * (1 + o.momentum) / config.num_sites, o.momentum)
        for network, o in config.outer.items()
    }
    hook = partial(LookAhead, known)
    return deltas_in_rounds(config, with_momentum(config), hook=hook, **streamed(config))


class Eager(NamedTuple):
    """What a site knows of the next outer step of a network."""

    share: float
    """Of its own delta that the step will take over."""
    momentum: float
    """The outer optimiser's."""


class LookAhead(SiteHook):
    """Estimates of the next global weights, fragment by fragment.

    Memory: e of each fragment in flight, and c, one fp32 copy of every parameter.
    """

    def __init__(self, parts: Mapping[str, Eager], replica: Replica) -> None:
        super().__init__()
        self._parts = parts
        self._replica = replica
        self._push: State = {}
        """The momentum's, c."""
        self._estimates: dict[int, State] = {}
        """By fragment in flight, e."""

    @torch.no_grad()
    def before_send(self, fragment: Fragment) -> None:
        """L ← e, for a fragment's parameters."""
        estimates: State = {}
        for name, part in self._each(fragment):
            live = local(self._replica.live[name])
            moved = local(self._replica.landed_value(name)) - live
            value = torch.add(local(self._replica.base[name]), moved, alpha=-part.share)
            if name in self._push:
                value.add_(self._push[name])
            estimates[name] = value
        with self._replica.following(estimates):
            for name, value in estimates.items():
                local(self._replica.live[name]).copy_(value)
        self._estimates[fragment.index] = estimates

    @torch.no_grad()
    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """L ← l + g' - e, unless the global weights simply replace the local ones."""
        estimates = self._estimates.pop(fragment.index, {})
        if landing.is_replaced:
            return False
        replica = self._replica
        with replica.following(fragment.layout):
            for name in fragment.layout:
                base, live = local(replica.base[name]), local(replica.live[name])
                if name in estimates:
                    live.add_(torch.sub(base, estimates[name]))
                else:
                    live.copy_(base)
        return True

    def on_update(self, fragment: Fragment, payload: Source, codec: Codec) -> None:
        """C ← (μ c + μ² (g' - g)) / (1 + μ), from the update g' - g as it came."""
        parts = dict(self._each(fragment))
        for name, coded in codec.read_each(payload, fragment.layout):
            if name not in parts or not parts[name].momentum:
                continue
            momentum, base = parts[name].momentum, self._replica.base[name]
            if name not in self._push:
                self._push[name] = torch.zeros_like(local(base))
            push = self._push[name].mul_(momentum / (1 + momentum))
            scale = momentum**2 / (1 + momentum)
            if is_cut(base):
                push.add_(piece_like(coded.tensor(), base), alpha=scale)
            else:
                coded.add_to(push, scale)

    def on_adopt(self) -> None:
        """The momentum is not known any more: c is taken for 0, and found again in some rounds."""
        self._push.clear()
        self._estimates.clear()

    def _each(self, fragment: Fragment) -> Iterator[tuple[str, Eager]]:
        for name, spec in fragment.layout.items():
            if spec.role is Role.PARAMETER:
                yield name, self._parts[network_of(name)]
