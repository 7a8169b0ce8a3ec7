"""Counting bytes on the wire."""

from __future__ import annotations

import threading

from fedwan.link import wire_pb2 as wire
from fedwan.link.byte_counter import PREFIX_BYTES, ByteCounter
from fedwan.link.framing import Part, make_chunk, serialize


def test_a_message_counts_as_its_serialised_size_and_grpc_s_prefix() -> None:
    counter = ByteCounter()
    hello = wire.Hello(run_id="run", session="x" * 300)
    assert counter.sent(hello) is hello
    assert counter.up == len(hello.SerializeToString()) + PREFIX_BYTES
    part: Part[wire.UploadHeader] = Part(wire.UploadHeader(run_id="r"), make_chunk(5, b"data"))
    counter.received(part)
    assert counter.down == len(serialize(part)) + PREFIX_BYTES


def test_messages_of_a_stream_count_as_they_are_taken() -> None:
    counter = ByteCounter()
    stream = counter.sending([wire.SiteSignal(step=1), wire.SiteSignal(step=2)])
    next(stream)
    assert counter.up == 2 + PREFIX_BYTES
    assert [signal.step for signal in stream] == [2]
    assert counter.up == 2 * (2 + PREFIX_BYTES)


def test_threads_lose_no_bytes() -> None:
    counter = ByteCounter()

    def count() -> None:
        for _ in range(5000):
            counter.received(wire.Ack())

    threads = [threading.Thread(target=count) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert counter.down == 4 * 5000 * PREFIX_BYTES
