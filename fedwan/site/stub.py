"""What a site says to the coordinator, in the run's terms instead of the wire's.

An update is asked for before the contribution that it is made of has left: the coordinator holds
the question until the update is there, and the answer takes half a round trip instead of one and a
half. That costs a thread, and a call that waits at the coordinator.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, wait
from functools import partial
from typing import cast

import safetensors.torch
from torch import Tensor

from fedwan.codecs import Payload, fp32
from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError, LinkLost, RunStopped
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Link
from fedwan.site.masker import Masker
from fedwan.site.replica import Replica
from fedwan.state import OnDemand, State, is_moment

Asked = wire.DownloadRequest
COPY_S = 300.0
"""How long whole weights are asked for in vain: the coordinator makes this site a copy once calls
that carry earlier ones have ended, as those do in which nothing moves (docs/wire.md)."""
STOP_SIGNAL_S = 5.0
"""How long the word that says why a run is over may take to arrive after the run is."""
POLL_S = 2.0
"""How long the coordinator holds a request; between two for what it has no copy of, too."""
LISTEN_S = 0.2
"""How often a site that waits for an update heeds the coordinator's signals."""


class CoordinatorStub:
    """Speaks for one site in one run; rank 0 alone has a link.

    Collective are `send_initial`, `report`, `receive`, `is_over`, `fetch_…` but `fetch_update`. The
    coordinator holds a request for an update that is not there yet for `POLL_S`.
    """

    def __init__(
        self,
        link: Link | None,
        run_id: str,
        replica: Replica,
        masker: Masker | None = None,
    ) -> None:
        self._rank_0_link = link
        self._run_id = run_id
        self._layout, self._group = replica.layout, replica.group
        self._masker = masker

    @property
    def link(self) -> Link:
        """Of rank 0."""
        assert self._rank_0_link is not None, "rank 0 has the link"
        return self._rank_0_link

    # What leaves ---------------------------------------------------------------------------

    def send_initial(self, weights: Mapping[str, Tensor]) -> None:
        """Upload the initial weights, exactly."""

        def send() -> None:
            payload, _ = fp32().encode(weights, {}, whole(self._layout)[0].layout)
            header = wire.UploadHeader(kind=wire.UploadHeader.INITIAL)
            receipt = self.upload(payload, header)
            if receipt.status == wire.Receipt.REJECTED:
                raise FedwanError(f"the initial weights were refused: {receipt.text}")

        self._group.lead_long(send)

    def upload(self, payload: Payload | None, header: wire.UploadHeader) -> wire.Receipt:
        """Upload a contribution, or initial weights, as its header says."""
        assert payload is not None, "rank 0 has encoded it"
        header.run_id, header.checksum = self._run_id, payload.checksum
        return self.link.upload(header, payload)

    def report(self, report: wire.QualityReport) -> None:
        """Hand in quality figures and samples, rank 0's."""
        report.run_id = self._run_id
        self._group.lead_long(lambda: self.link.report(report))

    # What comes ----------------------------------------------------------------------------

    def _download(self, asked: Asked) -> Delivery:
        asked.run_id = self._run_id
        return self.link.download(asked)

    def _whole(
        self, asked: Asked, read: Callable[[Source], State]
    ) -> tuple[State | None, wire.DownloadHeader]:
        """Weights or the like, once the coordinator has a copy, at rank 0, and its header."""
        kept: list[State] = []

        def fetch() -> wire.DownloadHeader:
            deadline = time.monotonic() + COPY_S
            while True:
                header, payload = self._download(asked)
                if payload is not None:
                    kept.append(read(payload))
                if header.status != wire.DownloadHeader.NOT_YET:
                    return header
                if time.monotonic() > deadline:
                    raise LinkLost(
                        "the coordinator has had no copy of its weights for this site for "
                        f"{COPY_S:g} s: earlier downloads have not ended; see in its journal what "
                        "it waits for"
                    )
                time.sleep(POLL_S)

        header = self._group.lead_long(fetch)
        return (kept[0] if kept else None), header

    def fetch_update(self, fragment: int, version: int, between: Callable[[], None]) -> Delivery:
        """The update of a fragment that leads to `version`, or word that it is superseded.

        `between` is called every now and then while waiting, and may raise to end the wait.

        Raises:
            RunStopped: the run is over without that version, and `between` does not say why.
        """
        asked, over_since = Asked(fragment=fragment, version=version, wait_s=POLL_S), None
        while True:
            update = self._download(asked)
            if update.header.status == wire.DownloadHeader.UNMASK and self._masker:
                self.link.unmask(self._masker.answer(update.header.unmask))
                continue
            if update.payload is not None or is_superseded(update):
                return update
            between()
            if update.header.status == wire.DownloadHeader.DONE:
                over_since = over_since or time.monotonic()
                if time.monotonic() - over_since > STOP_SIGNAL_S:
                    raise RunStopped(
                        f"the run ended at version {update.header.version}, before version "
                        f"{version}; the coordinator's log says why"
                    )
                time.sleep(0.05)

    def receive(self, update: Future[Delivery] | None, listen: Callable[[], object]) -> Delivery:
        """Wait for an update, and have it at every process; `listen` may raise to end the wait."""
        while not self._group.lead(lambda: is_here(update)):
            listen()
        return self._group.share(lambda: cast(Future[Delivery], update).result())

    def is_over(self, version: int) -> bool:
        """Whether the run has ended, asked without waiting."""
        done = wire.DownloadHeader.DONE
        return self._group.lead(
            lambda: self._download(Asked(version=version + 1)).header.status == done
        )

    def fetch_published(self, fragment: int, version: int) -> Delivery:
        """A fragment's update that led to a present version, if it is held, at every process."""
        asked = Asked(fragment=fragment, version=version)
        return self._group.share(lambda: self._download(asked))

    def fetch_weights(self, asked: Asked) -> tuple[State | None, wire.DownloadHeader]:
        """The present global weights, or their average without moments, at rank 0; what was said.

        Nothing but that where this site has what is asked for already, or can follow the updates.
        """
        layout = self._layout
        if asked.kind == Asked.EMA:
            layout = {name: spec for name, spec in layout.items() if not is_moment(name)}
        return self._whole(asked, partial(fp32().decode, layout=layout))

    def fetch_outer(self) -> tuple[Mapping[str, Tensor] | None, list[int]]:
        """The optimiser's state that sites mirror, and the versions that it is of.

        Of several processes each takes all of its tensors, in order: rank 0 tells the others.
        """

        def read(payload: Source) -> State:
            return safetensors.torch.load(bytes(payload.read(0, payload.num_bytes)))

        outer, header = self._whole(Asked(kind=Asked.OUTER), read)
        held = outer or {}
        specs = self._group.lead(
            lambda: None if outer is None else {n: (v.shape, v.dtype) for n, v in held.items()}
        )
        if specs is None:
            return None, list(header.versions)
        told = OnDemand(specs, lambda name: self._group.spread(held.get(name), *specs[name]))
        return told, list(header.versions)


def is_here(update: Future[Delivery] | None) -> bool:
    """Whether an update that rank 0 has asked for is; waits for it a little."""
    assert update is not None, "rank 0 has asked"
    return bool(wait([update], LISTEN_S).done)


def is_superseded(update: Delivery) -> bool:
    """Whether the version asked for is past: only the global weights can be had."""
    return update.header.status == wire.DownloadHeader.SUPERSEDED


def is_merged(header: wire.DownloadHeader, start: int, into: int) -> bool:
    """Whether this site's contribution to version `start`, or a later one, is in version `into`."""
    return header.merged_from >= start and 0 < header.merged_into <= into
