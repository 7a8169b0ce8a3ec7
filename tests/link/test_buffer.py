"""Where payloads lie while they arrive."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer, FileBuffer, UploadReception


@pytest.mark.parametrize("kind", ["memory", "file"])
def test_what_was_written_is_read_until_the_buffer_is_closed(kind: str, tmp_path: Path) -> None:
    make: Callable[[int], Buffer | FileBuffer] = Buffer
    if kind == "file":
        make = lambda num_bytes: FileBuffer(num_bytes, tmp_path / "spool")  # noqa: E731
    buffer = make(10)
    buffer.write(6, b"6789")
    buffer.write(0, b"012345")
    assert bytes(buffer.read(0, 10)) == b"0123456789" and bytes(buffer.read(3, 4)) == b"3456"
    for closed in (buffer, make(10)):
        closed.close()
        closed.close()
        closed.write(0, b"late")
        assert closed.num_bytes == 10
        with pytest.raises(PayloadError, match="send it again"):
            closed.read(0, 4)


def test_a_payload_in_more_chunks_than_any_honest_one_has_is_refused(tmp_path: Path) -> None:
    """They would be counted one by one, under the coordinator's lock."""

    def reception(num_bytes: int, chunk_bytes: int) -> UploadReception:
        header = wire.UploadHeader(num_bytes=num_bytes, chunk_bytes=chunk_bytes)
        return UploadReception(header, tmp_path)

    assert len(reception(4 << 30, 1 << 19).missing()) == 8192
    assert len(reception(4 << 30, 1 << 15).missing()) == 1 << 17
    text = "chunks of 32768 bytes .* a payload of 4294967297; send it in chunks of at least 32769"
    with pytest.raises(PayloadError, match=text):
        reception((4 << 30) + 1, 1 << 15)
    for small in (0, 1023):
        with pytest.raises(PayloadError, match="chunks of at least 1024"):
            reception(1, small)


def test_a_file_buffer_leaves_neither_a_name_nor_a_descriptor(tmp_path: Path) -> None:
    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    before = num_descriptors()
    buffers = [FileBuffer(1000, tmp_path) for _ in range(5)]
    for buffer in buffers:
        buffer.write(0, b"x")
    assert list(tmp_path.iterdir()) == [] and num_descriptors() == before + 5
    for buffer in buffers:
        buffer.close()
    with pytest.raises(OSError):
        FileBuffer(1 << 62, tmp_path).write(0, b"x")  # the disk is full
    assert num_descriptors() == before


@pytest.mark.parametrize("num_bytes", [1 << 62, (1 << 64) - 1])
def test_a_payload_that_no_memory_holds_is_refused(num_bytes: int) -> None:
    with pytest.raises(PayloadError, match=f"no memory for a payload of {num_bytes} bytes"):
        Buffer(num_bytes)


def test_closing_under_running_writers_reaches_no_other_file(tmp_path: Path) -> None:
    """A descriptor that is closed too early is soon another file's: nothing may come there."""
    canary, stop = tmp_path / "canary", threading.Event()
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
