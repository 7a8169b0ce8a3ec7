"""The Control stream: heartbeats, silence, and words that must not be lost."""

from __future__ import annotations

import time
from pathlib import Path

from fedwan.link import wire_pb2 as wire
from tests.planes import (
    Bench,
    eventually,
    header_of,
    in_thread,
    joined_through_proxy,
    random_payload,
)

Signal = wire.CoordinatorSignal


def test_heartbeats_carry_the_step_while_an_upload_is_on_its_way(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path, num_values=1_500_000, silence_s=1.0)
    payload = random_payload(1, bench.layout)
    with joined_through_proxy(bench, identities) as (slow, bulk):
        upload = in_thread(lambda: slow.upload(header_of(payload), payload))
        for step in range(1, 13):
            slow.heartbeat(step)
            eventually(lambda step=step: bench.registry.sites["s1"].step == step, within_s=2.0)
            with bench.hub.changed:
                assert bench.is_live("s1")
        assert upload().status == wire.Receipt.ACCEPTED


def test_a_word_said_while_the_stream_is_broken_arrives_once_it_is_back(
    tmp_path: Path, identities: Path
) -> None:
    bench = Bench(tmp_path)
    with joined_through_proxy(bench, identities) as (link, proxy):
        eventually(lambda: bench.registry.sites["s1"].step == 0)
        proxy.black_hole()
        time.sleep(0.3)
        bench.hub.finish("enough")  # goes into a stream that nobody reads
        time.sleep(0.5)
        proxy.leave()
        proxy.come_back()
        signal = link.signals.get(timeout=10)
        assert (signal.kind, signal.text) == (Signal.STOP, "enough")
