"""Where payloads lie while they arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedwan.errors import PayloadError
from fedwan.link.buffer import Buffer, FileBuffer


@pytest.fixture(params=["memory", "file"])
def make(request: pytest.FixtureRequest, tmp_path: Path) -> Callable[[int], Buffer | FileBuffer]:
    if request.param == "memory":
        return Buffer
    return lambda num_bytes: FileBuffer(num_bytes, tmp_path / "spool")


def num_descriptors() -> int:
    return len(os.listdir("/proc/self/fd"))


Make = Callable[[int], Buffer | FileBuffer]


def test_what_was_written_is_read(make: Make) -> None:
    buffer = make(10)
    buffer.write(6, b"6789")
    buffer.write(0, b"012345")
    assert bytes(buffer.read(0, 10)) == b"0123456789"
    assert bytes(buffer.read(3, 4)) == b"3456"
    assert buffer.num_bytes == 10
    buffer.close()


def test_a_closed_buffer_drops_writes_and_refuses_reads(make: Make) -> None:
    buffer = make(4)
    buffer.close()
    buffer.close()
    buffer.write(0, b"late")
    assert buffer.num_bytes == 4
    with pytest.raises(PayloadError, match="send it again"):
        buffer.read(0, 4)


def test_a_file_buffer_leaves_neither_a_name_nor_a_descriptor(tmp_path: Path) -> None:
    before = num_descriptors()
    buffers = [FileBuffer(1000, tmp_path) for _ in range(5)]
    for buffer in buffers:
        buffer.write(0, b"x")
    assert list(tmp_path.iterdir()) == [] and num_descriptors() == before + 5
    for buffer in buffers:
        buffer.close()
    assert num_descriptors() == before


def test_a_full_disk_leaks_no_descriptor(tmp_path: Path) -> None:
    before = num_descriptors()
    with pytest.raises(OSError):
        FileBuffer(1 << 62, tmp_path).write(0, b"x")
    assert num_descriptors() == before


def test_closing_under_running_writers_reaches_no_other_file(tmp_path: Path) -> None:
    """A descriptor that is closed too early is soon another file's: nothing may come there."""
    canary = tmp_path / "canary"
    stop = threading.Event()
    current = [FileBuffer(4096, tmp_path)]

    def write() -> None:
        while not stop.is_set():
            current[0].write(0, b"x" * 4096)

    threads = [threading.Thread(target=write) for _ in range(3)]
    for thread in threads:
        thread.start()
    for _ in range(200):
        old, current[0] = current[0], FileBuffer(4096, tmp_path)
        old.close()
        with canary.open("wb", buffering=0) as file:
            os.fsync(file.fileno())
        assert canary.stat().st_size == 0
    stop.set()
    for thread in threads:
        thread.join()
    current[0].close()
