"""The link as `fedwan doctor link` measured it, for a plan."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from fedwan.errors import ConfigError
from fedwan.link.measure import Measurement, Way
from fedwan.link.tcp import TcpSettings
from fedwan.planner.wire_model import ACK_SHARE, Pipe, WireLink

__all__ = ["measured_link", "read_measurement"]

LEAST_MBIT = 1e-3
"""Of a direction in which nothing came through."""


def measured_link(found: Measurement) -> WireLink:
    """The link that `fedwan doctor link` measured: goodput is what it saw, theory has no say."""
    rtt_s = found.rtt_ms / 1e3
    return WireLink(_measured_pipe(found.up, rtt_s), _measured_pipe(found.down, rtt_s))


def _measured_pipe(way: Way, rtt_s: float) -> Pipe:
    return Pipe(
        max(way.mbit, LEAST_MBIT) * ACK_SHARE * 1e6 / 8, rtt_s, not way.congestion.startswith("bbr")
    )


def read_measurement(path: Path) -> Measurement:
    """What `fedwan doctor link --json` wrote.

    Raises:
        ConfigError: it is something else.
    """
    try:
        figures: dict[str, Any] = json.loads(path.read_text())
        figures.pop("advice")
        figures |= {way: Way(**figures[way]) for way in ("up", "down")}
        figures["machine"] = TcpSettings(**figures["machine"])
        return Measurement(**figures)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"--link = {str(path)!r} is no measurement; write one with `fedwan doctor link --json`"
        ) from None
