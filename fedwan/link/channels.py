"""The channels that carry payloads, and what one direction of transfers needs to use them.

Each channel is a TCP connection. Where a lost packet slows one down, four get more than one. Under
bbr each of several is sure of the whole link, and they lose what they send to each other; one that
is paced below the link's rate needs no others (docs/log.md). So it is four, or one.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field

import grpc

from fedwan.link.byte_counter import ByteCounter
from fedwan.link.methods import Stub
from fedwan.link.packing import Packing
from fedwan.link.scheduler import TransferQueue

__all__ = [
    "NUM_CHANNELS",
    "ChannelPool",
    "Direction",
    "num_channels",
    "threads_per_site",
    "window_options",
]

NUM_CHANNELS = 4
MAX_WAITING = 16
"""Fragments of one site whose updates it waits for at once, unless there are more."""
WINDOWS_BYTES = 64 << 20
"""What all sites together may have sent and no handler has asked for: 5 Gbit/s at 100 ms. gRPC
widens windows by itself, but takes a coordinator that is busy with many sites for a long link: 64
sites then held 0.9 GB."""
MIN_WINDOW_BYTES = 256 << 10
"""A window bounds the rate of its connection: here to 21 Mbit/s at 100 ms."""
FEW_SITES = 8
"""Up to so many, gRPC chooses the windows."""


def num_channels(setting: int, is_bbr: bool, is_paced: bool) -> int:
    """Channels of a site: as many as asked, else 4, or 1 under bbr or a pace.

    >>> num_channels(0, False, False), num_channels(0, True, False), num_channels(8, True, True)
    (4, 1, 8)
    """
    return setting or (1 if is_bbr or is_paced else NUM_CHANNELS)


def window_options(num_sites: int, channels: int) -> list[tuple[str, int]]:
    """Options of gRPC that divide `WINDOWS_BYTES` among the connections of many sites."""
    if num_sites <= FEW_SITES:
        return []
    share = WINDOWS_BYTES // (num_sites * channels)
    return [
        ("grpc.http2.bdp_probe", 0),
        ("grpc.http2.lookahead_bytes", max(MIN_WINDOW_BYTES, share)),
    ]


def threads_per_site(channels: int, num_fragments: int = 0) -> int:
    """Calls that a site may have open at once; a thread is made when none is idle.

    Control, words, downloads that wait for a round, and the stripes of two transfers each way.
    """
    waiting = max(MAX_WAITING, num_fragments)
    return 2 + waiting + 4 * (channels or NUM_CHANNELS)


class ChannelPool:
    """Channels, opened when first needed; both directions share them.

    Args:
        dial: opens one.
        num: how many.
    """

    def __init__(self, dial: Callable[[], grpc.Channel], num: int) -> None:
        self._dial = dial
        self._num = num
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: list[Stub] = []

    def stubs(self) -> list[Stub]:
        """One for each channel."""
        with self._lock:
            while len(self._stubs) < self._num:
                self._channels.append(self._dial())
                self._stubs.append(Stub(self._channels[-1]))
            return list(self._stubs)

    def close(self) -> None:
        """Close all, with the calls on them."""
        for channel in self._channels:
            channel.close()


@dataclass(frozen=True)
class Direction:
    """A site's transfers up, or down; neither takes threads from the other."""

    pool: ChannelPool
    threads: ThreadPoolExecutor
    """They run stripes; one is made when none is idle."""
    packing: Packing
    counter: ByteCounter
    on_connected: Callable[[], object]
    """Called when a stripe's connection is known to stand."""
    queue: TransferQueue = field(default_factory=TransferQueue)
