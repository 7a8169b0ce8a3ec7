"""What a service does around its work: a folder of its own, a log, a port, a way to be stopped."""

from __future__ import annotations

import errno
import logging
import random
import signal
import socket
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from fedwan.errors import ConfigError

__all__ = ["free_port", "listen", "log_to", "only_one", "stop_on_sigterm"]

# Below the range that Linux and macOS take for outgoing connections, so that nobody is given the
# port between our test and the service's start.
_PORTS = range(20000, 32000)


@contextmanager
def only_one(folder: Path, key: str) -> Iterator[None]:
    """Hold a folder against a second service; the kernel lets go when this process ends.

    Raises:
        ConfigError: another service holds it, or it cannot be written; `key` is its setting.
    """
    lock = FileLock(folder / "lock")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock.acquire(timeout=0)
    except Timeout:
        raise ConfigError(
            f"{key} {folder} is in use by another service; stop that one or set another {key}"
        ) from None
    except OSError as error:
        raise ConfigError(
            f"{key} {folder} cannot be written: {error.strerror}; give a folder of this user's"
        ) from error
    try:
        yield
    finally:
        lock.release()


@contextmanager
def log_to(path: Path, *, echo: bool) -> Iterator[None]:
    """Append what fedwan logs to a file while the block runs; echoed to stderr for systemd."""
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    if echo:
        handlers.append(logging.StreamHandler(sys.stderr))
    logger = logging.getLogger("fedwan")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))
        logger.addHandler(handler)
    try:
        yield
    finally:
        logger.setLevel(level)
        for handler in handlers:
            logger.removeHandler(handler)
            handler.close()


@contextmanager
def stop_on_sigterm(stop: threading.Event) -> Iterator[None]:
    """Set an event on SIGTERM while the block runs, so that everything is ended in order.

    Does nothing outside the main thread, where Python delivers no signals.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def handle(number: int, frame: FrameType | None) -> None:
        # Not here: the main thread may be inside `stop.wait`, and `set` would wait for its lock.
        threading.Thread(target=stop.set, name="sigterm").start()

    before = signal.signal(signal.SIGTERM, handle)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def free_port() -> int:
    """A port of loopback on which nothing listens now."""
    for port in random.sample(_PORTS, 200):
        try:
            listen("127.0.0.1", port, "", "").close()
        except ConfigError:
            continue
        return port
    raise ConfigError(f"no free port among {_PORTS} on 127.0.0.1; stop what holds them")


def listen(host: str, port: int, what: str, key: str) -> socket.socket:
    """A TCP socket that listens; an empty host means every address, port 0 a free one.

    Raises:
        ConfigError: the port, which setting `key` chooses for `what`, cannot be had.
    """
    try:
        family, kind, proto, _, address = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
    except socket.gaierror as error:
        raise ConfigError(
            f"{what} cannot listen on {host!r}: {error.strerror}; give an address of this machine"
        ) from error
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
