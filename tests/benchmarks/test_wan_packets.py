"""Super-packets are counted and cut as a network card would send them."""

from __future__ import annotations

import struct

import pytest
from benchmarks.wan_packets import VNET_BYTES, cut, keep, num_segments, wire_bytes

FIN, PSH, ACK, CWR = 0x01, 0x08, 0x10, 0x80
SEQUENCE = 0xFFFFFF00  # wraps around
SEGMENT = 1448


def ones(data: bytes) -> int:
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total


def packet(payload: bytes, version: int = 4, flags: int = CWR | ACK | PSH | FIN) -> bytes:
    tcp = struct.pack("!HHIIBBHHH", 1000, 2000, SEQUENCE, 5, 8 << 4, flags, 100, 0, 0) + bytes(12)
    if version == 4:
        addresses = bytes([198, 18, 0, 1, 198, 18, 1, 1])
        size = 20 + len(tcp) + len(payload)
        ip = struct.pack("!BBHHHBBH", 0x45, 0, size, 65535, 0, 64, 6, 0) + addresses
    else:
        ip = struct.pack("!IHBB", 6 << 28, len(tcp) + len(payload), 6, 64) + bytes(range(32))
    kind = {4: 1, 6: 4}[version] if len(payload) > SEGMENT else 0
    vnet = struct.pack("=BBHHHH", 1, kind, len(ip + tcp), SEGMENT if kind else 0, len(ip), 16)
    return vnet + ip + tcp + payload


def payload_of(packet: bytes, version: int = 4) -> bytes:
    return packet[VNET_BYTES + (20 if version == 4 else 40) + 32 :]


def flags_of(packet: bytes) -> int:
    return packet[VNET_BYTES + 20 + 13]


DATA = bytes(i % 251 for i in range(3 * SEGMENT + 100))


@pytest.mark.parametrize("version", [4, 6])
def test_each_segment_is_charged_with_its_headers(version: int) -> None:
    whole = packet(DATA, version)
    headers = (20 if version == 4 else 40) + 32
    assert num_segments(whole) == 4
    assert wire_bytes(whole) == len(DATA) + 4 * headers
    assert num_segments(packet(b"x", version)) == 1
    assert wire_bytes(packet(b"x", version)) == 1 + headers


def test_what_is_left_are_the_runs_between_the_lost_segments() -> None:
    parts = keep(packet(DATA), [1])
    assert [payload_of(part) for part in parts] == [DATA[:SEGMENT], DATA[2 * SEGMENT :]]
    assert [num_segments(part) for part in parts] == [1, 2]
    assert keep(packet(DATA), [0, 1, 2, 3]) == []
    assert keep(packet(DATA), []) == [packet(DATA)]
    assert keep(packet(b"x"), [0]) == []


@pytest.mark.parametrize("version", [4, 6])
def test_a_part_is_a_packet_of_its_own(version: int) -> None:
    part = cut(packet(DATA, version), 1, 2)
    assert payload_of(part, version) == DATA[SEGMENT : 3 * SEGMENT]
    flags, kind, header, segment, start, offset = struct.unpack_from("=BBHHHH", part)
    assert (flags, kind, segment, offset) == (1, {4: 1, 6: 4}[version], SEGMENT, 16)
    assert (start, header) == ((20, 52) if version == 4 else (40, 72))
    ip, tcp = part[VNET_BYTES:][:start], part[VNET_BYTES + start :]
    assert struct.unpack_from("!I", tcp, 4)[0] == (SEQUENCE + SEGMENT) % 2**32
    if version == 4:
        assert struct.unpack_from("!HH", ip, 2) == (len(ip) + len(tcp), 0)  # 65535 + 1
        assert ones(ip) == 0xFFFF
        pseudo = ip[12:20] + struct.pack("!HH", 6, len(tcp))
    else:
        assert struct.unpack_from("!H", ip, 4) == (len(tcp),)
        pseudo = ip[8:40] + struct.pack("!II", len(tcp), 6)
    assert struct.unpack_from("!H", tcp, 16)[0] == ones(pseudo)


def test_flags_stay_where_a_card_would_send_them() -> None:
    whole = packet(DATA)
    assert flags_of(cut(whole, 0, 1)) == CWR | ACK
    assert flags_of(cut(whole, 1, 2)) == ACK
    assert flags_of(cut(whole, 3, 1)) == ACK | PSH | FIN


def test_a_single_segment_is_no_super_packet() -> None:
    part = cut(packet(DATA), 3, 1)
    assert part[1] == 0
    assert num_segments(part) == 1
    assert len(payload_of(part)) == 100
