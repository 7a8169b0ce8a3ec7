"""TCP's congestion control for the data plane's own sockets, and for nothing else on the machine.

On a wide area that loses packets this matters more than anything else about the transport: at
1 Gbit/s, 100 ms and one packet in 10,000 lost, cubic gets a tenth of what BBR gets (Cardwell et al.
2016). gRPC for Python has no setting for it, but a socket's congestion control may be changed while
it is connected, and sockets that a server accepts inherit the listening one's. So this finds the
process's own sockets among its file descriptors, by their addresses.
"""

from __future__ import annotations

import logging
import os
import socket
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

__all__ = ["Congestion"]

log = logging.getLogger(__name__)

PREFERRED = "bbr"
_ALLOWED = Path("/proc/sys/net/ipv4/tcp_allowed_congestion_control")
_NAME_BYTES = 16  # TCP_CA_NAME_MAX of Linux


class Congestion:
    """Chooses a congestion control once, and gives it to sockets as they appear.

    Safe to use from several threads, and cheap to repeat: a look at each file descriptor.

    Args:
        wish: `auto` takes bbr where this user may, `system` leaves everything as it is; a name that
            this machine refuses is logged once, with what would allow it.
    """

    def __init__(self, wish: str) -> None:
        self.name = _choose(wish)
        """What sockets are given; empty to leave them alone."""

    def apply_to_peer(self, address: str) -> int:
        """Set it on this process's connections to `host:port`; how many have it now."""
        if not self.name:
            return 0
        host, _, port = address.rpartition(":")
        peers = _resolve(host.strip("[]"), int(port))
        return self._apply(lambda found: _plain(found.getpeername()) in peers)

    def apply_to_listener(self, port: int) -> int:
        """Set it on the socket that listens on `port`, and so on all that it will accept."""
        if not self.name:
            return 0
        return self._apply(
            lambda found: (
                found.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN) == 1
                and found.getsockname()[1] == port
            )
        )

    def _apply(self, is_wanted: Callable[[socket.socket], bool]) -> int:
        num = 0
        for found in _tcp_sockets():
            with suppress(OSError):  # not connected yet, or closed by now
                if is_wanted(found):
                    found.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, self.name.encode())
                    num += 1
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


def _tcp_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets, each as a duplicate that is closed after its turn.

    A duplicate cannot become another file while it is looked at, as the original's number can.
    """
    for name in os.listdir("/proc/self/fd"):
        try:
            copy = os.dup(int(name))
        except OSError:  # closed meanwhile, like the one of this listing
            continue
        try:
            if not stat.S_ISSOCK(os.fstat(copy).st_mode):
                os.close(copy)
                continue
            found = socket.socket(fileno=copy)
        except OSError:
            os.close(copy)
            continue
        with found:
            if found.family in (socket.AF_INET, socket.AF_INET6) and (
                found.type == socket.SOCK_STREAM
            ):
                yield found


def _resolve(host: str, port: int) -> set[tuple[str, int]]:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except OSError:  # the transfer will say so, in better words
        return set()
    return {_plain(address) for *_, address in found}


def _plain(
    address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
) -> tuple[str, int]:
    """Address and port; IPv4 as such, also where a socket of IPv6 speaks it."""
    host, port = str(address[0]), address[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port
