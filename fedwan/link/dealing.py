"""Chunks dealt to the channels that have room for them.

A channel whose packets are lost then carries less, and holds up little more than what is in its own
buffers; with fixed shares the slowest channel would decide how long a transfer takes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator

__all__ = ["Dealer", "Deals"]

MAX_DEALS = 1024
"""Deals remembered: those of sites that are at it, and of some that are through."""


class Dealer(Iterator[int]):
    """Deals chunks to whoever asks, each once; any thread may ask.

    Args:
        chunks: in this order.
    """

    def __init__(self, chunks: Iterable[int]) -> None:
        self._rest = iter(chunks)
        self._lock = threading.Lock()
        self.is_through = False
        """Whether somebody asked in vain."""

    def __next__(self) -> int:
        with self._lock:
            for chunk in self._rest:
                return chunk
            self.is_through = True
            raise StopIteration


class Deals:
    """The dealers of downloads that several calls share, by site and the number it chose.

    One that is through is remembered for a while: a call that comes late has nothing left to do.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._dealers: OrderedDict[tuple[str, int], Dealer] = OrderedDict()

    def join(self, site: str, deal: int, chunks: Iterable[int]) -> Dealer:
        """The dealer of a deal; of these chunks, if this is its first call."""
        with self._lock:
            dealer = self._dealers.get((site, deal))
            if dealer is None:
                dealer = self._dealers[site, deal] = Dealer(chunks)
            self._dealers.move_to_end((site, deal))
            while len(self._dealers) > MAX_DEALS:
                self._dealers.popitem(last=False)
            return dealer
