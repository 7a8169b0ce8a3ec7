"""What a site's loop must know of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fedwan.config import InnerConfig

__all__ = ["SitePlan"]


@dataclass(frozen=True)
class SitePlan:
    """Name, seeds and numbers."""

    run_id: str
    site: str
    seed: int
    batch: int
    """Samples per step."""
    num_steps: int
    """Completed steps until the end."""
    num_samples: int
    """Generated samples in the picture."""
    checkpoint_every: int
    """Versions between two checkpoints."""
    poll_s: float
    """How long the coordinator holds a request for an update that is not there yet."""
    has_own_data: bool = False
    """Held-out data are this site's own: quality is told by moments, too."""
    show_samples: bool = False
    """Samples that are made of this site's private inputs may leave it; its owner says so."""
    inner: Mapping[str, InnerConfig] = field(default_factory=dict)
    """By network, for the learning rate's schedule, and what becomes of moments."""
    num_recalibrate: int = 0
    """Batches that running statistics are taken anew from, before weights are measured."""
    exclude: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """By network, patterns of names of tensors that stay at this site."""
