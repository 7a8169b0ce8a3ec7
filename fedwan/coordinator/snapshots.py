"""Whole weights on their way to sites, kept as each began to fetch them, so that it can go on."""

from __future__ import annotations

import threading
from collections import defaultdict
from weakref import WeakSet

from fedwan.codecs import Payload
from fedwan.coordinator.model import GlobalModel
from fedwan.link import wire_pb2 as wire

Snapshot = tuple[Payload, tuple[int, ...]]
"""With the version of each fragment."""
Kind = wire.DownloadRequest.Kind
MOST = 3
"""Snapshots that one site may hold back: of calls that are slow, or cut off and not known to be."""


class Snapshots:
    """By site and kind. A site gets the one that another has of the same versions."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Kind], Snapshot] = {}
        self._out: defaultdict[str, WeakSet[Payload]] = defaultdict(WeakSet)
        """By site, what it was given, as long as somebody still sends it."""
        self._copying = threading.Lock()

    def find(self, site: str, kind: Kind) -> Snapshot | None:
        """What a site began to fetch."""
        return self._kept.get((site, kind))

    def take(self, site: str, kind: Kind, model: GlobalModel) -> Snapshot | None:
        """One of the present versions; None for a site that still holds too many others.

        A copy takes long: one is made at a time.
        """
        with self._copying:
            if len(self._out[site]) >= MOST:
                return None
            versions = tuple(model.versions)
            others = [kept for (_, other), kept in self._kept.copy().items() if other == kind]
            same = (kept for kept in others if kept[1] == versions)
            kept = self._kept[site, kind] = next(same, None) or model.snapshot(kind)
            self._out[site].add(kept[0])
        return kept

    def clear(self, site: str = "") -> None:
        """Of a site, or all."""
        for key in self._kept.copy():
            if site in ("", key[0]):
                self._kept.pop(key, None)
