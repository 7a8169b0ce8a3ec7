"""What a site says to the coordinator, in the run's terms instead of the wire's."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import NamedTuple

import safetensors.torch

from fedwan.codecs import Payload, fp32
from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError, RunStopped
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.state import Layout, State

__all__ = ["Arrival", "CoordinatorStub", "is_merged"]

STOP_SIGNAL_S = 5.0
"""How long the word that says why a run is over may take to arrive after the run is."""


class Arrival(NamedTuple):
    """An update that came, or word that it will not."""

    payload: Source | None
    """None if it is superseded, or once it was put to use."""
    version: int
    durable_version: int
    header: wire.DownloadHeader = wire.DownloadHeader()
    """As it came."""

    @property
    def is_superseded(self) -> bool:
        """Whether the version asked for is past: only the global weights can be had."""
        return self.header.status == wire.DownloadHeader.SUPERSEDED


class CoordinatorStub:
    """Speaks for one site in one run."""

    def __init__(self, link: Link | None, run_id: str, layout: Layout, poll_s: float) -> None:
        self._rank_0_link = link
        self._run_id = run_id
        self._layout = layout
        self._poll_s = poll_s

    @property
    def _link(self) -> Link:
        assert self._rank_0_link is not None, "rank 0 has the link"
        return self._rank_0_link

    def send_initial(self, weights: State) -> None:
        """Upload the initial weights, exactly."""
        payload, _ = fp32().encode(weights, {}, whole(self._layout)[0].layout)
        receipt = self._send(wire.UploadHeader.INITIAL, 0, 0, payload, wire.Work())
        if receipt.status == wire.Receipt.REJECTED:
            raise FedwanError(f"the initial weights were refused: {receipt.text}")

    def send_contribution(
        self,
        fragment: int,
        version: int,
        payload: Payload | None,
        work: wire.Work,
    ) -> wire.Receipt:
        """Upload a contribution to `version`."""
        return self._send(wire.UploadHeader.CONTRIBUTION, fragment, version, payload, work)

    def _send(
        self,
        kind: wire.UploadHeader.Kind,
        fragment: int,
        version: int,
        payload: Payload | None,
        work: wire.Work,
    ) -> wire.Receipt:
        assert payload is not None, "rank 0 has encoded it"
        header = wire.UploadHeader(
            run_id=self._run_id,
            kind=kind,
            fragment=fragment,
            version=version,
            num_bytes=payload.num_bytes,
            checksum=payload.checksum,
            work=work,
        )
        return self._link.upload(header, payload)

    def fetch_update(self, fragment: int, version: int, between: Callable[[], None]) -> Arrival:
        """Wait for the update that leads to `version`."""
        over_since = None
        while True:
            request = wire.DownloadRequest(
                run_id=self._run_id,
                kind=wire.DownloadRequest.UPDATE,
                fragment=fragment,
                version=version,
                wait_s=self._poll_s,
            )
            header, payload = self._link.download(request)
            if payload is not None:
                return Arrival(payload, header.version, header.durable_version, header)
            if header.status == wire.DownloadHeader.SUPERSEDED:
                return Arrival(None, header.version, header.durable_version, header)
            between()
            if header.status == wire.DownloadHeader.DONE:
                over_since = over_since or time.monotonic()
                if time.monotonic() - over_since > STOP_SIGNAL_S:
                    raise RunStopped(
                        f"the run ended at version {header.version}, before version {version}; "
                        "the coordinator's log says why"
                    )
                time.sleep(0.05)

    def is_over(self, version: int) -> bool:
        """Whether the run has ended, asked without waiting."""
        request = wire.DownloadRequest(
            run_id=self._run_id, kind=wire.DownloadRequest.UPDATE, version=version + 1
        )
        return self._link.download(request).header.status == wire.DownloadHeader.DONE

    def fetch_global(self) -> tuple[State, list[int]]:
        """The present global weights, and the version of each fragment."""
        weights, header = self.fetch_present()
        return weights, list(header.versions)

    def fetch_present(self) -> tuple[State, wire.DownloadHeader]:
        """The present global weights, and what was said about them and to this site."""
        header, payload = self._fetch(wire.DownloadRequest.GLOBAL)
        return fp32().decode(payload, self._layout), header

    def fetch_ema(self) -> tuple[State, int]:
        """The moving average of the global weights, and the version that all of it has."""
        header, payload = self._fetch(wire.DownloadRequest.EMA)
        return fp32().decode(payload, self._layout), header.version

    def fetch_outer(self) -> tuple[State, list[int]]:
        """The state of the optimiser that the coordinator steps, and the version of it."""
        header, payload = self._fetch(wire.DownloadRequest.OUTER)
        state = safetensors.torch.load(bytes(payload.read(0, payload.num_bytes)))
        return state, list(header.versions)

    def _fetch(self, kind: wire.DownloadRequest.Kind) -> tuple[wire.DownloadHeader, Source]:
        header, payload = self._link.download(wire.DownloadRequest(run_id=self._run_id, kind=kind))
        if payload is None:
            raise FedwanError("the coordinator has no weights yet; its run has not begun")
        return header, payload

    def report(self, version: int, figures_json: str, samples: bytes) -> None:
        """Hand in quality figures and samples."""
        self._link.report(
            wire.QualityReport(
                run_id=self._run_id, version=version, figures_json=figures_json, samples=samples
            )
        )


def is_merged(header: wire.DownloadHeader, start: int, into: int) -> bool:
    """Whether this site's contribution to version `start` is in the update that leads to `into`."""
    return (header.merged_from, header.merged_into) == (start, into)
