"""How a transfer uses its channels: standing or new ones, and how many. What measures best stays.

A flow that stood idle starts slowly again, but remembers the rate at which it last lost a packet
and creeps from there on, if its congestion control goes by losses. A new connection does not, for
the price of a handshake. So new ones are tried, and kept if they bring more than a tenth. They come
first: standing ones show what they are only when they have been standing for a while. What goes by
the rate, as bbr, remembers the rate: there nothing is tried.

Each channel is a TCP flow. Where packets are lost, or where windows are short for the round trip,
several flows get more than one; where they are not, more flows only cost memory. So the number is
then doubled while that brings more than a tenth, and once more where it does not: losses come by
chance, and one bad spell must not settle it. Where the rate falls well below what was found, it all
begins anew. What goes by the rate gets all there is with one flow, unless a window or a processor
limits that; of several each is sure of the whole link, and they lose what they send to each other
(docs/log.md). So two are tried, and more only where two bring more.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = [
    "MAX_CHANNELS",
    "PACED_CHANNELS",
    "START_CHANNELS",
    "Stretch",
    "Stripes",
    "most_stripes",
]

START_CHANNELS = 4
"""Where a lost packet slows a channel down; else it begins with one."""
PACED_CHANNELS = 1
"""A channel that is kept below the link's rate needs no company."""
MAX_CHANNELS = 16
GAIN = 1.1
"""What doubling must bring to be kept."""
MAX_VAIN = 2
"""Times in a row that it may bring less, where a lost packet slows a channel down; else once."""
FALL = 1.5
"""Below a rate's so-manieth part it counts as fallen."""
SAMPLES = 3
"""Stretches measured each way, whose median counts; one before them does not, it connects."""
LEAST_BYTES = 8 << 20
"""A shorter stretch measures the round trip, not the rate."""
LEAST_S = 1.0
"""Nor does a shorter one among others: the next transfer's bytes are on their way already."""


def most_stripes(channels: int) -> int:
    """Stripes that a site has on its way in each direction at once: those of two transfers.

    >>> most_stripes(2), most_stripes(0)
    (4, 32)
    """
    return 2 * (channels or MAX_CHANNELS)


class Stretch:
    """A transfer that is being measured."""

    def __init__(self) -> None:
        self.num_bytes = 0
        """To be set by whoever transfers; 0 leaves the whole stretch out."""
        self.is_clean = True
        """To be unset when something failed: what that cost is no property of the number."""


class Stripes:
    """One direction of a site's transfers; any thread may transfer.

    Transfers that overlap are measured as one stretch, since what counts is what all of them get
    together. It ends with the last of them; or with one of them after a second, if enough has been
    carried, since a site that is never idle must find out as well.

    Args:
        channels: how many to use; 0 finds out.
        yields_to_loss: whether one lost packet slows a channel down.
        clock: monotonic seconds; a test's may differ.
    """

    def __init__(
        self,
        channels: int,
        yields_to_loss: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._yields_to_loss = yields_to_loss
        self._start = channels or (START_CHANNELS if yields_to_loss else 1)
        self.count = self._start
        """Channels that a transfer which begins now should use."""
        self.is_fresh = yields_to_loss
        """Whether a transfer that begins after a pause should dial anew."""
        self._fresh_rate = 0.0  # bytes per second
        self._max_vain = MAX_VAIN if yields_to_loss else 1
        self._is_fixed = bool(channels)
        self._is_settled = False
        self._clock = clock
        self._lock = threading.Lock()
        self._num_active = 0
        self._began = 0.0
        self._total = Stretch()
        self._samples: list[float] = []
        self._best = 0.0  # bytes per second
        self._best_count = self.count
        self._num_vain = 0

    @contextmanager
    def measured(self) -> Iterator[Stretch]:
        """Measure a transfer; on an exception it does not count."""
        transfer = Stretch()
        with self._lock:
            if self._num_active == 0:
                self._began = self._clock()
                self._total = Stretch()
            self._num_active += 1
        try:
            yield transfer
        except BaseException:
            transfer.is_clean = False
            raise
        finally:
            with self._lock:
                self._end(transfer)

    def _end(self, transfer: Stretch) -> None:
        total = self._total
        total.num_bytes += transfer.num_bytes
        total.is_clean &= transfer.is_clean
        self._num_active -= 1
        now = self._clock()
        duration_s = now - self._began
        least_s = LEAST_S if self._num_active else 0.0
        if total.num_bytes < LEAST_BYTES or duration_s <= least_s:
            return
        self._began, self._total = now, Stretch()
        if not total.is_clean:
            return
        self._samples.append(total.num_bytes / duration_s)
        if len(self._samples) > SAMPLES:
            rate = statistics.median(self._samples[1:])
            if self._is_settled:
                self._look_back(rate)
            else:
                self._decide(rate)
            self._samples = []

    def _look_back(self, rate: float) -> None:
        """Begin anew if what was settled on is not what it was."""
        if rate < self._best / FALL:
            self.count, self._is_settled = self._start, False
            self.is_fresh = self._yields_to_loss
            self._fresh_rate = self._best = 0.0
            self._num_vain = 0

    def _decide(self, rate: float) -> None:
        """New connections were measured, or standing ones, or twice as many: what comes next."""
        if self.is_fresh and not self._fresh_rate:
            self._fresh_rate = rate
            self.is_fresh = False
            return
        if not self._best:
            self.is_fresh = self._fresh_rate > GAIN * rate
            self._best = self._fresh_rate if self.is_fresh else rate
            self._best_count = self.count
        elif rate > GAIN * self._best:
            self._best, self._best_count, self._num_vain = rate, self.count, 0
        else:
            self._num_vain += 1
        if self._is_fixed or self._num_vain >= self._max_vain or self.count >= MAX_CHANNELS:
            self.count = self._best_count
            self._is_settled = True
        else:
            self.count = min(2 * self.count, MAX_CHANNELS)
