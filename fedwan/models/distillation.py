"""What adversarial distillation needs beside the networks: heads, and a moving average."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import layer_norm


class FeatureHeads(nn.Module):
    """Discriminator heads on a frozen network's features (Sauer et al. 2024, 2403.12015).

    Features of each block, (batch, …, width) -> logits (batch, blocks, …), high for what looks
    real. What the frozen network sees in a sample is fixed, so the heads are small.
    """

    def __init__(self, width: int, blocks: int, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, 1))
            for _ in range(blocks)
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Logits of all blocks."""
        pairs = zip(self.heads, features, strict=True)
        logits = [head(layer_norm(f, f.shape[-1:])).squeeze(-1) for head, f in pairs]
        return torch.stack(logits, dim=1)


class Followed(nn.Module):
    """A network and a moving average of its weights, the target of consistency training.

    With parameters p and decay d, after each step

        average' = d average + (1 - d) p'     kept as     lag' = d (lag + p - p')

    The average, p + lag, moves along where a merge moves the parameters. The lag is a site's own:
    it is in checkpoints, and never travels. A half-life of 0 steps makes the average the network
    itself. Memory: one more copy of the parameters, two while `target` runs.
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
        return self.network(*inputs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def target(self, *inputs: Tensor) -> Tensor:
        """What the averaged weights make of the inputs; no gradient."""
        names = [name for name, _ in self.network.named_parameters()]
        average = [param + lag for param, lag in self._pairs()]
        named = dict(zip(names, average, strict=True))
        return functional_call(self.network, named, inputs)  # type: ignore[no-any-return]

    @contextmanager
    def following(self) -> Iterator[None]:
        """Around one step of the parameters, which the average is to follow."""
        with torch.no_grad():
            for param, lag in self._pairs():
                lag.add_(param)
        try:
            yield
        finally:
            with torch.no_grad():
                for param, lag in self._pairs():
                    lag.sub_(param).mul_(self.decay)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and their lags."""
        return zip(self.network.parameters(), self.buffers(recurse=False), strict=True)
