"""What a run adds up to."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fedwan.link import wire_pb2 as wire

__all__ = ["Totals"]


@dataclass
class Totals:
    """Sums over the run; part of every checkpoint."""

    compute_s: float = 0.0
    wait_s: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0
    contributions: int = 0
    rejected: int = 0
    rejoins: int = 0
    samples: int = 0
    """Behind all contributions."""
    late: int = 0
    """Contributions that were merged into a later version than the one they were made for."""
    staleness: int = 0
    """Versions by which contributions were late, summed."""
    dropped: int = 0
    """Contributions that came too late to be merged."""
    wall_s: float = 0.0
    untrained: dict[str, Any] = field(default_factory=dict)
    """Quality of version 0."""
    quality: dict[str, Any] = field(default_factory=dict)
    """The latest quality."""
    quality_version: int = -1

    def add_work(self, work: wire.Work) -> None:
        """Count what a site did since its last contribution."""
        self.compute_s += work.compute_s
        self.wait_s += work.wait_s
        self.bytes_up += work.bytes_up
        self.bytes_down += work.bytes_down
