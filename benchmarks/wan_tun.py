"""The process that is the wire: makes a star's namespaces and carries packets between them, slowly.

`wan.Star` starts it with a plan; it says when all is up, and answers a link's number on its
standard input with the link's counts. The end of that input, however it came about, takes
everything down, namespaces and the processes inside included.

Each direction of a link is a transmitter of a fixed rate behind a queue of a fixed size, then a
wire of a fixed delay which loses segments at random: tail drop first, since what is lost on the
wire took its time at the transmitter. Every segment is charged with its own headers. A packet comes
out when its last byte would have, to half a millisecond, early as often as late.

With `IFF_VNET_HDR` a packet begins with a virtio-net header of 10 bytes, and may be a super-packet:
one IP and TCP header in front of the payload of many segments, which a real network card would
send one by one (virtio 1.2, 5.1.6). A lossy wire loses segments, so such a packet may have to be
cut. Namespaces have no IPv6.
"""

from __future__ import annotations

import ctypes
import fcntl
import json
import math
import os
import random
import select
import signal
import struct
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from fedwan.errors import FedwanError

TUNSETIFF, TUNSETOFFLOAD = 0x400454CA, 0x400454D0
IFF_TUN, IFF_NO_PI, IFF_VNET_HDR = 0x0001, 0x1000, 0x4000
TUN_F_CSUM, TUN_F_TSO4 = 0x01, 0x02
CLONE_NEWNET = 0x40000000

VNET_BYTES = 10
"""Bytes in front of the IP header."""
TICK_S = 0.5e-3
"""It waits for this at least."""
EARLY_S = 0.3e-3
"""Packets due within this go out at once: half of a tick, and what waking takes."""
IDLE_S = 60.0
"""It waits for this at most."""
MAX_PACKET = (1 << 16) + VNET_BYTES
BATCH = 64
"""Packets read from one device before others have their turn."""
KILL_AFTER_S = 2.0
_SYSCTLS = {
    "net/ipv6/conf/all/disable_ipv6": "1",
    # TCP may fill a long fat link, and remembers no earlier connection.
    "net/ipv4/tcp_rmem": "4096 131072 67108864",
    "net/ipv4/tcp_wmem": "4096 65536 67108864",
    "net/ipv4/tcp_no_metrics_save": "1",
    "net/ipv4/ip_forward": "1",
}

_VNET = struct.Struct("=BBHHHH")  # flags, gso type, header bytes, gso size, csum start, csum offset
_NEEDS_CSUM = 1
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80

# Packets ------------------------------------------------------------------------------------------


def num_segments(packet: bytes) -> int:
    return _cut_points(packet)[2] if packet[1] else 1


def wire_bytes(packet: bytes) -> int:
    """IP bytes that the wire would carry: every segment has headers of its own."""
    size = len(packet) - VNET_BYTES
    if not packet[1]:
        return size
    header, _, num = _cut_points(packet)
    return size + (num - 1) * header


def _cut_points(packet: bytes) -> tuple[int, int, int]:
    """Bytes of the IP and TCP headers, bytes of payload in a segment, and number of segments."""
    segment, start = struct.unpack_from("=HH", packet, 4)
    header = start + (packet[VNET_BYTES + start + 12] >> 4) * 4
    return header, segment, -(-(len(packet) - VNET_BYTES - header) // segment)


def keep(packet: bytes, lost: Sequence[int]) -> list[bytes]:
    """What is left of a packet when some of its segments, by ascending index, are lost."""
    edges = [-1, *lost, num_segments(packet)]
    runs = [(a + 1, b - a - 1) for a, b in zip(edges, edges[1:], strict=False) if b - a > 1]
    return [cut(packet, first, count) for first, count in runs]


def cut(packet: bytes, first: int, count: int) -> bytes:
    """A packet that holds `count` segments of another, from segment `first` on.

    As a network card would: sequence number and IP identification move on, FIN and PSH stay on the
    last segment, CWR on the first (Linux, `tcp_gso_segment`).
    """
    if first == 0 and count >= num_segments(packet):
        return packet
    header, segment, num = _cut_points(packet)
    flags, kind, _, _, start, offset = _VNET.unpack_from(packet)
    at = VNET_BYTES + header + first * segment
    payload = packet[at : at + count * segment]
    head = bytearray(packet[VNET_BYTES : VNET_BYTES + header])
    (sequence,) = struct.unpack_from("!I", head, start + 4)
    struct.pack_into("!I", head, start + 4, (sequence + first * segment) & 0xFFFFFFFF)
    if first + count < num:
        head[start + 13] &= ~(_FIN | _PSH)
    if first:
        head[start + 13] &= ~_CWR
    (identification,) = struct.unpack_from("!H", head, 4)
    struct.pack_into("!H", head, 2, len(head) + len(payload))
    struct.pack_into("!H", head, 4, (identification + first) & 0xFFFF)
    struct.pack_into("!H", head, 10, 0)
    struct.pack_into("!H", head, 10, 0xFFFF - _folded_sum(head[:start]))
    # Of TCP's checksum only the pseudo-header's part: the receiver trusts the rest.
    pseudo = bytes(head[12:20]) + struct.pack("!II", 6, len(head) - start + len(payload))
    struct.pack_into("!H", head, start + offset, _folded_sum(pseudo))
    if len(payload) <= segment:
        kind = segment = 0
    return _VNET.pack(flags | _NEEDS_CSUM, kind, header, segment, start, offset) + head + payload


def _folded_sum(data: bytes | bytearray) -> int:
    """Sum of 16-bit words in ones' complement (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


# Links --------------------------------------------------------------------------------------------


class Direction:
    """One way of a link.

    Args:
        send: writes a packet to the far end's device.
        seed: of the losses.
    """

    def __init__(self, send: Callable[[bytes], Any], seed: int) -> None:
        self._send = send
        self._random = random.Random(seed)
        self._queue: deque[tuple[float, bytes]] = deque()
        self._free_at = 0.0  # when the transmitter has sent all that it has
        self.counts = {"packets": 0, "bytes": 0, "lost": 0, "queue_dropped": 0}
        self.shape(0.0, 0.0, 0.0, 0.0)

    def shape(self, bytes_per_s: float, delay_s: float, loss: float, queue_bytes: float) -> None:
        """Change the wire; what is under way keeps its time. A rate of 0 does not limit."""
        self._seconds_per_byte = 1 / bytes_per_s if bytes_per_s else 0.0
        self._queue_s = queue_bytes * self._seconds_per_byte
        self._delay_s = delay_s
        self._log_kept = math.log1p(-loss) if loss else 0.0
        self._until_loss = self._draw()

    def _draw(self) -> float:
        """Segments that pass before the next one is lost: geometric."""
        if not self._log_kept:
            return math.inf
        return math.log(1.0 - self._random.random()) // self._log_kept

    def accept(self, packet: bytes, now: float) -> None:
        """Queue a packet, or what the queue has room for and the wire does not lose."""
        num = num_segments(packet)
        counts = self.counts
        duration = wire_bytes(packet) * self._seconds_per_byte
        backlog = self._free_at - now
        if backlog <= 0:
            self._free_at = now
        elif backlog + duration > self._queue_s:
            fitting = int((self._queue_s - backlog) / duration * num)
            counts["queue_dropped"] += num - max(0, fitting)
            if fitting <= 0:
                return
            packet, num = cut(packet, 0, fitting), fitting
            duration = wire_bytes(packet) * self._seconds_per_byte
        self._free_at += duration
        counts["packets"] += num
        counts["bytes"] += wire_bytes(packet)
        due = self._free_at + self._delay_s
        if self._queue:
            due = max(due, self._queue[-1][0])  # a delay that became shorter reorders nothing
        if self._until_loss >= num:
            self._until_loss -= num
            self._queue.append((due, packet))
        else:
            for part in keep(packet, self._lose(num)):
                self._queue.append((due, part))

    def _lose(self, num: int) -> list[int]:
        """Which of the next `num` segments are lost."""
        lost: list[int] = []
        at = self._until_loss
        while at < num:
            lost.append(int(at))
            at += 1 + self._draw()
        self._until_loss = at - num
        self.counts["lost"] += len(lost)
        return lost

    def deliver(self, until: float) -> None:
        queue = self._queue
        while queue and queue[0][0] <= until:
            # A device that is not up, or full, loses the packet as a network card would.
            with suppress(OSError):
                self._send(queue.popleft()[1])

    def next_due(self) -> float:
        """When the next packet is due; infinite if there is none."""
        return self._queue[0][0] if self._queue else math.inf


class Wire:
    """All links, and the one loop that serves them."""

    def __init__(self) -> None:
        self._by_device: dict[int, Direction] = {}
        self._links: list[Callable[[], dict[str, Any]]] = []
        self._input = b""

    def add(self, ends: Sequence[tuple[str, str]], shape: Mapping[str, float] | None) -> None:
        """A link between the coordinator's device and a site's; without a shape a bare one."""
        if shape is None:
            (hub, device), (site, peer) = ends
            far = ["peer", "name", peer, "netns", site]
            ip("-n", hub, "link", "add", device, "type", "veth", *far)
            self._links.append(partial(_bare_counts, ends))
            return
        near, far_end = (_open_tun(*end) for end in ends)
        pair = []
        for source, target in ((near, far_end), (far_end, near)):
            direction = Direction(partial(os.write, target), len(self._by_device))
            direction.shape(**shape)
            self._by_device[source] = direction
            pair.append(direction.counts)
        self._links.append(lambda: dict(zip(("down", "up"), pair, strict=True)))

    def run(self) -> None:
        directions = self._by_device
        while True:
            now = time.monotonic()
            due = min((d.next_due() for d in directions.values()), default=math.inf)
            wait_s = max(TICK_S, due - now) if due > now + EARLY_S else 0.0
            # Not epoll, which counts in milliseconds.
            readable, _, _ = select.select([0, *directions], [], [], min(wait_s, IDLE_S))
            for device in readable:
                if device:
                    self._read(device)
                elif not self._answer():
                    return
            now = time.monotonic()
            for direction in directions.values():
                direction.deliver(now + EARLY_S)

    def _read(self, device: int) -> None:
        accept = self._by_device[device].accept
        now = time.monotonic()
        for _ in range(BATCH):
            try:
                packet = os.read(device, MAX_PACKET)
            except OSError:  # nothing more, or not up yet
                return
            accept(packet, now)

    def _answer(self) -> bool:
        """A line of counts for each link that standard input names; False at its end."""
        data = os.read(0, 1 << 16)
        *lines, self._input = (self._input + data).split(b"\n")
        for line in lines:
            print(json.dumps(self._links[int(line)]()), flush=True)
        return bool(data)


def _bare_counts(ends: Sequence[tuple[str, str]]) -> dict[str, Any]:
    """Super-packets count as one, with one header."""
    counts = {}
    for way, (name, device) in zip(("down", "up"), ends, strict=True):
        (row,) = json.loads(ip("-n", name, "-s", "-j", "link", "show", "dev", device))
        counts[way] = {key: row["stats64"]["tx"][key] for key in ("packets", "bytes")}
    return counts


def _open_tun(namespace: str, name: str) -> int:
    """A TUN device in a named network namespace, without waiting; gone when it is closed."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open("/proc/self/ns/net") as home, open(f"/run/netns/{namespace}") as there:
        _enter(libc, there.fileno())
        try:
            device = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
        finally:
            _enter(libc, home.fileno())
    flags = IFF_TUN | IFF_NO_PI | IFF_VNET_HDR
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH22x", name.encode(), flags))
    fcntl.ioctl(device, TUNSETOFFLOAD, TUN_F_CSUM | TUN_F_TSO4)
    return device


def _enter(libc: Any, namespace: int) -> None:
    if libc.setns(namespace, CLONE_NEWNET):
        number = ctypes.get_errno()
        raise OSError(number, f"setns: {os.strerror(number)}")


# Namespaces ---------------------------------------------------------------------------------------


def ip(*words: str) -> str:
    """Run `ip`, and give what it printed."""
    result = subprocess.run(["ip", *words], capture_output=True, text=True)
    if result.returncode:
        raise FedwanError(f"`ip {' '.join(words)}` failed: {result.stderr.strip()}")
    return result.stdout


def make(name: str) -> None:
    """A namespace whose TCP may fill a long fat link."""
    ip("netns", "add", name)
    ip("-n", name, "link", "set", "lo", "up")
    # A child of its own, since a namespace is entered by a process as a whole.
    script = " && ".join(f"echo {value} > /proc/sys/{key}" for key, value in _SYSCTLS.items())
    words = ["ip", "netns", "exec", name, "sh", "-c", script]
    result = subprocess.run(words, capture_output=True, text=True)
    if result.returncode:
        raise FedwanError(f"a kernel setting is refused here: {result.stderr.strip()}")


def build(
    wire: Wire,
    places: Sequence[tuple[str, str]],
    shapes: Sequence[Mapping[str, float] | None],
    congestion: str,
) -> None:
    """A star of (namespace, address), the coordinator's first, with a link for each site."""
    for name, _ in places:
        make(name)
    (hub, address), *sites = places
    ip("-n", hub, "addr", "add", f"{address}/32", "dev", "lo")
    # By route: in a namespace, a sysctl takes only what the machine allows to everybody.
    control = ["congctl", congestion] if congestion else []
    for index, ((name, own), shape) in enumerate(zip(sites, shapes, strict=True)):
        device = f"wan{index}"
        wire.add(((hub, device), (name, "wan")), shape)
        for space, end in ((hub, device), (name, "wan")):
            ip("-n", space, "link", "set", end, "mtu", "1500", "txqueuelen", "10000", "up")
        ip("-n", name, "addr", "add", f"{own}/32", "dev", "wan")
        ip("-n", hub, "route", "add", f"{own}/32", "dev", device, "src", address, *control)
        ip("-n", name, "route", "add", "198.18.0.0/15", "dev", "wan", "src", own, *control)


def remove(names: Sequence[str]) -> None:
    """Remove network namespaces, those that are there, and end the processes inside."""
    left = [name for name in names if Path("/run/netns", name).exists()]
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


if __name__ == "__main__":
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for whoever started us
    plan = json.loads(sys.argv[1])
    wire = Wire()
    try:
        build(wire, **plan)
        with suppress(PermissionError):
            # A network does not slow down because its machines are busy. Real time, for niceness
            # counts among the processes of one session alone (sched(7), "autogroup").
            os.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(1))
        print("up", flush=True)
        wire.run()
    finally:
        remove([name for name, _ in plan["places"]])
