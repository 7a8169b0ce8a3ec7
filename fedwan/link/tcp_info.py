"""What the kernel counts about this process's connections, and what it allows their sockets.

Linux counts for each connection what was sent, what was sent again, and what held the sender back
(`struct tcp_info` of linux/tcp.h). The share sent again stands for the loss: every lost packet is
sent again, and few others are.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from fedwan.link import wire_pb2 as wire
from fedwan.link.sockets import plain, resolve, tcp_sockets

__all__ = ["TcpWatch", "tcp_settings", "together"]

_SYSCTLS = Path("/proc/sys/net/ipv4")
_NAME_BYTES = 16  # TCP_CA_NAME_MAX of Linux
_INFO_BYTES = 255
# Offsets in struct tcp_info, which only ever grows at its end.
_TIMES = {"rtt_us": 68, "least_rtt_us": 148}  # 32 bits
_COUNTS = {  # 64 bits
    "busy_us": 168,
    "window_us": 176,
    "buffer_us": 184,
    "bytes_sent": 200,
    "bytes_again": 208,
}


class TcpWatch:
    """Counts what connections of this process do from now on.

    Args:
        address: `host:port` of their other end.
    """

    def __init__(self, address: str) -> None:
        self._peers = resolve(address)
        self._before = self._look()

    def state(self) -> wire.TcpState:
        """What they did meanwhile, all together; connections made meanwhile count from their start.

        Those that stood still are left out, so that the state is of the connections in use.
        """
        found = self._look()
        for key, state in found.items():
            before = self._before.get(key, wire.TcpState())
            for name in _COUNTS:
                setattr(state, name, max(0, getattr(state, name) - getattr(before, name)))
        return together(found.values())

    def _look(self) -> dict[tuple[str, int], wire.TcpState]:
        found = {}
        for sock in tcp_sockets():
            with suppress(OSError):  # not connected yet, or closed by now
                if plain(sock.getpeername()) in self._peers:
                    found[plain(sock.getsockname())] = _read(sock)
        return found


def together(states: Iterable[wire.TcpState]) -> wire.TcpState:
    """Of several connections as if of one: sums, the longest round trip, the least of the least."""
    states = list(states)
    total = wire.TcpState()
    for state in [state for state in states if state.bytes_sent] or states:
        total.congestion = state.congestion
        for name in _COUNTS:
            setattr(total, name, getattr(total, name) + getattr(state, name))
        total.rtt_us = max(total.rtt_us, state.rtt_us)
        least = [us for us in (total.least_rtt_us, state.least_rtt_us) if us]
        total.least_rtt_us = min(least, default=0)
    return total


def tcp_settings(folder: Path = _SYSCTLS) -> wire.TcpSettings:
    """What this machine's kernel allows; empty where it does not tell.

    Args:
        folder: of the kernel's settings; a test's may differ.
    """

    def words(name: str) -> list[str]:
        with suppress(OSError):
            return (folder / name).read_text().split()
        return []

    return wire.TcpSettings(
        allowed=words("tcp_allowed_congestion_control"),
        available=words("tcp_available_congestion_control"),
        receive=map(int, words("tcp_rmem")),
        send=map(int, words("tcp_wmem")),
    )


def _read(sock: socket.socket) -> wire.TcpState:
    """Of one socket; what an older kernel does not tell stays 0."""
    state = wire.TcpState()
    if sys.platform != "linux":
        return state
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    state.congestion = name.split(b"\0")[0].decode()
    info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    info = info.ljust(_INFO_BYTES, b"\0")
    for code, offsets in (("=I", _TIMES), ("=Q", _COUNTS)):
        for field, offset in offsets.items():
            setattr(state, field, struct.unpack_from(code, info, offset)[0])
    return state
