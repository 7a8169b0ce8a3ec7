"""A TCP proxy that fails on purpose: cuts connections after so many bytes, or swallows all."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress


class FlakyProxy:
    """Forwards TCP to a port of this machine.

    `cut_after(n, times)` cuts every connection once n more bytes went towards the target (or from
    it), as often as asked; `away` refuses new connections; `black_hole` keeps connections open and
    passes nothing on; `slow_down` passes a connection on at a rate of its own.
    """

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._lock = threading.Lock()
        self._pairs: set[tuple[socket.socket, socket.socket]] = set()
        self._num_accepted = 0
        self._rates: dict[int, float] = {}
        self._budget: dict[bool, int | None] = {True: None, False: None}
        self._every = 0
        self._times = 0
        self.num_cuts = 0
        self.bytes_up = 0
        self._is_away = False
        self._passes = threading.Event()
        self._passes.set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, num_bytes: int, times: int = 1, *, upwards: bool = True) -> None:
        with self._lock:
            self._budget = {upwards: num_bytes, not upwards: None}
            self._every, self._times = num_bytes, times

    def cut(self) -> None:
        """Cut every connection now."""
        with self._lock:
            pairs, self._pairs = self._pairs, set()
            self.num_cuts += 1
        for pair in pairs:
            for end in pair:
                with suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)

    def leave(self) -> None:
        """Cut every connection, and refuse new ones until `come_back`."""
        self._is_away = True
        self.cut()

    def come_back(self) -> None:
        self._is_away = False
        self._passes.set()

    def black_hole(self) -> None:
        """Swallow everything, without a word, until `come_back`."""
        self._passes.clear()

    def slow_down(self, connection: int, bytes_per_s: float) -> None:
        """Pass each direction of a connection, by the order of dialling from 0, on at this rate."""
        self._rates[connection] = bytes_per_s

    def close(self) -> None:
        with suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._passes.set()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            if self._is_away:
                near.close()
                continue
            far = socket.create_connection(("127.0.0.1", self._target_port))
            pair = (near, far)
            with self._lock:
                self._pairs.add(pair)
                rate = self._rates.get(self._num_accepted)
                self._num_accepted += 1
            for end in pair if rate else ():
                # A slow connection does not take megabytes in before it is noticed to be slow.
                end.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 16)
            for upwards in (True, False):
                args = (pair, upwards, rate)
                threading.Thread(target=self._pump, args=args, daemon=True).start()

    def _pump(
        self, pair: tuple[socket.socket, socket.socket], upwards: bool, rate: float | None
    ) -> None:
        source, sink = pair if upwards else pair[::-1]
        with suppress(OSError):
            while data := source.recv(min(1 << 16, int((rate or 1e9) / 20))):
                self._passes.wait()
                if self._count(len(data), upwards):
                    self.cut()
                    break
                sink.sendall(data)
                if rate:
                    time.sleep(len(data) / rate)
        with suppress(OSError):
            sink.shutdown(socket.SHUT_RDWR)
        if not upwards:
            for end in pair:
                end.close()

    def _count(self, size: int, upwards: bool) -> bool:
        """Count bytes; whether it is time to cut."""
        with self._lock:
            self.bytes_up += size * upwards
            budget = self._budget[upwards]
            if budget is None or self._times == 0:
                return False
            self._budget[upwards] = budget - size
            if budget - size > 0:
                return False
            self._times -= 1
            self._budget[upwards] = self._every
            return True


@contextmanager
def flaky_proxy(target_port: int) -> Iterator[FlakyProxy]:
    proxy = FlakyProxy(target_port)
    try:
        yield proxy
    finally:
        proxy.close()
