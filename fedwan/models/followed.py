"""A network and a moving average of its weights, which follows it and is kept as its lag.

The target of consistency training: with parameters p and decay d, after each step

    average' = d average + (1 - d) p'     kept as     lag' = d (lag + p - p')     average = p + lag

So the average is derived from whatever the parameters are. Where a merge moves them, it moves
along and keeps the distance that this site's last steps left; a site that joins late, or has lost
its checkpoint, starts from the merged weights with no lag, not from an average of initial ones.
The lag is a site's own, like an optimiser's moments: it is in checkpoints, and never travels.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call

__all__ = ["Followed"]


class Followed(nn.Module):
    """Does what the network does; `target` does it with the averaged weights.

    Memory: one more copy of the parameters, two while `target` runs.

    Args:
        network: without buffers that its steps would change.
        half_life: of the average, in steps; 0 makes it the network itself.
    """

    def __init__(self, network: nn.Module, half_life: float) -> None:
        super().__init__()
        self.network = network
        self.decay = 0.5 ** (1 / half_life) if half_life else 0.0
        for index, param in enumerate(network.parameters()):
            # Not persistent: it stays at home.
            self.register_buffer(f"lag{index}", torch.zeros_like(param), persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's output."""
        out: Tensor = self.network(*inputs)
        return out

    @torch.no_grad()
    def target(self, *inputs: Tensor) -> Tensor:
        """What the averaged weights make of the inputs; no gradient."""
        named = self.network.named_parameters()
        average = {name: p + lag for (name, p), lag in zip(named, self._lags(), strict=True)}
        out: Tensor = functional_call(self.network, average, inputs)
        return out

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around one step of the parameters, which the average is to follow."""
        pairs = list(zip(self._lags(), self.network.parameters(), strict=True))
        with torch.no_grad():
            for lag, param in pairs:
                lag.add_(param)
        try:
            yield
        finally:
            with torch.no_grad():
                for lag, param in pairs:
                    lag.sub_(param).mul_(self.decay)

    def _lags(self) -> list[Tensor]:
        return [lag for _, lag in self.named_buffers(recurse=False)]
