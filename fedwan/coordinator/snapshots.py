"""Whole weights on their way to sites, kept as each began to fetch them, so that it can go on."""

from __future__ import annotations

import threading

from fedwan.codecs import Payload
from fedwan.coordinator.model import GlobalModel
from fedwan.link import wire_pb2 as wire

Snapshot = tuple[Payload, tuple[int, ...]]
"""With the version of each fragment."""
Kind = wire.DownloadRequest.Kind


class Snapshots:
    """By site and kind. A site gets the one that another has of the same versions."""

    def __init__(self) -> None:
        self._kept: dict[tuple[str, Kind], Snapshot] = {}
        self._copying = threading.Lock()

    def find(self, site: str, kind: Kind) -> Snapshot | None:
        """What a site began to fetch."""
        return self._kept.get((site, kind))

    def take(self, site: str, kind: Kind, model: GlobalModel) -> Snapshot:
        """One of the present versions. A copy takes long: one is made at a time."""
        with self._copying:
            versions = tuple(model.versions)
            others = [kept for (_, other), kept in self._kept.copy().items() if other == kind]
            same = (kept for kept in others if kept[1] == versions)
            kept = self._kept[site, kind] = next(same, None) or model.snapshot(kind)
        return kept

    def clear(self, site: str = "") -> None:
        """Of a site, or all."""
        for key in self._kept.copy():
            if site in ("", key[0]):
                self._kept.pop(key, None)
