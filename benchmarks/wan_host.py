"""Whether this machine can emulate a wide area, and by what."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from functools import lru_cache

__all__ = ["available", "best_emulation", "has_netem"]


def available() -> str | None:
    """Why this machine cannot emulate a wide area; None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if shutil.which("ip") is None:
        return "there is no `ip`; install iproute2"
    if not _can_administer():
        return "this process may not make network namespaces; run as root, with CAP_SYS_ADMIN"
    if not has_netem() and not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "the kernel has no netem and /dev/net/tun cannot be opened; load the module tun"
    return None


@lru_cache(maxsize=1)
def _can_administer() -> bool:
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    return subprocess.run(probe, capture_output=True).returncode == 0 and os.access("/run", os.W_OK)


@lru_cache(maxsize=1)
def has_netem() -> bool:
    """Whether the kernel can delay packets by itself: tried in a namespace of a moment's life."""
    if shutil.which("tc") is None:
        return False
    probe = ["unshare", "--net", "tc", "qdisc", "add", "dev", "lo", "root", "netem", "delay", "1ms"]
    return subprocess.run(probe, capture_output=True).returncode == 0


def best_emulation() -> str:
    """`netem` where the kernel has it, else `tun`."""
    return "netem" if has_netem() else "tun"
