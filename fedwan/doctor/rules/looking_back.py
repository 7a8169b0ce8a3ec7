"""Whether a site's network only comes from old weights: a loss or samples from before training."""

from __future__ import annotations

from fedwan.doctor.chart import Chart

__all__ = ["LEAST_BACKWARD", "looks_back"]

ROUNDS = 2
LEAST_BACKWARD = 0.25
"""Cosine with what the last updates moved by, from which on a contribution asks to undo them."""


def looks_back(chart: Chart, site: str, network: str) -> bool:
    """Whether its last contributions ask to undo the last updates."""
    backward = chart.steady(site, f"backward/{network}", ROUNDS)
    return backward is not None and backward >= LEAST_BACKWARD
