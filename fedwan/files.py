"""Files that are replaced whole, so that a crash leaves the old one or the new one."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path


def replace_bytes(path: Path, data: bytes, mode: int = 0o644) -> None:
    """Write a file beside `path`, sync it, and rename it over `path`; makes the folder.

    It has its mode, less the umask, from the moment that it exists.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    temporary.unlink(missing_ok=True)
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)


def replace_text(path: Path, text: str) -> None:
    """`replace_bytes` of UTF-8 text."""
    replace_bytes(path, text.encode())


def hash_file(path: Path) -> str:
    """SHA-256, hex, of a small file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()
