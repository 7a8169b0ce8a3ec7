"""This process's own TCP sockets, found among its file descriptors, whoever owns them.

gRPC for Python shows none of its sockets, but Linux does, and their settings and counters may be
used while they are connected.
"""

from __future__ import annotations

import os
import socket
import stat
import sys
from collections.abc import Iterator

__all__ = ["plain", "resolve", "tcp_sockets"]


def tcp_sockets() -> Iterator[socket.socket]:
    """This process's TCP sockets; each only until the next is asked for.

    They are borrowed and not duplicated: a duplicate that outlives the original by a moment keeps
    it registered with its owner's epoll. Should a descriptor change hands meanwhile, the worst is
    that another socket of this process is taken for it.
    """
    if sys.platform != "linux":
        return
    for name in os.listdir("/proc/self/fd"):
        try:
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            found = socket.socket(fileno=int(name))
        except OSError:  # closed meanwhile, like the one of this listing
            continue
        try:
            is_internet = found.family in (socket.AF_INET, socket.AF_INET6)
            if is_internet and found.type == socket.SOCK_STREAM:
                yield found
        finally:
            found.detach()


def resolve(address: str) -> set[tuple[str, int]]:
    """What `host:port` stands for, to be compared with `plain` addresses; empty if for nothing."""
    host, _, port = address.rpartition(":")
    try:
        found = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)
    except OSError:  # the transfer will say so, in better words
        return set()
    return {plain(address) for *_, address in found}


def plain(
    address: tuple[str, int] | tuple[str, int, int, int] | tuple[int, bytes],
) -> tuple[str, int]:
    """Address and port; IPv4 as such, also where a socket of IPv6 speaks it."""
    host, port = str(address[0]), address[1]
    assert isinstance(port, int)
    return host.removeprefix("::ffff:"), port
