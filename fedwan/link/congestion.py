"""TCP settings of the data plane's own sockets, and of nothing else on the machine.

Congestion control: on a wide area that loses packets it matters more than anything else about the
transport. At 1 Gbit/s, 100 ms and one packet in 10,000 lost, cubic gets a tenth of what BBR gets
(Cardwell et al. 2016). And a limit on what a socket holds unsent: the kernel takes in megabytes,
which would sit in a connection that has become slow while others could carry them. And a pace,
where the user knows what the link carries: left alone, TCP finds out by filling the queue before
the link until packets are lost, and all else on that link waits in that queue.

gRPC for Python has no setting for these, but all may be changed while a socket is connected, and
sockets that a server accepts inherit the listening one's. So this finds the process's own sockets
by their addresses.
"""

from __future__ import annotations

import logging
import socket
import struct
import sys
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from fedwan.link.sockets import plain, resolve, tcp_sockets

__all__ = ["Congestion"]

log = logging.getLogger(__name__)

PREFERRED = "bbr"
UNSENT_BYTES = 1 << 19
"""Beyond what is under way; 4 ms at 1 Gbit/s."""
SO_MAX_PACING_RATE = 47
"""Of Linux (asm-generic/socket.h); Python's socket module has no name for it."""
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_SYSTEM = Path("/proc/sys/net/ipv4/tcp_congestion_control")
_NAME_BYTES = 16  # TCP_CA_NAME_MAX of Linux


class Congestion:
    """Chooses a congestion control once, and sets up sockets as they appear.

    Safe to use from several threads, and cheap to repeat: a look at each file descriptor.

    Args:
        wish: `auto` takes bbr where this user may, `system` leaves what there is; a name that this
            machine refuses is logged once, with what would allow it.
        pace_mbit: most that one connection may send, Mbit/s with all headers; 0 sets no limit.
    """

    def __init__(self, wish: str, pace_mbit: float = 0.0) -> None:
        self.name = _choose(wish)
        """What sockets are given; empty to leave them alone."""
        self._pace = round(pace_mbit * 1e6 / 8)

    @property
    def yields_to_loss(self) -> bool:
        """Whether one lost packet slows a connection down, so that several get more than one."""
        in_use = self.name or (_SYSTEM.read_text().strip() if _SYSTEM.exists() else "")
        return not in_use.startswith("bbr")

    def apply_to_peer(self, address: str) -> int:
        """Set up this process's connections to `host:port`; how many there are."""
        peers = resolve(address)
        return self._apply(lambda found: plain(found.getpeername()) in peers)

    def apply_to_listener(self, port: int) -> int:
        """Set up the socket that listens on `port`, and so all that it will accept."""
        return self._apply(
            lambda found: (
                found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
                and found.getsockname()[1] == port
            )
        )

    def _apply(self, is_wanted: Callable[[socket.socket], bool]) -> int:
        num = 0
        for found in tcp_sockets():
            with suppress(OSError):  # not connected yet, or closed by now
                if not is_wanted(found):
                    continue
                num += 1
                found.setsockopt(socket.IPPROTO_TCP, socket.TCP_NOTSENT_LOWAT, UNSENT_BYTES)
                if self._pace:
                    pace = struct.pack("N", self._pace)
                    found.setsockopt(socket.SOL_SOCKET, SO_MAX_PACING_RATE, pace)
                if self.name:
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.name.encode())
        return num


def _choose(wish: str) -> str:
    """The name to set, after a try on a socket of our own."""
    name = PREFERRED if wish == "auto" else wish
    if name == "system":
        return ""
    if sys.platform != "linux":
        reason = f"{sys.platform} has no setting for a single socket"
        mend = "leave link.congestion=auto there"
    else:
        try:
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                probe.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, name.encode())
            return name
        except PermissionError:
            allowed = _ALLOWED.read_text().strip()
            reason = f"this user may only use: {allowed}"
            mend = f"sudo sysctl -w net.ipv4.tcp_allowed_congestion_control='{allowed} {name}'"
        except OSError:
            reason = "the kernel has no such module loaded"
            mend = f"sudo modprobe tcp_{name}"
    if wish != "auto":
        log.warning(
            "link.congestion = %r is not to be had here (%s), the system's is used instead; "
            "to allow it: %s",
            wish,
            reason,
            mend,
        )
    return ""
