"""What a plan is asked: the model, the sites, the link, and what the user has settled already."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fedwan.config import Config
from fedwan.planner.costs import Costs
from fedwan.planner.wire_model import WireLink
from fedwan.state import Layout
from fedwan.workloads.base import NetworkKind

__all__ = ["ALL", "Question"]

ALL = "all"
"""As `strategy`: every one that the app holds."""


@dataclass(frozen=True)
class Question:
    """Everything that predictions depend on; all sites are alike."""

    config: Config
    """The run's settings, `strategy` may be `ALL`; those that `named` lacks are open."""
    named: frozenset[str]
    """Keys that the user has settled, such as `h` or `codec.up`."""
    networks: Mapping[str, NetworkKind]
    """Of the workload."""
    layout: Layout
    """Of the whole model."""
    step_s: float
    """Seconds of a step."""
    link: WireLink
    """Of each site."""
    num_steps: int
    """That time and cost are told for."""
    usd_per_gb: float = 0.0
    """Of what is sent, either way; 0 if nobody asks."""
    costs: Costs = field(default_factory=Costs)

    def settles(self, section: str) -> bool:
        """Whether the user has settled anything in a section, or a key."""
        return any(key == section or key.startswith(f"{section}.") for key in self.named)
