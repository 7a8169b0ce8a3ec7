"""What a site's loop must know of the run."""

from __future__ import annotations

from dataclasses import dataclass

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
