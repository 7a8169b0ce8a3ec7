"""What a plan is asked: the model, the sites, the link, and what the user has settled already."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

import torch

from fedwan.config import Config
from fedwan.errors import ConfigError
from fedwan.planner.costs import Costs
from fedwan.planner.links import WireLink
from fedwan.state import Layout, Role, TensorSpec
from fedwan.workloads.base import NetworkKind

__all__ = ["ALL", "NETWORK", "Question", "synthetic_layout"]

ALL = "all"
"""As `strategy`: every one that the app holds."""

NETWORK = "model"
MODULES = 40
"""Of a large model; pix2pix's larger network has 30."""


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


def synthetic_layout(num_values: int) -> Layout:
    """Specs of a network with exactly so many values: square layers of equal size, with biases.

    Raises:
        ConfigError: there are none.

    >>> layout = synthetic_layout(57_182_660)
    >>> sum(spec.num_values for spec in layout.values())
    57182660
    """
    if num_values < 1:
        raise ConfigError(f"params = {num_values} is out of range; choose 1 or more")
    count = max(1, min(MODULES, num_values // 2))
    layout: Layout = {}
    left = num_values
    for index in range(count):
        share = left // (count - index)
        left -= share
        width = max(1, math.isqrt(share))
        rows, rest = divmod(share, width)
        name = f"{NETWORK}/layers.{index}"
        layout[f"{name}.weight"] = _parameter(rows, width)
        if rest:
            layout[f"{name}.bias"] = _parameter(rest)
    return dict(sorted(layout.items()))


def _parameter(*shape: int) -> TensorSpec:
    return TensorSpec(shape, torch.float32, Role.PARAMETER)
