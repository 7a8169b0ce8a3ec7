"""The packets that a TUN device hands over: how many the wire would see, and parts of them.

With `IFF_VNET_HDR` a packet begins with a virtio-net header of 10 bytes, and may be a super-packet:
one IP and TCP header in front of the payload of many segments, which a real network card would
send one by one (virtio 1.2, 5.1.6). A lossy wire loses segments, not super-packets, so one may have
to be cut.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

__all__ = ["VNET_BYTES", "cut", "keep", "num_segments", "wire_bytes"]

VNET_BYTES = 10
"""Bytes in front of the IP header."""

_VNET = struct.Struct("=BBHHHH")  # flags, gso type, header bytes, gso size, csum start, csum offset
_NEEDS_CSUM = 1
_ECN = 0x80
_FIN, _PSH, _CWR = 0x01, 0x08, 0x80


def num_segments(packet: bytes) -> int:
    """Packets that the wire would see."""
    if not packet[1]:
        return 1
    return _cut_points(packet)[2]


def wire_bytes(packet: bytes) -> int:
    """IP bytes that the wire would carry: every segment has headers of its own."""
    size = len(packet) - VNET_BYTES
    if not packet[1]:
        return size
    header, _, num = _cut_points(packet)
    return size + (num - 1) * header


def _cut_points(packet: bytes) -> tuple[int, int, int]:
    """Bytes of the IP and TCP headers, bytes of payload in a segment, and number of segments."""
    segment, start = struct.unpack_from("=HH", packet, 4)
    header = start + (packet[VNET_BYTES + start + 12] >> 4) * 4
    return header, segment, -(-(len(packet) - VNET_BYTES - header) // segment)


def keep(packet: bytes, lost: Sequence[int]) -> list[bytes]:
    """What is left of a packet when some of its segments are lost.

    Args:
        packet: as it was read.
        lost: indices of segments, ascending.

    Returns:
        A packet for every run of segments in between; none if nothing is left.
    """
    edges = [-1, *lost, num_segments(packet)]
    runs = [(a + 1, b - a - 1) for a, b in zip(edges, edges[1:], strict=False) if b - a > 1]
    return [cut(packet, first, count) for first, count in runs]


def cut(packet: bytes, first: int, count: int) -> bytes:
    """A packet that holds `count` segments of another, from segment `first` on.

    As a network card would: sequence number and IP identification move on, FIN and PSH stay on the
    last segment, CWR on the first (Linux, `tcp_gso_segment`).
    """
    if first == 0 and count >= num_segments(packet):
        return packet
    header, segment, num = _cut_points(packet)
    flags, kind, _, _, start, offset = _VNET.unpack_from(packet)
    at = VNET_BYTES + header + first * segment
    payload = packet[at : at + count * segment]
    head = bytearray(packet[VNET_BYTES : VNET_BYTES + header])
    (sequence,) = struct.unpack_from("!I", head, start + 4)
    struct.pack_into("!I", head, start + 4, (sequence + first * segment) & 0xFFFFFFFF)
    if first + count < num:
        head[start + 13] &= ~(_FIN | _PSH)
    if first:
        head[start + 13] &= ~_CWR
    _mend_ip(head, first, len(payload), start, offset)
    if len(payload) <= segment:
        kind = segment = 0
    return _VNET.pack(flags | _NEEDS_CSUM, kind, header, segment, start, offset) + head + payload


def _mend_ip(head: bytearray, first: int, payload_bytes: int, start: int, offset: int) -> None:
    """Lengths and checksums; TCP's is the pseudo-header's part, the receiver trusts the rest."""
    tcp_bytes = len(head) - start + payload_bytes
    if head[0] >> 4 == 4:
        (identification,) = struct.unpack_from("!H", head, 4)
        struct.pack_into("!H", head, 2, len(head) + payload_bytes)
        struct.pack_into("!H", head, 4, (identification + first) & 0xFFFF)
        struct.pack_into("!H", head, 10, 0)
        ip_header = head[: (head[0] & 0xF) * 4]
        struct.pack_into("!H", head, 10, 0xFFFF - _folded_sum(ip_header))
        addresses = head[12:20]
    else:
        struct.pack_into("!H", head, 4, len(head) - 40 + payload_bytes)
        addresses = head[8:40]
    pseudo = bytes(addresses) + struct.pack("!II", 6, tcp_bytes)
    struct.pack_into("!H", head, start + offset, _folded_sum(pseudo))


def _folded_sum(data: bytes | bytearray) -> int:
    """Sum of 16-bit words in ones' complement (RFC 1071)."""
    total = sum(struct.unpack(f"!{len(data) // 2}H", data))
    while total > 0xFFFF:
        total = (total & 0xFFFF) + (total >> 16)
    return total
