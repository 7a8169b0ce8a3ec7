"""What bounds the coordinator's memory for uploads that arrive from many sites at once."""

from __future__ import annotations

__all__ = ["window_options"]

WINDOWS_BYTES = 64 << 20
"""What all sites together may have sent and no handler has asked for: 5 Gbit/s at 100 ms. gRPC
widens windows by itself, but takes a coordinator that is busy with many sites for a long link: 64
sites then held 0.9 GB."""
MIN_WINDOW_BYTES = 256 << 10
FEW_SITES = 8
"""Up to so many, gRPC may choose."""


def window_options(num_sites: int, channels: int) -> list[tuple[str, int]]:
    """Options of gRPC that divide `WINDOWS_BYTES` among the connections of many sites.

    A window bounds the rate of its connection to one window in a round trip, at 100 ms and 256 KiB
    to 21 Mbit/s; a site that finds out how many channels are fastest then takes more.

    Args:
        num_sites: all of them.
        channels: of each, as a rule.
    """
    if num_sites <= FEW_SITES:
        return []
    share = WINDOWS_BYTES // (num_sites * channels)
    return [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", max(MIN_WINDOW_BYTES, share)),
    ]
