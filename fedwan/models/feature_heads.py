"""Discriminator heads on a frozen network's features (Sauer et al. 2024, 2403.12015).

What the frozen network sees in a sample is fixed, so the heads are small, and a teacher that is
told the noise level and the class judges samples of all levels and classes.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torch.nn.functional import layer_norm

__all__ = ["FeatureHeads"]


class FeatureHeads(nn.Module):
    """Features of each block, (batch, …, width) -> logits (batch, blocks, …).

    Args:
        width: values of a feature.
        blocks: as many lists of features; each has a head of its own.
        hidden: values of a head's hidden layer.
    """

    def __init__(self, width: int, blocks: int, hidden: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, hidden), nn.SiLU(), nn.Linear(hidden, 1))
            for _ in range(blocks)
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Logits, high for what looks real."""
        pairs = zip(self.heads, features, strict=True)
        logits = [head(layer_norm(f, f.shape[-1:])).squeeze(-1) for head, f in pairs]
        return torch.stack(logits, dim=1)
