"""Everything a site can ask of the coordinator, and nothing that decides a round.

Handler threads of the data plane come in through the `Hub` methods; the round loop
(`fedwan.coordinator.rounds`) takes contributions out and puts updates in. One lock guards both,
and is never held while bytes are checked, merged or sent.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from queue import SimpleQueue

from fedwan.codecs import Payload
from fedwan.codecs.payload import Source
from fedwan.coordinator.agreement import Agreement, Claim
from fedwan.coordinator.intake import Contribution, Intake, Key
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.reception import ChunkedReception
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.updates import Updates
from fedwan.errors import PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Delivery, Reception, Signals
from fedwan.state import Layout
from fedwan.strategy import Strategy

__all__ = ["Servicer"]

Event = Callable[[str, str | None, str], None]
"""(event, site or None, text)."""


class Servicer:
    """Implements `fedwan.link.base.Hub`.

    Args:
        run_id: of this run; sites of another are refused.
        registry: the sites.
        agreement: of sites on what they train.
        on_event: called for what a user should see in the log.
        chunk_bytes: of downloads.
        sources: SHA-256 of strategy and recipe here, by name; None where sites need not have them.
    """

    def __init__(
        self,
        run_id: str,
        registry: Registry,
        agreement: Agreement,
        on_event: Event,
        chunk_bytes: int,
        sources: Mapping[str, str] | None = None,
    ) -> None:
        self.changed = threading.Condition()
        self.registry = registry
        self.agreement = agreement
        self._intake: Intake | None = None
        self.reports: SimpleQueue[tuple[str, wire.QualityReport]] = SimpleQueue()
        self.farewells: dict[str, wire.Farewell] = {}
        self.rejected = 0
        self.refused_since_update = 0
        """Contributions that were refused since the last update went out."""
        self.last_refusal = ""
        self.dropped = 0
        """Contributions that came too late to be merged."""
        self.rejoins = 0
        self.layout: Layout = {}
        self._sources = sources
        self._run_id = run_id
        self._max_staleness = 0
        self._is_complete = False
        self._last_dropped: dict[tuple[int, str], int] = {}
        """By fragment and site, the version of its latest contribution that was too late."""
        self._event = on_event
        self._num_fragments = 0
        self._sender_of_initial: str | None = None
        self.stop_text = ""
        """Why the run is over; empty while it is not."""
        self.updates = Updates(self.changed, lambda: bool(self.stop_text), chunk_bytes)

    # Join, heartbeats, farewell ------------------------------------------------------------

    @property
    def intake(self) -> Intake:
        """Contributions, once the run has begun."""
        if self._intake is None:
            raise SessionLost("the run has not begun; join first")
        return self._intake

    def start(self, claim: Claim, intake: Intake, strategy: Strategy) -> None:
        """The sites agree: admit them.

        Args:
            claim: what they train.
            intake: for their contributions.
            strategy: the run's.
        """
        with self.changed:
            self._intake = intake
            self._max_staleness = strategy.policy.max_staleness
            self.layout = claim.layout
            fragments = strategy.fragments(self.layout)
            self._num_fragments = len(fragments)
            intake.set_layout(self.layout, fragments)
            self.changed.notify_all()

    def join(self, site: str, hello: wire.Hello) -> wire.Welcome:
        """See `Hub`."""
        with self.changed:
            refusal = self._refusal(site, hello) or self._dispute(site, hello)
            if refusal:
                self._event("rejected", site, refusal)
                return wire.Welcome(refusal=refusal)
            if self._intake is None:
                self.registry.sites[site].heard_s = time.monotonic()
                self.changed.notify_all()
                return wire.Welcome(is_waiting=True, text=self.agreement.waits_for())
            is_known = self.registry.sites[site].session == hello.session
            is_rejoin = self.registry.admit(site, hello.session)
            if self.updates.model is None and self._sender_of_initial in (None, site):
                self._sender_of_initial = site
            versions = list(self.updates.versions)
            self.registry.settle(site, wire.CoordinatorSignal.SEND_INITIAL)  # Welcome says it
            if not is_known:
                self.rejoins += is_rejoin
                verb = "rejoined" if is_rejoin else "joined"
                present = self.updates.version
                at = f" at version {present}" if present else ""
                self.updates.note_back(site, hello.checkpoint)
                self._event("rejoin" if is_rejoin else "join", site, f"{site} {verb}{at}")
            self.changed.notify_all()
            return wire.Welcome(
                versions=versions,
                send_initial=self.updates.model is None and self._sender_of_initial == site,
                is_rejoin=is_rejoin,
                run_step=self.updates.run_step,
            )

    def _dispute(self, site: str, hello: wire.Hello) -> str:
        """What is wrong with a site's claim."""
        try:
            claim = Claim.of(hello)
        except ValueError as error:
            return f"site {site}'s layout cannot be read: {error}"
        if self._sources is not None and json.loads(claim.sources_json or "{}") != self._sources:
            mine = claim._replace(sources_json=json.dumps(dict(self._sources), sort_keys=True))
            return f"site {site}: {mine.difference(claim)}"
        return self.agreement.hear(site, claim)

    def _refusal(self, site: str, hello: wire.Hello) -> str:
        if self.stop_text and self._intake is None:  # else the site hears of it by a signal
            return f"the run is over: {self.stop_text}"
        if site not in self.registry.sites:
            known = ", ".join(self.registry.sites)
            return f"site {site!r} is not in this run, which has {known}; add it to site_names"
        if hello.site != site:
            return (
                f"site calls itself {hello.site!r} but its certificate says {site!r}; "
                "use the identity folder that was issued for it"
            )
        if hello.run_id != self._run_id:
            return f"site is of run {hello.run_id}, this is {self._run_id}; wait for a new ticket"
        if hello.protocol != PROTOCOL:
            return (
                f"site speaks protocol {hello.protocol}, this coordinator {PROTOCOL}; "
                "install the same fedwan on both sides"
            )
        return ""

    def attach(self, site: str, session: str) -> Signals:
        """See `Hub`."""
        with self.changed:
            return self.registry.attach(site, session)

    def heard(self, site: str, signal: wire.SiteSignal) -> None:
        """See `Hub`."""
        with self.changed:
            self.registry.hear(site, signal.session, signal.step)

    def detach(self, site: str, session: str) -> None:
        """See `Hub`."""
        with self.changed:
            self.registry.drop(site, session)

    def report(self, site: str, report: wire.QualityReport) -> None:
        """See `Hub`."""
        with self.changed:
            self.registry.find(site)
            present = self.updates.version
            if report.run_id != self._run_id or report.version > present + 1:
                raise PayloadError(
                    f"report on version {report.version} of run {report.run_id} where run "
                    f"{self._run_id} is at version {present}; refused"
                )
            if not _is_json_object(report.figures_json):
                raise PayloadError("a report's figures are no JSON object of numbers; refused")
            self.registry.settle(site, wire.CoordinatorSignal.EVALUATE)
            self.reports.put((site, report))
            self.changed.notify_all()

    def leave(self, site: str, farewell: wire.Farewell) -> None:
        """See `Hub`."""
        with self.changed:
            entry = self.registry.find(site)
            if entry.session != farewell.session or entry.has_left:
                return
            entry.has_left = True
            self.farewells[site] = farewell
            text = f"{site} left: {farewell.error}" if farewell.error else f"{site} finished"
            self._event("leave", site, text)
            self.changed.notify_all()

    # Uploads -------------------------------------------------------------------------------

    def open_upload(self, site: str, header: wire.UploadHeader) -> Reception | wire.Receipt:
        """See `Hub`."""
        key = Key(header.kind, header.fragment, header.version, site)
        with self.changed:
            self.registry.find(site, header.session)
            if header.run_id != self._run_id:
                raise PayloadError(f"upload is of run {header.run_id}, this is {self._run_id}")
            self._check_key(key)
            settled = self._settled(key)
            if settled is not None:
                if settled.status == wire.Receipt.STALE:
                    self._note_dropped(key)
                return settled
            try:
                if key.kind == wire.UploadHeader.CONTRIBUTION and not header.work.samples:
                    raise PayloadError("it counts no samples, so that it has no weight")
                reception = self.intake.open(key, header)
                if key.kind == wire.UploadHeader.CONTRIBUTION:
                    self.updates.note_arrived(key.fragment, key.version, site, self.registry.sites)
                return reception
            except PayloadError as error:
                return self._rejection(key, str(error))

    def close_stripe(self, site: str, header: wire.UploadHeader) -> wire.Receipt:
        """See `Hub`."""
        key = Key(header.kind, header.fragment, header.version, site)
        with self.changed:
            settled = self._settled(key)
            reception = self.intake.find(key)
            if settled is not None:
                return settled
            if reception is None or reception.header.checksum != header.checksum:
                # Refused, or replaced by other bytes: asking anew tells the site what holds.
                return wire.Receipt(status=wire.Receipt.INCOMPLETE)
        payload = reception.claim()
        if payload is None:
            return wire.Receipt(status=wire.Receipt.INCOMPLETE, missing=reception.missing())
        return self._take_in(key, reception, payload)

    def _take_in(self, key: Key, reception: ChunkedReception, payload: Source) -> wire.Receipt:
        """Check a whole payload, and lay it out for merging unless it was replaced meanwhile."""
        problem = ""
        try:
            norms = self.intake.inspect(key, payload)
        except PayloadError as error:
            norms, problem = {}, str(error)
        except Exception:
            with self.changed:  # never leave it claimed and unchecked: the site would wait for ever
                self._drop(key, reception)
            raise
        header = reception.header
        contribution = Contribution(
            key.site, payload, reception, header.work, norms, header.checksum
        )
        with self.changed:
            if self.intake.find(key) is not reception:
                return self._settled(key) or wire.Receipt(status=wire.Receipt.INCOMPLETE)
            if problem:
                return self._rejection(key, problem)
            settled = self._settled(key)
            if settled is not None:
                self.intake.reject(key)
                return settled
            self.intake.accept(key, contribution)
            if key.kind == wire.UploadHeader.INITIAL:
                self.registry.settle(key.site, wire.CoordinatorSignal.SEND_INITIAL)
            self.changed.notify_all()
            return wire.Receipt(status=wire.Receipt.ACCEPTED)

    def _note_dropped(self, key: Key) -> None:
        """Count a contribution that is too late, once: it may come in stripes, or again."""
        is_merged = self.updates.is_merged(key.fragment, key.site, key.version)
        is_last = self._last_dropped.get((key.fragment, key.site)) == key.version
        if not (is_merged or is_last or self.stop_text):
            self._last_dropped[key.fragment, key.site] = key.version
            self.dropped += 1

    def _drop(self, key: Key, reception: ChunkedReception) -> None:
        if self.intake.find(key) is reception:
            self.intake.reject(key)

    def _check_key(self, key: Key) -> None:
        """Refuse what names nothing that this run has, before anything is kept under it."""
        if key.kind == wire.UploadHeader.INITIAL:
            is_good = key.fragment == key.version == 0
        else:
            is_contribution = key.kind == wire.UploadHeader.CONTRIBUTION
            is_good = is_contribution and key.fragment < self._num_fragments
        if not is_good:
            raise PayloadError(
                f"upload of kind {key.kind} for fragment {key.fragment}, version {key.version} is "
                "none that this run has; start site and coordinator from the same app"
            )

    def _settled(self, key: Key) -> wire.Receipt | None:
        """The receipt for an upload that needs no more bytes, whatever they are."""
        if self.intake.ready(key) is not None:
            return wire.Receipt(status=wire.Receipt.ACCEPTED)
        if key.kind == wire.UploadHeader.INITIAL:
            return wire.Receipt(status=wire.Receipt.ACCEPTED) if self.updates.model else None
        present = self.updates.versions[key.fragment] if self.updates.versions else 0
        if self._max_staleness and self.updates.is_merged(key.fragment, key.site, key.version):
            return wire.Receipt(status=wire.Receipt.ACCEPTED)
        # A site that took the global weights may be ahead of the update that leads to them.
        is_wanted = present - self._max_staleness <= key.version <= present + 1
        if not is_wanted or self.stop_text:
            text = f"version {key.version} is not wanted, the present one is {present}"
            return wire.Receipt(status=wire.Receipt.STALE, text=text)
        return None

    def _rejection(self, key: Key, text: str) -> wire.Receipt:
        self.intake.reject(key)
        self.rejected += 1
        self.refused_since_update += 1
        self.last_refusal = f"contribution of {key.site} refused: {text}"
        self._event("rejected", key.site, self.last_refusal)
        return wire.Receipt(status=wire.Receipt.REJECTED, text=text)

    # Downloads -----------------------------------------------------------------------------

    def download(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """See `Hub`."""
        with self.changed:
            self.registry.find(site)
        if request.run_id != self._run_id:
            raise SessionLost(f"download is of run {request.run_id}, this is {self._run_id}")
        if request.fragment >= max(1, self._num_fragments):
            raise PayloadError(
                f"download of fragment {request.fragment} where there are {self._num_fragments}; "
                "start site and coordinator from the same app"
            )
        return self.updates.fetch(site, request)

    # For the round loop --------------------------------------------------------------------

    def set_model(self, model: GlobalModel, keeps_updates: bool = False) -> None:
        """The global weights are here: contributions can be taken.

        Args:
            model: the global model.
            keeps_updates: past updates stay out, as many as weigh what the weights do, for sites
                that are at different versions.
        """
        with self.changed:
            self.updates.open(model, model.num_bytes() if keeps_updates else 0)
            self.changed.notify_all()

    def initial(self) -> Source | None:
        """The initial weights as uploaded, once they are whole."""
        key = Key(wire.UploadHeader.INITIAL, 0, 0, self._sender_of_initial or "")
        contribution = self.intake.ready(key)
        return contribution.payload if contribution else None

    def reassign_initial(self, lost: Sequence[str]) -> None:
        """Ask a live site for the initial weights if the one that was to send them is lost."""
        with self.changed:
            if self.updates.model is None and self._sender_of_initial in (None, *lost):
                live = self.registry.live()
                self._sender_of_initial = live[0] if live else None
                if self._sender_of_initial:
                    self.registry.tell(self._sender_of_initial, wire.CoordinatorSignal.SEND_INITIAL)

    def withdraw_update(self, fragment: int) -> None:
        """Drop the update that is out; a site that still wants it takes the global weights."""
        with self.changed:
            self.updates.withdraw(fragment)

    def publish(
        self,
        fragment: int,
        version: int,
        payload: Payload,
        merged: Sequence[tuple[str, int]] = (),
        *,
        is_own: bool = False,
    ) -> None:
        """Hand an update out, drop the contributions that made it, and those too late for the next.

        Args:
            fragment: which.
            version: that the update leads to.
            payload: the update.
            merged: sites whose contributions are in it, each with the version that it started from.
            is_own: it is the one contribution in it, bit for bit.
        """
        with self.changed:
            self.refused_since_update = 0
            self.updates.publish(fragment, version, payload, merged, is_own=is_own)
            for site, start in merged:
                self.intake.drop(Key(wire.UploadHeader.CONTRIBUTION, fragment, start, site))
            self.dropped += self.intake.forget(fragment, version - 1 - self._max_staleness)
            self.changed.notify_all()

    def finish(self, text: str, is_complete: bool = False) -> None:
        """Tell every site that the run is over, and whether it has done what it was to do."""
        with self.changed:
            self.stop_text = self.stop_text or text
            self._is_complete = self._is_complete or is_complete
            for name in self.registry.sites:
                self.registry.tell(name, wire.CoordinatorSignal.STOP, text, self._is_complete)
            self.changed.notify_all()


def _is_json_object(text: str) -> bool:
    """Whether a report's figures can be read, and an `fd` among them is a number."""
    try:
        figures = json.loads(text)
    except (ValueError, RecursionError):
        return False
    return isinstance(figures, dict) and isinstance(figures.get("fd", 0.0), int | float)
