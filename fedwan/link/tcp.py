"""The data plane's TCP sockets: their settings, and what the kernel counts about them.

Congestion control: at 1 Gbit/s, 100 ms and one packet in 10,000 lost, cubic gets a tenth of what
BBR gets (Cardwell et al. 2016). A limit on what a socket holds unsent: the kernel takes in
megabytes, which would wait in a connection that has become slow. And a pace: left alone, TCP fills
the queue before the link until packets are lost, and all other traffic waits in that queue.

Where a lost packet slows a connection down, four get more than one. Under bbr each of several is
sure of the whole link, and they lose what they send to each other; one that is paced below the
link's rate needs no others (docs/log.md). So it is four, or one.

gRPC for Python has no setting for these, but they may be changed while a socket is connected, and
accepted sockets inherit the listener's. So this finds the process's own sockets by their addresses,
in its table of open files: the kernel's table of all connections takes 10 ms to read.
"""

from __future__ import annotations

import logging
import os
import socket
import struct
import sys
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from ipaddress import ip_address
from pathlib import Path
from typing import Any

from fedwan.config import LinkConfig, host_and_port

log = logging.getLogger(__name__)

NUM_CHANNELS = 4
PREFERRED = "bbr"
MSS_BYTES = 1448
UNSENT_BYTES = 1 << 19
"""Beyond what is under way; 4 ms at 1 Gbit/s."""
SO_MAX_PACING_RATE = 47
"""Of Linux (asm-generic/socket.h); Python's socket module has no name for it."""
_SYSCTLS = Path("/proc/sys/net/ipv4")
_FILES = "/proc/self/fd"
_NAME_BYTES = 16  # TCP_CA_NAME_MAX of Linux
_INFO_BYTES = 255
_RTT_AT, _ACKED_AT, _RECEIVED_AT, _SENT_AT, _AGAIN_AT = 68, 120, 128, 200, 208
"""Offsets in struct tcp_info (linux/tcp.h), which only ever grows at its end."""


class Congestion:
    """Chooses a congestion control once, and sets up sockets as they appear, from any thread.

    `auto` takes bbr where this user may, `system` leaves what there is; a name that this machine
    refuses is logged once, with what would allow it.
    """

    def __init__(self, settings: LinkConfig) -> None:
        self.name = _choose(settings.congestion)
        """What sockets are given; empty to leave them alone."""
        is_whole = settings.pace_mbit > 0 or self.in_use.startswith("bbr")
        self.num_channels = 1 if is_whole else NUM_CHANNELS
        """Connections of a site, for payloads."""
        self.pace_mbit = settings.pace_mbit / self.num_channels
        """Most that one connection may send, with all headers; 0 sets no limit."""

    @property
    def in_use(self) -> str:
        """The control that new connections have; empty where the kernel does not tell."""
        return self.name or " ".join(_words("tcp_congestion_control"))

    def apply_to_peer(self, address: str) -> int:
        """Set up this process's connections to `host:port` that are not yet; how many."""
        with suppress(OSError):  # no descriptor is left for a moment
            return sum(self._apply(found) for found in _connected_to(address, are_new=True))
        return 0

    def apply_to_listener(self, port: int) -> int:
        """Set up the socket that listens on `port`, and so all that it will accept."""
        return sum(self._apply(found) for found, listens in _sockets_at(port) if listens)

    def _apply(self, found: socket.socket) -> bool:
        with suppress(OSError):  # closed by now
            found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
            if self.pace_mbit:
                pace = struct.pack("N", round(self.pace_mbit * 1e6 / 8))
                found.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
            if self.name:
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.name.encode())
            return True
        return False


def _choose(setting: str) -> str:
    """The name to set, after a try on a socket of our own."""
    name = PREFERRED if setting == "auto" else setting
    if name == "system":
        return ""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as trial:
            trial.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
        return name
    except (OSError, AttributeError) as error:  # forbidden, not loaded, or not Linux
        if setting != "auto":
            allowed = " ".join(_words("tcp_allowed_congestion_control"))
            log.warning(
                f"link.congestion = {setting!r} is not to be had here ({error}), the system's is "
                f"used instead; on Linux: sudo modprobe tcp_{name}; sudo sysctl -w "
                f"net.ipv4.tcp_allowed_congestion_control='{allowed} {name}'"
            )
        return ""


@dataclass
class TcpState:
    """What the kernel counts about connections, since they were made; empty where it does not."""

    congestion: str = ""
    rtt_us: int = 0
    """Smoothed; the longest of several."""
    sent: int = 0
    """Bytes, those sent again included."""
    again: int = 0
    """Bytes sent again: every lost packet is, and few others."""
    moved: int = 0
    """Bytes that the other end has taken, and bytes that came."""


def read_state(address: str) -> TcpState:
    """Of this process's connections to `host:port`, all together."""
    total = TcpState()
    for found in _connected_to(address):
        with suppress(OSError):  # closed by now
            name = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
            info = found.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
            info = info.ljust(_INFO_BYTES, b"\0")  # what an older kernel does not tell stays 0
            total.congestion = name.split(b"\0")[0].decode()
            total.rtt_us = max(total.rtt_us, struct.unpack_from("=I", info, _RTT_AT)[0])
            total.sent += struct.unpack_from("=Q", info, _SENT_AT)[0]
            for at in (_ACKED_AT, _RECEIVED_AT):
                total.moved += struct.unpack_from("=Q", info, at)[0]
            total.again += struct.unpack_from("=Q", info, _AGAIN_AT)[0]
    return total


def num_accepted(port: int) -> int:
    """This process's connections that came to a port."""
    return sum(not listens for _, listens in _sockets_at(port))


def largest_send_buffer() -> int:
    """Bytes that the kernel lets a socket hold to send; 0 if it does not tell."""
    return int((_words("tcp_wmem") or ("0",))[-1])


def _words(name: str) -> tuple[str, ...]:
    with suppress(OSError):
        return tuple((_SYSCTLS / name).read_text().split())
    return ()


def _connected_to(address: str, are_new: bool = False) -> Iterator[socket.socket]:
    """Connections to `host:port`; only those that are not set up yet, if asked for new ones."""
    host, port = host_and_port(address)
    known = _usual(host)  # a name may have another address by now, or none for a moment
    for sock in _open_sockets():
        with suppress(OSError):  # it has no peer
            its_host, its_port = _plain(sock.getpeername())
            limit = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT)
            is_old = are_new and limit == UNSENT_BYTES
            if its_port == port and known in ("", its_host) and not is_old:
                yield sock


def _sockets_at(port: int) -> Iterator[tuple[socket.socket, bool]]:
    """Those that are bound to a port; with each, whether it listens."""
    for sock in _open_sockets():
        with suppress(OSError):  # closed by now
            if sock.getsockname()[1] == port:
                yield sock, bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))


def _open_sockets() -> Iterator[socket.socket]:
    """This process's sockets of IP, whoever owns them; each only until the next is asked for.

    They are borrowed and not duplicated: a duplicate that outlives the original by a moment keeps
    it registered with its owner's epoll. Should a descriptor change hands meanwhile, the worst is
    that another socket of this process is taken for it.
    """
    for name in os.listdir(_FILES) if sys.platform == "linux" else ():
        try:
            if not os.readlink(f"{_FILES}/{name}").startswith("socket:"):
                continue
            found = socket.socket(fileno=int(name))
        except OSError:  # closed meanwhile
            continue
        try:
            if found.family in (socket.AF_INET, socket.AF_INET6):
                yield found
        finally:
            found.detach()


def _usual(host: str) -> str:
    """An address as `_plain` has it; empty for a name."""
    try:
        found = ip_address(host)
    except ValueError:
        return ""
    return str(getattr(found, "ipv4_mapped", None) or found)


def _plain(address: Any) -> tuple[str, int]:
    """Host and port; IPv4 as such, also where a socket of IPv6 speaks it."""
    return str(address[0]).removeprefix("::ffff:"), int(address[1])
