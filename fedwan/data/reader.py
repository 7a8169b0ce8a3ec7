"""A site's own samples of a data set of files: decoded when asked for, or found decoded.

A sample that turns out to be unreadable during a run is named once, and the next one of the shard
stands in for it: one damaged file in a million should not stop a run of weeks, and the order of all
other samples stays as it is, whatever the number of threads. More than one in a hundred is no
accident, and refused.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from fedwan.data.decoded_cache import DecodedCache
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["Reader"]

log = logging.getLogger(__name__)

_ALLOWED_SHARE = 100
"""One unreadable sample in so many."""


class Reader:
    """Samples of one shard by place, 0 … len - 1; from several threads at once.

    Args:
        decode: a sample's pixels by place, `shape`, uint8; raises `ConfigError` where it cannot.
        labels: (N,), int64, by place.
        shape: of one sample.
        cache_bytes: most that decoded samples may take.
    """

    def __init__(
        self,
        decode: Callable[[int], Tensor],
        labels: Tensor,
        shape: tuple[int, ...],
        cache_bytes: int,
    ) -> None:
        self._decode = decode
        self._labels = labels
        self._cache = DecodedCache(len(labels), shape, cache_bytes)
        self._unreadable: set[int] = set()
        self._refusal: ConfigError | None = None
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._labels)

    def read(self, places: Sequence[int]) -> Batch:
        """Samples at some places: x (n, …) uint8, y (n,) int64.

        Raises:
            ConfigError: too many of the shard's samples cannot be read.
        """
        found = [self._find(place) for place in places]
        y = self._labels[torch.tensor([place for place, _ in found])]
        # Not torch.stack: in each of several threads it would start threads of its own.
        return Batch(torch.from_numpy(np.stack([x.numpy() for _, x in found])), y)

    def _find(self, place: int) -> tuple[int, Tensor]:
        """A sample and its place, or those of the one that stands in for it."""
        while self._refusal is None:
            if place not in self._unreadable:
                sample = self._cache.get(place)
                if sample is not None:
                    return place, sample
                try:
                    sample = self._decode(place)
                except ConfigError as error:
                    self._note(place, error)
                else:
                    self._cache.put(place, sample)
                    return place, sample
            place = (place + 1) % len(self)
        raise self._refusal

    def _note(self, place: int, error: ConfigError) -> None:
        with self._lock:
            if place in self._unreadable:  # another thread was faster
                return
            self._unreadable.add(place)
            num = len(self._unreadable)
            if num > len(self) // _ALLOWED_SHARE + 1 or num == len(self):
                self._refusal = ConfigError(
                    f"{error} ({num} of this site's {len(self)} samples cannot be read, more than "
                    f"one in {_ALLOWED_SHARE})"
                )
                return
        log.warning("%s; until then the next sample stands in for it", error)
