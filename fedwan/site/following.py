"""Following the global weights where every site is at a version of its own.

Updates are fetched one after the other, from the version that a site has up to the one that its own
contribution became part of. A site that is further behind than the coordinator keeps updates for
takes the whole weights.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import TYPE_CHECKING

from fedwan.errors import FedwanError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.site.asking import Asked, Asker
from fedwan.site.exchange import MAX_REJECTIONS

if TYPE_CHECKING:
    from fedwan.site.site import Site

__all__ = ["Follower", "Over"]

log = logging.getLogger(__name__)


class Over(Exception):  # noqa: N818
    """The run is complete: nothing more will come."""


class Follower:
    """What a site has of the global weights."""

    def __init__(self, site: Site) -> None:
        assert len(site.fragments) == 1, "sites at a pace of their own send the whole model"
        self.version = 0
        self.durable_version = 0
        self.steps = site.strategy.h
        """That this site shall take until its next upload."""
        self.run_step = 0
        """Where the run stood at the latest update: where this site stands, too."""
        self._rejections = 0
        self._site = site
        self._asker = Asker(site.stub, 2)  # one may still end that was given up

    @property
    def fragment(self) -> Fragment:
        """The whole model."""
        return self._site.fragments[0]

    def take_over(self, versions: Sequence[int]) -> None:
        """The weights at hand are of this version."""
        (self.version,) = versions

    def ask(self) -> Asked:
        """Ask for the next update."""
        is_leader = self._site.group.rank == 0
        return self._asker.ask(self.fragment.index, self.version + 1, is_leader)

    def catch_up(self, sent: int | None, asked: Asked) -> None:
        """Fetch updates until this site's contribution is in them, and put them into both weights.

        Args:
            sent: the version that the contribution started from; None if it was not taken, so that
                the present weights will do.
            asked: for the first of them, before the contribution left.

        Raises:
            Over: the run is complete.
        """
        if sent is None:
            asked.give_up()
            self.take_weights()
            return
        site = self._site
        # One that could not be merged any more is not waited for.
        last = sent + 1 + site.strategy.policy.max_staleness
        while True:
            header = self._take(asked)
            is_merged = header.merged_into > 0 and header.merged_from >= sent
            if is_merged and self.version >= header.merged_into or self.version > last:
                break
            asked = self.ask()
        site.replica.land(self.fragment, 0.0)

    def take_weights(self) -> wire.DownloadHeader:
        """Take the present global weights whole, as both global and local."""
        weights, header = self._site.fetch_present()
        self._site.replica.adopt(weights)
        (self.version,) = header.versions
        self._note(header)
        return header

    def _take(self, asked: Asked) -> wire.DownloadHeader:
        """One update, or, where it is held no longer, the whole weights."""
        site = self._site
        arrival = site.receive(asked, self._heed)
        header = arrival.header
        if arrival.is_superseded:
            # Its own contribution may be in them, and was not when the question was answered.
            header = self.take_weights()
        else:
            assert arrival.payload is not None
            site.replica.advance(arrival.payload, self.fragment, site.strategy.down)
            self.version, self.durable_version = arrival.version, arrival.durable_version
        self._note(header)
        return header

    def _note(self, header: wire.DownloadHeader) -> None:
        self.steps = int(header.steps) or self._site.strategy.h
        self.run_step = int(header.run_step)

    def settle(self, receipt: wire.Receipt) -> int | None:
        """The version that a contribution started from, or None if it will not be merged."""
        if receipt.status == wire.Receipt.REJECTED:
            self._rejections += 1
            log.warning("contribution to version %d was refused: %s", self.version, receipt.text)
            if self._rejections >= MAX_REJECTIONS:
                raise FedwanError(
                    f"{self._rejections} contributions in a row were refused: {receipt.text}"
                )
            # Moments that are not finite would spoil every later step.
            self._site.replica.reset_optimizers()
            return None
        self._rejections = 0
        return self.version if receipt.status == wire.Receipt.ACCEPTED else None

    def close(self) -> None:
        """Nothing is asked any more."""
        self._asker.close()

    def _heed(self) -> None:
        if self._site.is_stopped:
            raise Over
