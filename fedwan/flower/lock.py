"""A folder that only one service may use at a time."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from fedwan.errors import ConfigError

__all__ = ["only_one"]


@contextmanager
def only_one(folder: Path, key: str) -> Iterator[None]:
    """Hold a folder against a second service; the kernel lets go when this process ends.

    Args:
        folder: made where missing.
        key: the setting that names it, for the error's text.

    Raises:
        ConfigError: another service holds it, or it cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
    except OSError as error:
        raise ConfigError(
            f"{key} {folder} cannot be written: {error.strerror}; give a folder of this user's"
        ) from error
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(lock)
        raise ConfigError(
            f"{key} {folder} is in use by another service; stop that one or set another {key}"
        ) from None
    try:
        yield
    finally:
        os.close(lock)
