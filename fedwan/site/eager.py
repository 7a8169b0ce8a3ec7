"""A site's own look ahead: the outer step as far as it knows it (see `fedwan.overlap`).

When a fragment leaves, the local weights become e = g - share Δ + c: the global weights after the
part of the outer step that this site knows. When the update lands, they are moved by g' - e, by how
much that was wrong.

Memory: e of each fragment in flight, and c, one fp32 copy of every parameter.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch

from fedwan.codecs import Codec
from fedwan.codecs.payload import Source
from fedwan.fragments import Fragment
from fedwan.overlap import Eager
from fedwan.site.group import is_cut, local, piece_like
from fedwan.site.hook import Landing, SiteHook
from fedwan.site.replica import Replica
from fedwan.state import Role, State, network_of

__all__ = ["LookAhead"]


class LookAhead(SiteHook):
    """Estimates of the next global weights, fragment by fragment."""

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
            base, live = local(self._replica.base[name]), local(self._replica.live[name])
            moved = local(self._replica.landed_value(name)) - live
            value = torch.add(base, moved, alpha=-part.share)
            if name in self._push:
                value.add_(self._push[name])
            live.copy_(value)
            estimates[name] = value
        self._estimates[fragment.index] = estimates

    @torch.no_grad()
    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        """L ← l + g' - e, unless the global weights simply replace the local ones."""
        estimates = self._estimates.pop(fragment.index, {})
        if landing.is_replaced:
            return False
        replica = self._replica
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
