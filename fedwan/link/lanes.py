"""The channels that carry payloads, and what one direction of transfers needs to use them."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager

import grpc

from fedwan.link.methods import Stub
from fedwan.link.packing import Packing
from fedwan.link.stripes import Stripes
from fedwan.link.turns import Line
from fedwan.link.wiretap import ByteCounter

__all__ = ["Lanes", "Trunk"]

PAUSE_S = 1.0
"""After which TCP has forgotten the rate of a connection, though not its losses (RFC 2861)."""


class Trunk:
    """Channels, each a TCP connection, opened when first needed; both directions share them.

    Args:
        dial: opens one.
        clock: monotonic seconds; a test's may differ.
    """

    def __init__(
        self, dial: Callable[[], grpc.Channel], clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._dial = dial
        self._clock = clock
        self._num_leases = 0
        self._used_at = -math.inf
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: list[Stub] = []

    @contextmanager
    def lease(self, num: int, is_fresh: bool) -> Iterator[list[Stub]]:
        """The first so many, for a transfer.

        Args:
            num: how many.
            is_fresh: dial all anew, if nobody has used any for a while.
        """
        with self._lock:
            is_idle = not self._num_leases and self._clock() - self._used_at > PAUSE_S
            if is_fresh and is_idle:
                self._hang_up()
            while len(self._stubs) < num:
                self._channels.append(self._dial())
                self._stubs.append(Stub(self._channels[-1]))
            stubs = self._stubs[:num]
            self._num_leases += 1
        try:
            yield stubs
        finally:
            with self._lock:
                self._num_leases -= 1
                self._used_at = self._clock()

    def _hang_up(self) -> None:
        for channel in self._channels:
            channel.close()
        self._channels, self._stubs = [], []

    def close(self) -> None:
        """Close all, with the calls on them."""
        with self._lock:
            self._hang_up()


class Lanes:
    """One direction: its number of stripes and its threads, which the other one cannot take.

    Args:
        trunk: of the site.
        stripes: how many.
        packing: whether chunks are packed.
        counter: of bytes on the wire.
        on_connected: called when a stripe's connection is known to stand.
        num_threads: stripes on their way at once; those of further transfers wait for one.
        name: of the threads.
    """

    def __init__(
        self,
        trunk: Trunk,
        stripes: Stripes,
        packing: Packing,
        counter: ByteCounter,
        on_connected: Callable[[], object],
        num_threads: int,
        name: str,
    ) -> None:
        self._trunk = trunk
        self.stripes = stripes
        self.packing = packing
        self.counter = counter
        self.on_connected = on_connected
        self.line = Line()
        """Of this direction's transfers."""
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    @property
    def pool(self) -> Executor:
        """Runs stripes; a thread is made when none is idle."""
        return self._pool

    def lease(self) -> AbstractContextManager[list[Stub]]:
        """A stub per stripe of a transfer that begins now."""
        return self._trunk.lease(self.stripes.count, self.stripes.is_fresh)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
