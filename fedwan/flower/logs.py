"""What a service does around its work: a log file, and a way to be stopped."""

from __future__ import annotations

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

__all__ = ["clientapp_log", "log_to", "serverapp_log", "stop_on_sigterm"]

_FORMAT = "%(asctime)s %(levelname)s %(message)s"


def serverapp_log(out: Path) -> Path:
    """Log of a run's ServerApp."""
    return out / "logs" / "serverapp.log"


def clientapp_log(state: Path) -> Path:
    """Log of a site's ClientApp."""
    return state / "logs" / "clientapp.log"


@contextmanager
def log_to(path: Path, *, echo: bool) -> Iterator[None]:
    """Write what fedwan logs to a file while the block runs.

    Args:
        path: appended to; its folder is made.
        echo: also write it to stderr, where systemd's journal picks it up.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    handlers: list[logging.Handler] = [logging.FileHandler(path)]
    if echo:
        handlers.append(logging.StreamHandler(sys.stderr))
    logger = logging.getLogger("fedwan")
    level = logger.level
    logger.setLevel(logging.INFO)
    for handler in handlers:
        handler.setFormatter(logging.Formatter(_FORMAT))
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
