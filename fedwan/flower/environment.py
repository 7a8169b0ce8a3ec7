"""The environment that Flower's processes run in: private, offline, and ours alone."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["flower_environment"]

_PACKAGE_ROOT = str(Path(__file__).resolve().parents[2])
# Seconds between two looks of a SuperExec for a task to start; Flower's own is 1.
_TASK_POLL_S = 0.5


def flower_environment(home: Path) -> dict[str, str]:
    """Environment variables for a Flower process.

    Flower takes these settings from nowhere else. Variables of the user's that would change its
    behaviour behind our back (`FLWR_…`) are dropped.

    Args:
        home: the process's own FLWR_HOME; apps are unpacked below it.
    """
    env = {key: value for key, value in os.environ.items() if not key.startswith("FLWR_")}
    return env | {
        "FLWR_HOME": str(home.absolute()),
        "FLWR_TELEMETRY_ENABLED": "0",
        "FLWR_DISABLE_UPDATE_CHECK": "1",
        "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": str(_TASK_POLL_S),
        # SuperExec finds the apps' commands by name: this Python's come first.
        # The bundle carries no library: the apps run the fedwan that is running now.
        "PYTHONPATH": os.pathsep.join(
            part for part in (_PACKAGE_ROOT, env.get("PYTHONPATH", "")) if part
        ),
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), env.get("PATH", "")]),
        # All of it talks over loopback, which a company's proxy must not see.
        "NO_PROXY": _with_loopback(env.get("NO_PROXY", "")),
        "no_proxy": _with_loopback(env.get("no_proxy", "")),
        "PYTHONUNBUFFERED": "1",
    }


def _with_loopback(hosts: str) -> str:
    return ",".join(part for part in (hosts, "127.0.0.1", "localhost") if part)
