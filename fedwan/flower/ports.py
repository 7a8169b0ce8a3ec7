"""Ports: one that is free, and a listening socket or one line that says why not."""

from __future__ import annotations

import errno
import random
import socket

from fedwan.errors import ConfigError

__all__ = ["free_port", "listen", "split_address"]

# Below the range that Linux and macOS take for outgoing connections, so that nobody is given the
# port between our test and the service's start.
_FIRST, _LAST = 20000, 32000


def free_port(host: str = "127.0.0.1") -> int:
    """A port on which nothing listens now."""
    for _ in range(200):
        port = random.randint(_FIRST, _LAST)
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((host, port))
            except OSError:
                continue
            return port
    raise ConfigError(f"no free port between {_FIRST} and {_LAST} on {host}; stop what holds them")


def listen(host: str, port: int, what: str, key: str) -> socket.socket:
    """A TCP socket bound to an address.

    Args:
        host: name or address of this machine; an empty one means every address.
        port: 0 takes a free one.
        what: who will listen, for the error's text.
        key: the setting that chooses the port, for the error's text.

    Raises:
        ConfigError: the port is in use, not ours to take, or the host is not this machine's.
    """
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except socket.gaierror as error:
        raise ConfigError(
            f"{what} cannot listen on {host!r}: {error.strerror}; give an address of this machine"
        ) from error
    family, kind, proto, _, address = found[0]
    bound = socket.socket(family, kind, proto)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind(address)
        # Bound alone does not refuse a second one; listening does.
        bound.listen(128)
    except OSError as error:
        bound.close()
        reason = {
            errno.EADDRINUSE: f"the port is in use; stop what holds it or set another {key}",
            errno.EACCES: f"ports below 1024 need a privilege; set {key} to a higher one",
            errno.EADDRNOTAVAIL: "the address is not this machine's; listen on 0.0.0.0 or its own",
        }.get(error.errno or 0, str(error.strerror))
        raise ConfigError(f"{what} cannot listen on {host}:{port}: {reason}") from error
    return bound


def split_address(address: str, key: str) -> tuple[str, int]:
    """Host and port of `host:port` or `[ipv6]:port`.

    Raises:
        ConfigError: it is not of that form.

    >>> split_address("coordinator.example.com:7443", "door")
    ('coordinator.example.com', 7443)
    """
    host, colon, port = address.rpartition(":")
    host = host.removeprefix("[").removesuffix("]")
    if not colon or not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise ConfigError(
            f"{key} is {address!r}, not host:port; write it like coordinator.example.com:7443"
        )
    return host, int(port)
