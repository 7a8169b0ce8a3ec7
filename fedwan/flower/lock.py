"""A folder that only one service may use at a time."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

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
