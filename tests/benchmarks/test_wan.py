"""An emulated wide area: one way of a link by a clock of its own, and, as root, namespaces."""

from __future__ import annotations

import math
import os
import signal
import struct
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import wan
from benchmarks.wan import BARE, VNET_BYTES, Direction, Star, WanLink, cut, keep, num_segments
from tests.planes import eventually

reason = wan.available()
needs_wan = pytest.mark.skipif(reason is not None, reason=f"no emulated WAN here: {reason}")


def spaces_of(pid: int) -> list[str]:
    return [p.name for p in wan.FOLDER.iterdir() if p.name.startswith(f"fedwan-{pid}-")]


def children_of(pid: int) -> list[str]:
    text = "".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    return text.split()


@needs_wan
@pytest.mark.slow
@pytest.mark.parametrize("link", [WanLink(), BARE])
def test_nothing_stays_behind_even_after_an_exception(link: WanLink) -> None:
    before = children_of(os.getpid())
    with pytest.raises(ZeroDivisionError), Star(2, link) as star:
        child = star.sites[1].popen(["sleep", "1000"])
        raise ZeroDivisionError
    assert spaces_of(os.getpid()) == []
    assert child.poll() is not None
    assert children_of(os.getpid()) == before


HOLDER = """
import signal
from benchmarks.wan import Star
with Star(2):
    print("up", flush=True)
    signal.pause()
"""


@needs_wan
@pytest.mark.slow
def test_everything_is_removed_when_its_process_is_killed() -> None:
    words = [sys.executable, "-c", HOLDER]
    child = subprocess.Popen(words, stdout=-1, stderr=-3, text=True, cwd=wan.ROOT)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    wires = children_of(child.pid)
    assert len(spaces_of(child.pid)) == 3 and wires
    child.send_signal(signal.SIGKILL)
    child.communicate(timeout=15)
    eventually(lambda: not spaces_of(child.pid))
    eventually(lambda: not any(Path(f"/proc/{wire}").exists() for wire in wires))


# One way of a link ------------------------------------------------------------------------------

KB = bytes(VNET_BYTES + 1000)


def way(rtt_ms: float, loss: float = 0.0) -> tuple[Direction, list[bytes]]:
    """Of 1 MB/s."""
    sent: list[bytes] = []
    return Direction(sent.append, 0, WanLink(8, rtt_ms, loss)), sent


def test_packets_leave_at_the_rate_after_the_delay_and_none_before() -> None:
    direction, sent = way(rtt_ms=100)
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


def test_a_full_queue_drops_what_comes_and_lost_packets_took_their_time_at_the_transmitter() -> (
    None
):
    direction, sent = way(rtt_ms=300.5)
    for _ in range(310):
        direction.accept(KB, now=0.0)
    direction.deliver(1.0)
    assert len(sent) == 300 and direction.num_bytes == 300_000
    direction, sent = way(rtt_ms=4000, loss=0.25)
    for _ in range(4000):
        direction.accept(KB, now=0.0)
    direction.deliver(5.9)
    assert direction.next_due() > 5.9  # the others alone would all have left
    direction.deliver(7.0)
    assert len(sent) == pytest.approx(3000, abs=140)  # five deviations


# Packets --------------------------------------------------------------------------------------

FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80
SEQUENCE = 0xFFFFFF00  # wraps around
SEGMENT = 1448
HEADERS = 20 + 32
DATA = bytes(i % 251 for i in range(3 * SEGMENT + 100))


def ones(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes) -> bytes:
    flags = CWR | ACK | PSH | FIN
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, SEQUENCE, 5, 8 << 4, flags, 100, 0, 0) + bytes(12)
    addresses = bytes([198, 18, 0, 1, 198, 18, 1, 1])
    size = 20 + len(tcp) + len(payload)
    ip = struct.pack("!BBHHHBBH", 0x45, 0, size, 65535, 0, 64, 6, 0) + addresses
    kind = 1 if len(payload) > SEGMENT else 0
    vnet = struct.pack("=BBHHHH", 1, kind, len(ip + tcp), SEGMENT if kind else 0, len(ip), 16)
    return vnet + ip + tcp + payload


def payload_of(packet: bytes) -> bytes:
    return packet[VNET_BYTES + HEADERS :]


def test_what_is_left_are_the_runs_between_the_lost_segments_packets_of_their_own() -> None:
    parts = keep(packet(DATA), [1])
    assert [payload_of(part) for part in parts] == [DATA[:SEGMENT], DATA[2 * SEGMENT :]]
    assert [num_segments(part) for part in parts] == [1, 2]
    assert keep(packet(DATA), [0, 1, 2, 3]) == []
    assert keep(packet(DATA), []) == [packet(DATA)]
    assert keep(packet(b"x"), [0]) == []
    part = cut(packet(DATA), 1, 2)
    assert payload_of(part) == DATA[SEGMENT : 3 * SEGMENT]
    flags, kind, header, segment, start, offset = struct.unpack_from("=BBHHHH", part)
    assert (flags, kind, segment, offset, start, header) == (1, 1, SEGMENT, 16, 20, HEADERS)
    ip, tcp = part[VNET_BYTES:][:start], part[VNET_BYTES + start :]
    assert struct.unpack_from("!I", tcp, 4)[0] == (SEQUENCE + SEGMENT) % 2**32
    assert struct.unpack_from("!HH", ip, 2) == (len(ip) + len(tcp), 0)  # 65535 + 1
    assert ones(ip) == 0xFFFF
    pseudo = ip[12:20] + struct.pack("!HH", 6, len(tcp))
    assert struct.unpack_from("!H", tcp, 16)[0] == ones(pseudo)
