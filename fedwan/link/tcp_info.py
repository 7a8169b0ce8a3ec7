"""What the kernel counts about this process's connections, and what it allows their sockets.

Linux counts for each connection what was sent, what was sent again, and what held the sender back
(`struct tcp_info` of linux/tcp.h). The share sent again stands for the loss: every lost packet is
sent again, and few others are.
"""

from __future__ import annotations

import socket
import struct
import sys
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from fedwan.link import wire_pb2 as wire
from fedwan.link.sockets import plain, resolve, tcp_sockets

__all__ = ["TcpWatch", "tcp_settings"]

_SYSCTLS = Path("/proc/sys/net/ipv4")
_NAME_BYTES = 16  # TCP_CA_NAME_MAX of Linux
_INFO_BYTES = 256
# Offsets in struct tcp_info, which only ever grows at its end.
_RTT_US = 68
_LEAST_RTT_US = 148
_BUSY_US = 168
_WINDOW_US = 176
_BUFFER_US = 184
_BYTES_SENT = 200
_BYTES_AGAIN = 208


@dataclass(frozen=True)
class _Counters:
    """Of one socket; what an older kernel does not tell is 0."""

    congestion: str
    bytes_sent: int
    bytes_again: int
    busy_us: int
    window_us: int
    buffer_us: int
    rtt_us: int
    least_rtt_us: int


class TcpWatch:
    """Counts what connections of this process do from now on.

    Args:
        address: `host:port` of their other end.
    """

    def __init__(self, address: str) -> None:
        peers = resolve(address)
        self._is_wanted: Callable[[tuple[str, int]], bool] = lambda peer: peer in peers
        self._before = self._look()

    def state(self) -> wire.TcpState:
        """What they did meanwhile, all together; connections made meanwhile count from their start.

        Those that stood still are left out, so that the state is of the connections in use.
        """
        found = self._look()
        changes = [_since(counters, self._before.get(key)) for key, counters in found.items()]
        busy = [change for change in changes if change.bytes_sent] or changes
        return _together(busy)

    def _look(self) -> dict[tuple[str, int], _Counters]:
        found = {}
        for sock in tcp_sockets():
            with suppress(OSError):  # not connected yet, or closed by now
                if self._is_wanted(plain(sock.getpeername())):
                    found[plain(sock.getsockname())] = _read(sock)
        return found


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
        receive_max=int((words("tcp_rmem") or ["0"])[-1]),
        send_max=int((words("tcp_wmem") or ["0"])[-1]),
    )


def _read(sock: socket.socket) -> _Counters:
    info = b""
    if sys.platform == "linux":
        info = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _INFO_BYTES)
    info = info.ljust(_INFO_BYTES, b"\0")

    def whole(offset: int, code: str = "=Q") -> int:
        (value,) = struct.unpack_from(code, info, offset)
        assert isinstance(value, int)
        return value

    return _Counters(
        congestion=_congestion(sock),
        bytes_sent=whole(_BYTES_SENT),
        bytes_again=whole(_BYTES_AGAIN),
        busy_us=whole(_BUSY_US),
        window_us=whole(_WINDOW_US),
        buffer_us=whole(_BUFFER_US),
        rtt_us=whole(_RTT_US, "=I"),
        least_rtt_us=whole(_LEAST_RTT_US, "=I"),
    )


def _congestion(sock: socket.socket) -> str:
    if sys.platform != "linux":
        return ""
    name = sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, _NAME_BYTES)
    return name.split(b"\0")[0].decode()


def _since(now: _Counters, before: _Counters | None) -> _Counters:
    if before is None:
        return now
    return replace(
        now,
        bytes_sent=now.bytes_sent - before.bytes_sent,
        bytes_again=now.bytes_again - before.bytes_again,
        busy_us=now.busy_us - before.busy_us,
        window_us=now.window_us - before.window_us,
        buffer_us=now.buffer_us - before.buffer_us,
    )


def _together(changes: Iterable[_Counters]) -> wire.TcpState:
    state = wire.TcpState()
    for change in changes:
        state.congestion = change.congestion
        state.bytes_sent += change.bytes_sent
        state.bytes_again += change.bytes_again
        state.busy_us += change.busy_us
        state.window_us += change.window_us
        state.buffer_us += change.buffer_us
        state.rtt_us = max(state.rtt_us, change.rtt_us)
        if change.least_rtt_us:
            state.least_rtt_us = min(state.least_rtt_us or change.least_rtt_us, change.least_rtt_us)
    return state
