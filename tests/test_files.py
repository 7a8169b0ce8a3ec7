"""Files are replaced whole, and are on disk when they are."""

from __future__ import annotations

import errno
import os
import pickle
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import BinaryIO

import pytest

from fedwan.errors import DiskFull
from fedwan.files import (
    LEAST_BYTES,
    disk_full,
    no_room,
    on_disk,
    replace_bytes,
    write_atomically,
)


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


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_a_line_with_the_folder_and_what_is_needed(
    tmp_path: Path, number: int
) -> None:
    path = tmp_path / "checkpoint" / "file"

    def write(file: BinaryIO) -> None:
        raise OSError(number, os.strerror(number))

    with pytest.raises(DiskFull) as caught:
        write_atomically(path, write, num_bytes=12_300_000)
    text = str(caught.value)
    assert text.startswith(f"the disk of {path.parent} is full ({os.strerror(number)}, ")
    assert "MB free, 12.3 MB needed); make room there" in text
    assert list(path.parent.iterdir()) == []
    assert str(pickle.loads(pickle.dumps(caught.value))) == text  # noqa: S301 (as torch does)


def test_other_errors_pass_and_a_file_that_is_named_tells_the_folder(tmp_path: Path) -> None:
    assert disk_full(PermissionError(errno.EACCES, "denied", "x")) is None
    assert disk_full(DiskFull("told before")) is None
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "b"))
    assert f"the disk of {tmp_path / 'a'} is full" in str(disk_full(full))
    with pytest.raises(PermissionError), on_disk(tmp_path):
        raise PermissionError(errno.EACCES, "denied", "x")


def test_there_is_room_or_there_is_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for free, is_full in ((LEAST_BYTES, False), (LEAST_BYTES - 1, True)):
        usage = SimpleNamespace(free=free)
        monkeypatch.setattr(shutil, "disk_usage", lambda path, usage=usage: usage)
        assert (no_room(tmp_path / "not" / "there") is not None) == is_full
