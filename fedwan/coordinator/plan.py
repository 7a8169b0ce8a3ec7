"""What the round loop must know of the run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

__all__ = ["Plan"]


@dataclass(frozen=True)
class Plan:
    """Names and numbers."""

    site_names: tuple[str, ...]
    """In merge order."""
    num_versions: int
    """Outer updates per fragment until the end."""
    samples_per_contribution: int
    """Nominal; a contribution of as many has weight 1."""
    ema_half_life: float
    checkpoint_every: int
    eval_every: int
    """Versions between evaluations; 0 for none but the first and the last."""
    patience_s: float
    """For the initial weights and the final evaluation."""
    folder: Path
    """Where checkpoints go."""
    ema_half_lives: Mapping[str, float] = field(default_factory=dict)
    """By network, of those that have one of their own."""
    asks_all_sites: bool = False
    """Quality is measured by all sites, since each has held-out data of its own."""
