"""The intake: contributions on their way in, checked, laid out for merging in site order.

Every contribution is idempotent under (kind, fragment, version, site): sending it again, whole or
in part, from the same process or from its successor, changes nothing once it was accepted.
Not locked: the servicer holds its lock around every call but `inspect`.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from fedwan.codecs import Codec, fp32
from fedwan.codecs.payload import Source
from fedwan.coordinator.gate import inspect
from fedwan.coordinator.reception import ChunkedReception
from fedwan.errors import PayloadError
from fedwan.fragments import Fragment, whole
from fedwan.link import wire_pb2 as wire
from fedwan.state import Layout

__all__ = ["Contribution", "Intake", "Key"]

MAX_CHECKS = 8
"""Payloads checked at once, at most; as many as there are cores if these are fewer."""


class Key(NamedTuple):
    """What makes a contribution the same contribution."""

    kind: wire.UploadHeader.Kind
    fragment: int
    version: int
    site: str


class Contribution(NamedTuple):
    """A whole, checked payload, ready to be merged."""

    site: str
    payload: Source
    reception: ChunkedReception
    work: wire.Work
    norms: dict[str, float]
    checksum: int


class Intake:
    """Receptions that are open and contributions that are whole.

    Args:
        up: codec of contributions.
        folder: for large payloads.
    """

    def __init__(self, up: Codec, folder: Path) -> None:
        self._up = up
        self._folder = folder
        self._fragments: Sequence[Fragment] = ()
        self._layout: Layout = {}
        self._open: dict[Key, ChunkedReception] = {}
        self._ready: dict[Key, Contribution] = {}
        # Threads of its own, few: each holds a record, and all sites' payloads come at once. The
        # first to be whole is the first to be checked, so that merging begins while others wait.
        self._checks = ThreadPoolExecutor(min(MAX_CHECKS, os.cpu_count() or 1), "check")

    def set_layout(self, layout: Layout, fragments: Sequence[Fragment]) -> None:
        """What payloads must look like from now on."""
        self._layout = layout
        self._fragments = fragments

    def codec_and_layout(self, key: Key) -> tuple[Codec, Layout]:
        """How a payload is written: initial weights exactly, contributions by the run's codec.

        Raises:
            PayloadError: there is no such fragment.
        """
        if key.kind == wire.UploadHeader.INITIAL:
            return fp32(), whole(self._layout)[0].layout
        if key.fragment >= len(self._fragments):
            raise PayloadError(
                f"fragment {key.fragment} does not exist, there are {len(self._fragments)}; "
                "start site and coordinator from the same app"
            )
        return self._up, self._fragments[key.fragment].layout

    def open(self, key: Key, header: wire.UploadHeader) -> ChunkedReception:
        """The reception for a payload; a new attempt with other bytes replaces the old one.

        Raises:
            PayloadError: the announced size is not what this fragment takes, or no samples stand
                behind it. Nothing is allocated.
        """
        if key.kind == wire.UploadHeader.CONTRIBUTION and header.work.samples == 0:
            raise PayloadError(
                "contribution of 0 samples announced, which has no weight; "
                "take at least one step between two uploads"
            )
        codec, layout = self.codec_and_layout(key)
        expected = codec.payload_bytes(layout)
        if header.num_bytes != expected:
            raise PayloadError(
                f"payload of {header.num_bytes} bytes announced where the {codec.name} codec "
                f"makes {expected}; set the same codec and model on both sides"
            )
        present = self._open.get(key)
        if present is not None:
            same = present.header.checksum == header.checksum
            if same and present.header.chunk_bytes == header.chunk_bytes:
                return present
            self._open.pop(key).close()
        reception = ChunkedReception(header, self._folder)
        self._open[key] = reception
        return reception

    def find(self, key: Key) -> ChunkedReception | None:
        """The reception that is open under a key."""
        return self._open.get(key)

    def inspect(self, key: Key, payload: Source) -> dict[str, float]:
        """See `gate.inspect`; needs no lock, waits its turn and takes a pass over the payload."""
        codec, layout = self.codec_and_layout(key)
        return self._checks.submit(inspect, payload, layout, codec).result()

    def accept(self, key: Key, contribution: Contribution) -> None:
        """Lay a checked contribution out for merging."""
        self._open.pop(key, None)
        self._ready[key] = contribution

    def reject(self, key: Key) -> None:
        """Drop what is open under a key."""
        reception = self._open.pop(key, None)
        if reception is not None:
            reception.close()

    def ready(self, key: Key) -> Contribution | None:
        """The contribution under a key, if it is whole."""
        return self._ready.get(key)

    def whole(self, fragment: int) -> list[tuple[Key, Contribution]]:
        """A fragment's contributions that are ready, in the order in which they became whole."""
        return [
            (key, contribution)
            for key, contribution in self._ready.items()
            if key.kind == wire.UploadHeader.CONTRIBUTION and key.fragment == fragment
        ]

    def drop(self, key: Key) -> None:
        """Forget one contribution, and the disk it took."""
        contribution = self._ready.pop(key, None)
        if contribution is not None:
            contribution.reception.close()

    def forget(self, fragment: int, up_to_version: int) -> int:
        """Drop everything of a fragment up to and including a version, and the disk it took.

        Returns:
            How many contributions were whole among them.
        """
        for key in [k for k in self._open if self._is_past(k, fragment, up_to_version)]:
            self._open.pop(key).close()
        past = [k for k in self._ready if self._is_past(k, fragment, up_to_version)]
        for key in past:
            self._ready.pop(key).reception.close()
        return sum(key.kind == wire.UploadHeader.CONTRIBUTION for key in past)

    @staticmethod
    def _is_past(key: Key, fragment: int, version: int) -> bool:
        is_contribution = key.kind == wire.UploadHeader.CONTRIBUTION
        return not is_contribution or (key.fragment == fragment and key.version <= version)
