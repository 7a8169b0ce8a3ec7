"""Files that are replaced whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO


def absolute_path(path: str) -> str:
    """A path from the root, for processes in other folders; of no path none."""
    return path and str(Path(path).absolute())


def write_atomically(
    path: Path,
    write: Callable[[BinaryIO], object],
    previous: Path | None = None,
    mode: int = 0o644,
) -> None:
    """Have a file written beside `path`, sync it, and rename it over `path`; makes the folder.

    It has its mode, less the umask, from the moment that it exists, and is on disk under its name
    when this returns. What was there is kept as `previous`, if given; `path` itself is never
    missing meanwhile.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        temporary.touch(mode, exist_ok=False)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        if previous is not None and path.exists():
            link = previous.with_name(f".{previous.name}.{os.getpid()}.tmp")
            link.unlink(missing_ok=True)
            os.link(path, link)
            os.replace(link, previous)
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def replace_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """`write_atomically` of these bytes."""
    write_atomically(path, lambda file: file.write(data), mode=mode)


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of UTF-8 text."""
    replace_bytes(path, text.encode())


def hash_file(path: Path) -> str:
    """SHA-256, hex, of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
