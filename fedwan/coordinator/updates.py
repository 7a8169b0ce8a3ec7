"""What sites can fetch: updates that are out, and whole weights on demand.

Part of the servicer, and guarded by its lock: methods say whether they take it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence

from fedwan.codecs import Payload
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import PayloadError
from fedwan.fragments import rounds_done
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery

__all__ = ["Updates"]

MAX_WAIT_S = 10.0
"""Longest that a download waits here before the site must ask again."""

_Versions = tuple[int, ...]

_SNAPSHOTS: dict[int, Callable[[GlobalModel], tuple[Payload, _Versions]]] = {
    wire.DownloadRequest.GLOBAL: GlobalModel.snapshot_global,
    wire.DownloadRequest.EMA: GlobalModel.snapshot_ema,
    wire.DownloadRequest.OUTER: GlobalModel.snapshot_outer,
}


class Updates:
    """What sites can fetch.

    Args:
        changed: the servicer's lock, notified whenever something is new.
        is_over: whether the run has ended.
        chunk_bytes: of downloads.
    """

    def __init__(
        self, changed: threading.Condition, is_over: Callable[[], bool], chunk_bytes: int
    ) -> None:
        self._changed = changed
        self._is_over = is_over
        self._chunk_bytes = chunk_bytes
        self.model: GlobalModel | None = None
        self.versions: list[int] = []
        """Per fragment, what sites can have: the model itself is ahead while it is committed."""
        self.durable_version = 0
        self.steps: Mapping[str, int] = {}
        """By site, steps to take until its next upload; absent for the strategy's H."""
        self.run_step = 0
        """Where the run stands: the mean over sites of the steps that were merged."""
        self._anew_from: dict[int, int] = {}
        """By fragment, the version at which what strategies keep at sites begins anew."""
        self._keep_bytes = 0
        self._updates: dict[int, dict[int, Payload]] = {}
        """By fragment and version, in the order of versions."""
        self._arrived: dict[int, set[str]] = {}
        """Sites that are known to hold the update that is out, by fragment."""
        self._merged: dict[tuple[int, str], tuple[int, int]] = {}
        """By fragment and site, the version that its latest merged contribution started from, and
        the one that it became part of."""
        self._own: dict[int, int] = {}
        """By fragment, the latest version if its update is one contribution, bit for bit."""
        self._snapshots: dict[tuple[str, int], tuple[Payload, _Versions]] = {}

    # With the lock held ---------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Whole rounds that every fragment has had."""
        return rounds_done(self.model.fragments, self.versions) if self.model else 0

    def open(self, model: GlobalModel, keep_bytes: int = 0) -> None:
        """The global weights are here.

        Args:
            model: the global model.
            keep_bytes: of each fragment, past updates are kept up to so many bytes, for sites that
                fetch one after the other; the newest is kept in any case.
        """
        self.model = model
        self.versions = list(model.versions)
        self._keep_bytes = keep_bytes

    def publish(
        self,
        fragment: int,
        version: int,
        payload: Payload,
        merged: Sequence[tuple[str, int]] = (),
        *,
        is_own: bool = False,
    ) -> None:
        """Hand an update out.

        Args:
            fragment: which.
            version: that it leads to.
            payload: the update.
            merged: sites whose contributions are in it, each with the version that it started from.
            is_own: it is the one contribution in it, bit for bit.
        """
        updates = self._updates.setdefault(fragment, {})
        updates[version] = payload
        while len(updates) > 1 and sum(u.num_bytes for u in updates.values()) > self._keep_bytes:
            del updates[next(iter(updates))]
        self.versions[fragment] = version
        self._own[fragment] = version if is_own else 0
        self._arrived[fragment] = set()
        for site, start in merged:
            self._merged[fragment, site] = max((start, version), self._merged_of(fragment, site))

    def note_back(self, site: str, checkpoint: int) -> None:
        """A site's process is new: what it lost, others must not be corrected for.

        Those of a site whose checkpoint is older than its latest merged contribution.
        """
        for fragment in range(len(self.versions)):
            if self._merged_of(fragment, site)[1] > checkpoint:
                self._begin_anew(fragment)

    def _begin_anew(self, fragment: int) -> None:
        """What a strategy keeps at the sites (`fedwan.site.hook`) begins anew at all of them.

        It may hold together over all sites, which it no longer does where a site has not learnt
        from an update that it is merged into. All begin anew at the version that is made next.
        """
        self._anew_from[fragment] = self.versions[fragment] + 1

    def is_merged(self, fragment: int, site: str, version: int) -> bool:
        """Whether a site's contribution to a version, or to a later one, has been merged."""
        start, into = self._merged_of(fragment, site)
        return into > 0 and start >= version

    def _merged_of(self, fragment: int, site: str) -> tuple[int, int]:
        return self._merged.get((fragment, site), (0, 0))

    def withdraw(self, fragment: int) -> None:
        """Drop the update that is out; a site that still wants it takes the global weights.

        Where past updates are kept, nothing is dropped: sites are at different versions.
        """
        if not self._keep_bytes:
            self._updates.pop(fragment, None)
            self._snapshots.clear()

    def note_arrived(self, fragment: int, version: int, site: str, sites: Collection[str]) -> None:
        """Who contributes to a version has its update: once all do, its memory is free to go."""
        if self._keep_bytes:
            # Rounds do not clear them here, and a copy of the average that is out costs another
            # with every update.
            for kind in _SNAPSHOTS:
                self._snapshots.pop((site, kind), None)
        elif version in self._updates.get(fragment, {}):
            arrived = self._arrived.setdefault(fragment, set())
            arrived.add(site)
            if arrived.issuperset(sites):
                del self._updates[fragment]

    # Takes the lock -------------------------------------------------------------------------

    def fetch(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """An update or whole weights, after waiting up to `wait_s` for an update.

        Raises:
            PayloadError: it names nothing that this run has.
        """
        if request.kind == wire.DownloadRequest.UPDATE:
            return self._update(site, request)
        if request.kind in _SNAPSHOTS:
            return self._snapshot(site, request)
        raise PayloadError(
            f"download of kind {request.kind} is none that this run has; "
            "start site and coordinator from the same app"
        )

    def _update(self, site: str, request: wire.DownloadRequest) -> Delivery:
        deadline = time.monotonic() + min(MAX_WAIT_S, request.wait_s)  # in this order for NaN
        with self._changed:
            while True:
                payload = self._updates.get(request.fragment, {}).get(request.version)
                if payload is not None:
                    delivery = self._ready(request.version, (), payload)
                    self._address(delivery.header, site, request.fragment)
                    return delivery
                present = self.versions[request.fragment] if self.versions else 0
                if present >= request.version:
                    if self._merged_of(request.fragment, site)[1] == request.version:
                        self._begin_anew(request.fragment)  # it cannot learn from it any more
                    return self._without(wire.DownloadHeader.SUPERSEDED, site, request.fragment)
                remaining = deadline - time.monotonic()
                if remaining <= 0 or self._is_over():
                    over = wire.DownloadHeader.DONE
                    status = over if self._is_over() else wire.DownloadHeader.NOT_YET
                    return self._without(status, site, request.fragment)
                self._changed.wait(remaining)

    def _without(self, status: wire.DownloadHeader.Status, site: str, fragment: int) -> Delivery:
        present = self.versions[fragment] if self.versions else 0
        header = wire.DownloadHeader(status=status, version=present)
        self._address(header, site, fragment)
        return Delivery(header, None)

    def _address(self, header: wire.DownloadHeader, site: str, fragment: int) -> None:
        """Say what holds for this site alone."""
        header.merged_from, header.merged_into = self._merged_of(fragment, site)
        own = self._own.get(fragment, 0)
        header.is_own = 0 < own == header.merged_into
        header.anew_from = self._anew_from.get(fragment, 0)
        header.steps = self.steps.get(site, 0)
        header.run_step = self.run_step

    def _snapshot(self, site: str, request: wire.DownloadRequest) -> Delivery:
        key = (site, request.kind)
        with self._changed:
            model = self.model
            kept = self._snapshots.get(key)
        if model is None:
            return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
        if kept is None or not request.checksum:
            kept = _SNAPSHOTS[request.kind](model)
            with self._changed:
                self._snapshots[key] = kept
        payload, versions = kept
        delivery = self._ready(rounds_done(model.fragments, versions), versions, payload)
        with self._changed:
            if self._keep_bytes and request.kind == wire.DownloadRequest.GLOBAL:
                # These weights may be committed and not published yet: what the site is told of its
                # contribution must be of the same version, or it would wait for one more.
                self._changed.wait_for(
                    lambda: self._is_over() or self.versions >= list(versions), MAX_WAIT_S
                )
            self._address(delivery.header, site, 0)
        return delivery

    def _ready(self, version: int, versions: _Versions, payload: Payload) -> Delivery:
        header = wire.DownloadHeader(
            status=wire.DownloadHeader.READY,
            version=version,
            versions=versions,
            num_bytes=payload.num_bytes,
            checksum=payload.checksum,
            chunk_bytes=self._chunk_bytes,
            durable_version=self.durable_version,
        )
        return Delivery(header, payload)
