"""fedwan's own flow recipe on digits, with a stopwatch around its steps."""

from __future__ import annotations

import torch

from benchmarks.harness.stopwatch import Watched
from fedwan.config import Config
from sites import flow
from sites.flow import DEFAULTS, NETWORKS, USES, Model, check

__all__ = ["DEFAULTS", "NETWORKS", "USES", "Model", "build", "check"]


def build(config: Config, device: torch.device | str) -> Watched:
    return Watched(flow.build(config, device))
