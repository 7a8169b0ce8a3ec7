"""One way of a link, by a clock of its own."""

from __future__ import annotations

import math

import pytest
from benchmarks.wan_packets import VNET_BYTES

from benchmarks.wan_tun import Direction

KB = bytes(VNET_BYTES + 1000)


def way(
    bytes_per_s: float = 0.0, delay_s: float = 0.0, loss: float = 0.0, queue_bytes: float = math.inf
) -> tuple[Direction, list[bytes]]:
    sent: list[bytes] = []
    direction = Direction(sent.append, seed=0)
    direction.shape(bytes_per_s, delay_s, loss, queue_bytes)
    return direction, sent


def test_packets_leave_at_the_rate_after_the_delay_and_none_before() -> None:
    direction, sent = way(bytes_per_s=1e6, delay_s=0.05)
    for _ in range(10):
        direction.accept(KB, now=3.0)
    for num in range(1, 11):
        due = 3.05 + num * 1e-3
        assert direction.next_due() == pytest.approx(due)
        direction.deliver(due - 1e-6)
        assert len(sent) == num - 1
        direction.deliver(due + 1e-6)
        assert len(sent) == num
    assert direction.next_due() == math.inf


def test_an_idle_transmitter_saves_nothing_up() -> None:
    direction, sent = way(bytes_per_s=1e6)
    direction.accept(KB, now=1.0)
    direction.accept(KB, now=5.0)
    direction.accept(KB, now=5.0)
    direction.deliver(5.0015)
    assert len(sent) == 2
    direction.deliver(5.0025)
    assert len(sent) == 3


def test_what_the_queue_has_no_room_for_is_dropped() -> None:
    direction, sent = way(bytes_per_s=1e6, queue_bytes=4500)
    for _ in range(10):
        direction.accept(KB, now=0.0)
    direction.deliver(1.0)
    assert len(sent) == 4
    assert direction.counts["queue_dropped"] == 6
    assert direction.counts["bytes"] == 4000


def test_a_delay_that_becomes_shorter_reorders_nothing() -> None:
    direction, sent = way(delay_s=0.1)
    first, second = KB, KB[:-1]
    direction.accept(first, now=0.0)
    direction.shape(0.0, 0.01, 0.0, math.inf)
    direction.accept(second, now=0.01)
    direction.deliver(0.05)
    assert sent == []
    direction.deliver(0.1)
    assert sent == [first, second]


def test_lost_packets_took_their_time_at_the_transmitter() -> None:
    direction, sent = way(bytes_per_s=1e6, loss=0.25)
    for _ in range(4000):
        direction.accept(KB, now=0.0)
    direction.deliver(5.0)
    assert len(sent) + direction.counts["lost"] == 4000
    assert direction.counts["lost"] == pytest.approx(1000, abs=140)  # five deviations
    direction.shape(1e6, 0.0, 0.0, math.inf)
    direction.accept(KB, now=0.0)
    assert direction.next_due() == pytest.approx(4.001)
