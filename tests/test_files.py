"""Files are replaced whole, and are on disk when they are."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO

import pytest

from fedwan.files import replace_bytes, write_atomically


def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_what_was_replaced_survives_a_power_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes are synchronised before it has its name, and its name before anybody goes on."""
    path, synced = tmp_path / "new" / "file", []

    def sync(number: int) -> None:
        name = os.readlink(f"/proc/self/fd/{number}")
        synced.append((Path(name).name, path.read_bytes() if path.exists() else b""))

    monkeypatch.setattr(os, "fsync", sync)
    replace_bytes(path, b"1", 0o600)
    temporary = f".file.{os.getpid()}.tmp"
    assert synced == [(temporary, b""), ("new", b"1")]
    assert path.stat().st_mode & 0o777 == 0o600
    previous = path.with_name("previous")
    write_atomically(path, lambda file: file.write(b"2"), previous)
    assert synced[2:] == [(temporary, b"1"), ("new", b"2")]
    assert previous.read_bytes() == b"1" and len(list(path.parent.iterdir())) == 2
