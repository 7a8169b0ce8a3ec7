"""The channels that carry payloads, and what one direction of transfers needs to use them."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Executor, ThreadPoolExecutor

import grpc

from fedwan.link.methods import Stub
from fedwan.link.stripes import Stripes
from fedwan.link.wiretap import ByteCounter

__all__ = ["Lanes", "Trunk"]


class Trunk:
    """Channels, each a TCP connection, opened when first needed; both directions share them.

    Args:
        dial: opens one.
    """

    def __init__(self, dial: Callable[[], grpc.Channel]) -> None:
        self._dial = dial
        self._lock = threading.Lock()
        self._channels: list[grpc.Channel] = []
        self._stubs: list[Stub] = []

    def stubs(self, num: int) -> list[Stub]:
        """The first so many."""
        with self._lock:
            while len(self._stubs) < num:
                self._channels.append(self._dial())
                self._stubs.append(Stub(self._channels[-1]))
            return self._stubs[:num]

    def close(self) -> None:
        """Close all, with the calls on them."""
        with self._lock:
            for channel in self._channels:
                channel.close()


class Lanes:
    """One direction: its number of stripes and its threads, which the other one cannot take.

    Args:
        trunk: of the site.
        stripes: how many.
        counter: of bytes on the wire.
        on_connected: called when a stripe's connection is known to stand.
        num_threads: stripes on their way at once; those of further transfers wait for one.
        name: of the threads.
    """

    def __init__(
        self,
        trunk: Trunk,
        stripes: Stripes,
        counter: ByteCounter,
        on_connected: Callable[[], object],
        num_threads: int,
        name: str,
    ) -> None:
        self._trunk = trunk
        self.stripes = stripes
        self.counter = counter
        self.on_connected = on_connected
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix=name)

    @property
    def pool(self) -> Executor:
        """Runs stripes; a thread is made when none is idle."""
        return self._pool

    def stubs(self) -> list[Stub]:
        """A stub per stripe of a transfer that begins now."""
        return self._trunk.stubs(self.stripes.count)

    def close(self) -> None:
        """Let the threads end."""
        self._pool.shutdown(wait=False, cancel_futures=True)
