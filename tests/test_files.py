"""Files are replaced whole, and are on disk when they are."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import shutil
import stat
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
    replace_text,
    write_atomically,
)
from tests.support import no_links


def test_a_writer_that_fails_leaves_the_old_file_and_no_other(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_text("old")

    def write(file: BinaryIO) -> None:
        file.write(b"half")
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_atomically(path, write)
    assert path.read_text() == "old" and list(tmp_path.iterdir()) == [path]


def test_an_error_names_the_file_that_was_to_be_written(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    with pytest.raises(IsADirectoryError) as error:
        replace_text(tmp_path / "folder", "text")
    assert error.value.filename == str(tmp_path / "folder") and error.value.filename2 is None


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


def test_what_was_there_is_kept_whole_where_there_are_no_hard_links(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, previous = tmp_path / "file", tmp_path / "previous"
    path.write_bytes(b"1")
    previous.write_bytes(b"0")
    monkeypatch.setattr(os, "link", no_links)
    replace_bytes(path, b"2")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):

        def half(old: BinaryIO, new: BinaryIO) -> None:
            new.write(b"h")
            raise KeyboardInterrupt

        patch.setattr(shutil, "copyfileobj", half)
        write_atomically(path, lambda file: file.write(b"3"), previous)
    assert (previous.read_bytes(), path.read_bytes()) == (b"0", b"2")
    write_atomically(path, lambda file: file.write(b"3"), previous, mode=0o600)
    assert (previous.read_bytes(), path.read_bytes()) == (b"2", b"3")
    assert previous.stat().st_mode & 0o777 == 0o600 and len(list(tmp_path.iterdir())) == 2


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EBADF])
def test_a_file_system_that_synchronises_no_folders_is_as_good(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    def sync(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(number, os.strerror(number))

    monkeypatch.setattr(os, "fsync", sync)
    replace_bytes(tmp_path / "file", b"1")
    assert (tmp_path / "file").read_bytes() == b"1"
    number = errno.EIO
    with pytest.raises(OSError, match="Input/output"):
        replace_bytes(tmp_path / "file", b"2")


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


def test_a_file_that_may_grow_no_more_is_a_line_as_well(tmp_path: Path) -> None:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        with pytest.raises(DiskFull, match=rf"a file in {tmp_path} .*too large\); raise the limit"):
            replace_bytes(tmp_path / "file", bytes(2000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert list(tmp_path.iterdir()) == []


def test_other_errors_pass_and_a_file_that_is_named_tells_the_folder(tmp_path: Path) -> None:
    assert disk_full(PermissionError(errno.EACCES, "denied", "x")) is None
    assert disk_full(DiskFull("told before")) is None
    full = OSError(errno.ENOSPC, "No space left on device", str(tmp_path / "a" / "b"))
    assert f"the disk of {tmp_path / 'a'} is full" in str(disk_full(full))
    with pytest.raises(PermissionError), on_disk(tmp_path):
        raise PermissionError(errno.EACCES, "denied", "x")
    says = rf"{tmp_path} takes nothing any more \(Read-only"
    with pytest.raises(DiskFull, match=says), on_disk(tmp_path):
        raise OSError(errno.EROFS, "Read-only file system")


NO_FILES = "no more files can be made there, see df -i"


@pytest.mark.parametrize(
    ("num_bytes", "num_files", "num_left", "told"),
    [
        (LEAST_BYTES, 99, 50, ""),
        (LEAST_BYTES, 0, 0, ""),
        (LEAST_BYTES, 99, 3, NO_FILES),
        (LEAST_BYTES - 1, 99, 50, "is full"),
    ],
)
def test_a_disk_without_room_for_bytes_or_for_files_is_full(
    num_bytes: int,
    num_files: int,
    num_left: int,
    told: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    found = SimpleNamespace(f_files=num_files, f_favail=num_left)
    monkeypatch.setattr(os, "statvfs", lambda path: found)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=num_bytes))
    full = no_room(tmp_path / "not" / "there")
    assert told in str(full) and (full is None) == (not told)
