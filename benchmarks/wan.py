"""An emulated wide area: a star of network namespaces around a coordinator. Needs root and Linux.

    with Star(sites=2, link=WanLink(rate_mbit=200, rtt_ms=100)) as star:
        server = star.coordinator.popen(["my-server", "--host", star.coordinator.address])
        star.sites[0].run(["my-client", star.coordinator.address])

Each site has a link of its own to the coordinator, with a rate, round-trip time, loss and queue,
full duplex. All sites reach the coordinator at one
address, and each other through it. Real TCP of the kernel runs over it, in real processes; another
process carries the packets between TUN devices (`wan_tun.py`). Rates count IP bytes, headers of
every segment included: TCP gets 96.5 % at most.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any, Self

from benchmarks.wan_tun import remove
from fedwan.errors import FedwanError, UserError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = Path("/run/netns")
COORDINATOR = "198.18.0.1"  # RFC 2544 keeps 198.18.0.0/15 for benchmarks
LEAST_QUEUE_BYTES = 256 << 10
CLOSE_S = 10.0
_OURS = re.compile(r"fedwan-([0-9]+)-[a-z0-9-]+")

_numbers = itertools.count()  # several stars of one process may be up at once


class WanUnavailable(UserError):
    """This machine cannot emulate a network; fall back to `ShapedLink`."""


@lru_cache(maxsize=1)
def available() -> str | None:
    """Why this machine cannot emulate a wide area; None if it can."""
    if sys.platform != "linux":
        return f"network namespaces are Linux's, this is {sys.platform}"
    if shutil.which("ip") is None:
        return "there is no `ip`; install iproute2"
    probe = ["unshare", "--net", "ip", "link", "set", "lo", "up"]
    if subprocess.run(probe, capture_output=True).returncode or not os.access("/run", os.W_OK):
        return "this process may not make network namespaces; run as root, with CAP_SYS_ADMIN"
    if not os.access("/dev/net/tun", os.R_OK | os.W_OK):
        return "/dev/net/tun cannot be opened; load the module tun"
    return None


@dataclass(frozen=True)
class WanLink:
    """One link; both ways are alike."""

    rate_mbit: float = 200.0
    """Mbit/s of IP packets, each way; 0 does not limit."""
    rtt_ms: float = 100.0
    """Round-trip time of an empty link."""
    loss: float = 0.0
    """Share of packets lost, each way, 0 to 1."""
    queue_ms: float = 0.0
    """Length of the queue before the link, as time; 0 takes the round trip, 256 KiB at least."""

    def __post_init__(self) -> None:
        for name in ("rate_mbit", "rtt_ms", "queue_ms"):
            if not 0 <= getattr(self, name) < 1e6:
                raise UserError(f"{name} = {getattr(self, name)!r} is no link's; choose 0 to 1e6")
        if not 0 <= self.loss < 1:
            text = f"loss = {self.loss:g} ({100 * self.loss:g} %) is no link's"
            raise UserError(f"{text}; choose 0 or more and less than 1 (100 %)")

    @property
    def shape(self) -> dict[str, float]:
        """What `Direction.shape` takes."""
        bytes_per_s = self.rate_mbit * 1e6 / 8
        queue_bytes = bytes_per_s * (self.queue_ms or self.rtt_ms) / 1e3
        return {
            "bytes_per_s": bytes_per_s,
            "delay_s": self.rtt_ms / 2e3,
            "loss": self.loss,
            "queue_bytes": queue_bytes if self.queue_ms else max(LEAST_QUEUE_BYTES, queue_bytes),
        }


BARE = WanLink(rate_mbit=0, rtt_ms=0)
"""No wide area: bare links between the same namespaces, which carry all they can."""


class Place:
    """A machine of the star: a network namespace, and the address where the others reach it."""

    def __init__(self, name: str, address: str) -> None:
        self.name = name
        self.address = address
        self._enter = ["ip", "netns", "exec", name]
        self._children: list[subprocess.Popen[Any]] = []

    def popen(self, words: Sequence[str], **options: Any) -> subprocess.Popen[Any]:
        """Start a process here; it is ended with the star at the latest."""
        child = subprocess.Popen([*self._enter, *words], **options)
        self._children.append(child)
        return child

    def run(self, words: Sequence[str], **options: Any) -> subprocess.CompletedProcess[Any]:
        return subprocess.run([*self._enter, *words], **options)

    def reap(self) -> None:
        """End what was started here and did not end with the namespace, as it was not in it yet."""
        for child in self._children:
            child.kill()
            child.wait()


class Star:
    """A coordinator and sites around it, up between `with` and its end.

    Args:
        sites: how many.
        link: every site's; `BARE` makes links without an emulator.
        congestion: TCP's congestion control of connections that do not choose their own.

    Raises:
        WanUnavailable: this machine cannot emulate a network; the text says why.
    """

    def __init__(self, sites: int = 2, link: WanLink = BARE, congestion: str = "") -> None:
        if not 1 <= sites <= 200:
            raise UserError(f"a star of {sites} sites; take 1 to 200")
        self.emulation = "veth" if link == BARE else "tun"
        name = f"fedwan-{os.getpid()}-{next(_numbers)}"
        self.coordinator = Place(f"{name}-coordinator", COORDINATOR)
        self.sites = [Place(f"{name}-s{n}", f"198.18.1.{n}") for n in range(1, sites + 1)]
        self._places = [self.coordinator, *self.sites]
        self._plan = {
            "places": [(place.name, place.address) for place in self._places],
            "shapes": [None if link == BARE else link.shape] * sites,
            "congestion": congestion,
        }
        self._child: subprocess.Popen[str] | None = None
        self._lock = threading.Lock()

    def __enter__(self) -> Self:
        if (reason := available()) is not None:
            raise WanUnavailable(f"no emulated WAN here: {reason}; use ShapedLink instead")
        _sweep()
        # A session of its own, so that Ctrl-C reaches it through us alone.
        pipes: dict[str, Any] = {"stdin": -1, "stdout": -1, "text": True, "cwd": ROOT}
        command = [sys.executable, "-m", "benchmarks.wan_tun", json.dumps(self._plan)]
        self._child = subprocess.Popen(command, **pipes, start_new_session=True)
        try:
            self._read()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Remove namespaces, devices, and every process inside."""
        if (child := self._child) is not None:
            assert child.stdin is not None and child.stdout is not None
            with suppress(OSError):
                child.stdin.close()
            with suppress(subprocess.TimeoutExpired):
                child.wait(CLOSE_S)
            child.kill()
            child.wait()
            child.stdout.close()
            self._child = None
        remove([place.name for place in self._places])  # what a killed wire left
        for place in self._places:
            place.reap()

    def silence(self, seconds: float) -> None:
        """Carry nothing for a while; what is sent then is lost, but for the devices' queues."""
        assert self._child is not None, "the star is up"
        os.kill(self._child.pid, signal.SIGSTOP)
        try:
            time.sleep(seconds)
        finally:
            os.kill(self._child.pid, signal.SIGCONT)

    def counts(self, site: int) -> dict[str, dict[str, int]]:
        """Packets and bytes carried, and packets dropped by cause, `up` and `down`."""
        if self._child is None or self._child.stdin is None:
            raise UserError("the star is not up; use it inside `with Star(...) as star:`")
        with self._lock:
            with suppress(OSError):
                print(site, file=self._child.stdin, flush=True)
            counts: dict[str, dict[str, int]] = json.loads(self._read())
            return counts

    def _read(self) -> str:
        assert self._child is not None and self._child.stdout is not None
        if not (line := self._child.stdout.readline()):
            raise FedwanError("the emulator has died; its error stands above")
        return line


def _sweep() -> None:
    """Remove namespaces whose process was killed together with the one that cleans up after it."""
    for path in FOLDER.iterdir() if FOLDER.exists() else ():
        match = _OURS.fullmatch(path.name)
        if match and not Path(f"/proc/{match[1]}").exists():
            remove([path.name])


# What a link really gives -------------------------------------------------------------------------

_SERVER = """
import socket, sys, time
address, seconds, skipped = sys.argv[1], float(sys.argv[2]), float(sys.argv[3])
with socket.create_server((address, 5201)) as listener:
    print("listening", flush=True)
    flow, _ = listener.accept()
block, num_bytes, began, last = bytearray(1 << 20), 0, time.monotonic() + skipped, 0.0
while size := flow.recv_into(block):
    last = time.monotonic()
    if began <= last <= began + seconds:
        num_bytes += size
print(num_bytes * 8 / 1e6 / max(1e-9, min(last - began, seconds)))
"""
_CLIENT = """
import socket, sys, time
address, seconds, congestion = sys.argv[1], float(sys.argv[2]), sys.argv[3]
block, flow = bytes(1 << 20), socket.socket()
if congestion:
    flow.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, congestion.encode())
flow.connect((address, 5201))
until = time.monotonic() + seconds
while time.monotonic() < until:
    flow.sendall(block)
flow.close()
"""


def tcp_mbit(
    receiver: Place, sender: Place, seconds: float, skipped_s: float = 1, congestion: str = ""
) -> float:
    """Mbit/s of payload that one plain TCP flow brings over, after its first `skipped_s`."""
    words = [sys.executable, "-c", _SERVER, receiver.address, f"{seconds}", f"{skipped_s}"]
    server = receiver.popen(words, stdout=subprocess.PIPE, text=True)
    try:
        server.stdout.readline()  # type: ignore[union-attr]  # it listens
        words = [sys.executable, "-c", _CLIENT, receiver.address, f"{seconds + skipped_s}"]
        sender.run([*words, congestion], timeout=seconds + skipped_s + 30, check=True)
        return float(server.communicate(timeout=30)[0])
    finally:
        server.kill()
        server.communicate()
