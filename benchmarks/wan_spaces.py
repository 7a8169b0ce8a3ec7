"""Network namespaces by name: made, looked into, and removed with whatever still runs inside."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from fedwan.errors import FedwanError

__all__ = ["FOLDER", "ip", "make", "names_of", "remove", "set_sysctl", "sweep"]

FOLDER = Path("/run/netns")
KILL_AFTER_S = 2.0

_OURS = re.compile(r"fedwan-([0-9]+)-[a-z0-9-]+")


def ip(*words: str) -> str:
    """Run `ip`, and give what it printed.

    Raises:
        FedwanError: it failed; the text says how.
    """
    result = subprocess.run(["ip", *words], capture_output=True, text=True)
    if result.returncode:
        raise FedwanError(f"`ip {' '.join(words)}` failed: {result.stderr.strip()}")
    return result.stdout


def make(name: str) -> None:
    """A namespace whose TCP may fill a long fat link, and remembers no earlier connection."""
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    set_sysctl(name, "net.ipv6.conf.all.disable_ipv6", "1")
    set_sysctl(name, "net.ipv4.tcp_rmem", "4096 131072 67108864")
    set_sysctl(name, "net.ipv4.tcp_wmem", "4096 65536 67108864")
    set_sysctl(name, "net.ipv4.tcp_no_metrics_save", "1")


def set_sysctl(name: str, key: str, value: str) -> None:
    """Set a kernel's setting inside a namespace."""
    path = "/proc/sys/" + key.replace(".", "/")
    # A child of its own, since a namespace is entered by a process as a whole.
    command = ["ip", "netns", "exec", name, "sh", "-c", 'echo "$1" > "$2"', "sh", value, path]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        raise FedwanError(f"{key} = {value!r} is refused here: {result.stderr.strip()}")


def names_of(star: int, num_sites: int) -> tuple[str, ...]:
    """Names of the coordinator's and the sites' namespaces, which tell the process they are of."""
    places = ("coordinator", *(f"s{index + 1}" for index in range(num_sites)))
    return tuple(f"fedwan-{os.getpid()}-{star}-{place}" for place in places)


def remove(names: Sequence[str]) -> None:
    """Remove namespaces, those that are there, and end the processes inside."""
    left = [name for name in names if (FOLDER / name).exists()]
    deadline = time.monotonic() + KILL_AFTER_S
    number = signal.SIGTERM
    while pids := [pid for name in left for pid in ip("netns", "pids", name).split()]:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(int(pid), number)
        time.sleep(0.02)
        if time.monotonic() > deadline:
            number = signal.SIGKILL
    for name in left:
        with suppress(FedwanError):  # somebody else who cleans up was faster
            ip("netns", "del", name)


def sweep() -> None:
    """Remove namespaces whose process was killed together with the one that cleans up after it."""
    if FOLDER.exists():
        for path in FOLDER.iterdir():
            match = _OURS.fullmatch(path.name)
            if match and not Path(f"/proc/{match[1]}").exists():
                remove([path.name])
