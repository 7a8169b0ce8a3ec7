"""Everything a site can ask of the coordinator: parsed, locked, and put to the state machines.

Handler threads of the data plane come in through the `Hub` methods; the run
(`fedwan.coordinator.run`) takes contributions out and puts updates in. One lock guards all, and is
never held while bytes are checked, merged or sent, nor while files are made or closed.
"""

from __future__ import annotations

import threading
import time
from collections import defaultdict
from collections.abc import Callable
from functools import wraps
from queue import SimpleQueue
from typing import Any, TypeVar

from google.protobuf.message import Message

from fedwan.codecs import Payload
from fedwan.codecs.payload import Source
from fedwan.coordinator.intake import Contribution, Intake, Measures, Upload
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Signals
from fedwan.link.buffer import UploadReception
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.protocol.gate import Gate
from fedwan.protocol.limits import Refusals, Report, bound, read_report
from fedwan.protocol.policy import Verdict
from fedwan.protocol.registry import Registry, Verb
from fedwan.protocol.rounds import Key, Merge, Rounds
from fedwan.state import Layout

MAX_WAIT_S = 10.0
"""Longest that a download waits here before the site must ask again."""

CoordinatorRounds = Rounds[Contribution, Payload]
"""The machine with what the coordinator puts in."""

Event = Callable[[str, str | None, str], None]
"""(event, site or None, text)."""

_Versions = tuple[int, ...]
_SNAPSHOTS: dict[int, Callable[[GlobalModel], tuple[Payload, _Versions]]] = {
    wire.DownloadRequest.GLOBAL: GlobalModel.snapshot_global,
    wire.DownloadRequest.EMA: GlobalModel.snapshot_ema,
    wire.DownloadRequest.OUTER: GlobalModel.snapshot_outer,
}
_ACCEPTED = wire.Receipt(status=wire.Receipt.ACCEPTED)
_INCOMPLETE = wire.Receipt(status=wire.Receipt.INCOMPLETE)
M = TypeVar("M", bound=Message)
R = TypeVar("R")


def _bounded(call: Callable[[Servicer, str, M], R]) -> Callable[[Servicer, str, M], R]:
    """Check a message before the call heeds it; tell of what is refused."""

    @wraps(call)
    def checked(self: Servicer, site: str, message: M) -> R:
        try:
            bound(message)
            return call(self, site, message)
        except PayloadError as error:
            self._refuse(site, str(error))
            raise

    return checked


class Servicer:
    """Implements `fedwan.link.base.Hub`."""

    def __init__(
        self,
        run_id: str,
        registry: Registry,
        agreement: Agreement,
        on_event: Event,
        chunk_bytes: int,
    ) -> None:
        self.changed = threading.Condition()
        self.registry = registry
        self.agreement = agreement
        self.reports: SimpleQueue[tuple[str, Report | None]] = SimpleQueue()
        """None is one that was asked for and refused."""
        self.farewells: dict[str, wire.Farewell] = {}
        self.shut_out: dict[str, str] = {}
        """Why the data plane serves a site no more, if it does not."""
        self.rejected = 0
        self.last_refusal = ""
        self.layout: Layout = {}
        self.initial: Source | None = None
        """The initial weights as uploaded, once they are whole."""
        self.model: GlobalModel | None = None
        self.durable_version = 0
        self.stop_text = ""
        """Why the run is over; empty while it is not."""
        self.gate = Gate(0.0, 1)
        """Refuses contributions for their size; this one none."""
        self._run_id = run_id
        self._rounds: CoordinatorRounds | None = None
        self._intake: Intake | None = None
        self._chunk_bytes = chunk_bytes
        self._is_complete = False
        self._keeps_updates = False
        self._event = on_event
        self._refusals: dict[str, Refusals] = defaultdict(Refusals)
        self._began_s = time.monotonic()
        self._snapshots: dict[tuple[str, int], tuple[Payload, _Versions]] = {}
        self._copying = threading.Lock()
        self.deciding = threading.Lock()
        """Held by the operator's decisions, one at a time."""

    # Join, heartbeats, farewell ------------------------------------------------------------

    @property
    def rounds(self) -> CoordinatorRounds:
        """The rounds' state, once the run has begun."""
        if self._rounds is None:
            raise SessionLost("the run has not begun; join first")
        return self._rounds

    @property
    def intake(self) -> Intake:
        """Contributions on their way in, once the run has begun."""
        if self._intake is None:
            raise SessionLost("the run has not begun; join first")
        return self._intake

    def start(
        self,
        layout: Layout,
        rounds: CoordinatorRounds,
        intake: Intake,
        *,
        keeps_updates: bool = False,
    ) -> None:
        """The sites agree: admit them."""
        with self.changed:
            self.layout, self._rounds, self._intake = layout, rounds, intake
            self._keeps_updates = keeps_updates
            rounds.is_over = bool(self.stop_text)
            self._follow()

    def join(self, site: str, hello: wire.Hello) -> wire.Welcome:
        """See `Hub`."""
        try:
            bound(hello)
            claim = Claim.of(hello)  # before the lock
        except PayloadError as error:
            self._refuse(site, f"site {site}'s {error}")
            return wire.Welcome(refusal=f"site {site}'s {error}")
        with self.changed:
            self.registry.check(site)
            rounds, refusal = self._rounds, ""
            if self.stop_text and rounds is None:  # else the site hears of it by a signal
                refusal = f"the run is over: {self.stop_text}"
            refusal = refusal or self.agreement.join(site, hello, claim)
            if refusal:
                self._refuse(site, refusal)
                return wire.Welcome(refusal=refusal)
            now_s = time.monotonic()
            self.shut_out.pop(site, None)
            if rounds is None:
                self.registry.sites[site].heard_s = now_s
                self.changed.notify_all()
                return wire.Welcome(is_waiting=True, text=self.agreement.waits_for())
            is_new = self.registry.admit(site, hello.session, now_s)
            is_rejoin = self.registry.sites[site].joins > 1
            self._follow()
            if is_new:
                rounds.setbacks[site] += is_rejoin
                self.registry.sites[site].checkpoint = hello.checkpoint
                verb = "rejoined" if is_rejoin else "joined"
                at = f" at version {rounds.version}" if rounds.version else ""
                if rounds.is_behind(site, hello.checkpoint):
                    at += ", and takes the steps to it again"
                at += f", certificate {hello.certificate}" if hello.certificate else ""
                why = f"; {hello.error}" if hello.error else ""
                self._event("rejoin" if is_rejoin else "join", site, f"{site} {verb}{at}{why}")
            return wire.Welcome(
                versions=rounds.versions if self.model else [],
                send_initial=self.model is None and self.registry.first == site,
                is_rejoin=is_rejoin,
                run_step=rounds.run_step,
            )

    def attach(self, site: str, session: str) -> Signals:
        """See `Hub`."""
        with self.changed:
            signals = self.registry.attach(site, session, time.monotonic())
            self._note_back(site)
            return signals

    def _note_back(self, site: str) -> None:
        """A process that has joined goes on: the Join was none of a dead one that came late."""
        entry = self.registry.sites[site]
        checkpoint, entry.checkpoint = entry.checkpoint, None
        if checkpoint is not None and self.rounds.note_back(site, checkpoint):
            self._event("warning", site, _older_text(site, checkpoint, self.rounds))

    @_bounded
    def heard(self, site: str, signal: wire.SiteSignal) -> None:
        """See `Hub`."""
        with self.changed:
            self.registry.hear(site, signal.session, signal.step, time.monotonic())

    def detach(self, site: str, session: str) -> None:
        """See `Hub`."""
        with self.changed:
            self.registry.drop(site, session, time.monotonic())

    @_bounded
    def report(self, site: str, report: wire.QualityReport) -> None:
        """See `Hub`."""
        answer, problem = None, ""
        try:
            answer = read_report(report)
        except PayloadError as error:
            problem = str(error)
        with self.changed:
            self.registry.find(site)
            present, version = self.rounds.version, report.version
            if report.run_id != self._run_id or version > present + 1:
                answer = None
                problem = (
                    f"report on version {version} of run {report.run_id} where run {self._run_id} "
                    f"is at version {present}; refused"
                )
            if self.registry.answer(site, version):
                self.reports.put((site, answer))
                self.changed.notify_all()
        if problem:
            raise PayloadError(problem)

    @_bounded
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

    @_bounded
    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception | wire.Receipt:
        """See `Hub`."""
        upload = _upload(site, header)
        self.intake.free()
        with self.changed:
            self.registry.find(site, header.session)
            if header.run_id != self._run_id:
                raise PayloadError(f"upload is of run {header.run_id}, this is {self._run_id}")
            self.intake.check(upload)
            settled = self._settled(upload)
            if settled is not None:
                if settled.status == wire.Receipt.STALE:
                    self.rounds.note_dropped(upload.key)
                return settled
            is_contribution = upload.kind == wire.UploadHeader.CONTRIBUTION
            try:
                if is_contribution:
                    self.rounds.check(upload.key, header.work)
                reception = self.intake.open(upload, header)
            except PayloadError as error:
                return self._rejection(upload, str(error))
            if is_contribution:
                self.rounds.announce(upload.key)
                if self._keeps_updates:
                    # Rounds do not clear them here, and a copy of the average that is out costs
                    # another with every update.
                    for kind in _SNAPSHOTS:
                        self._snapshots.pop((site, kind), None)
            return reception

    @_bounded
    def close_stripe(self, site: str, header: wire.UploadHeader) -> wire.Receipt:
        """See `Hub`."""
        upload = _upload(site, header)
        with self.changed:
            settled = self._settled(upload)
            reception = self.intake.find(upload)
            if settled is not None:
                return settled
            if reception is None or reception.header.checksum != header.checksum:
                # Refused, or replaced by other bytes: asking anew tells the site what holds.
                return _INCOMPLETE
        payload = reception.claim()
        if payload is None:
            return wire.Receipt(status=wire.Receipt.INCOMPLETE, missing=reception.missing())
        return self._take_in(upload, reception, payload)

    def _take_in(self, upload: Upload, reception: UploadReception, payload: Source) -> wire.Receipt:
        """Check a whole payload, and lay it out for merging unless it was replaced meanwhile."""
        problem, measures = "", Measures({}, {})
        try:
            measures = self.intake.inspect(upload, payload)
        except PayloadError as error:
            problem = str(error)
        except Exception:
            with self.changed:  # never leave it claimed and unchecked: the site would wait for ever
                if self.intake.find(upload) is reception:
                    self.intake.close(upload)
            raise
        with self.changed:
            settled = self._settled(upload)
            if self.intake.find(upload) is not reception:
                return settled or _INCOMPLETE
            if not problem and settled is None and upload.kind == wire.UploadHeader.CONTRIBUTION:
                problem = self.gate.objection(upload.key.fragment, measures.figures())
            if problem:
                return self._rejection(upload, problem)
            if settled is not None:
                self.intake.close(upload)
                return settled
            if upload.kind == wire.UploadHeader.INITIAL:
                self.initial, self.registry.opener = payload, upload.key.site
                self.registry.settle(upload.key.site, wire.CoordinatorSignal.SEND_INITIAL)
            else:
                self.intake.take(upload)
                contribution = Contribution(payload, reception, reception.header.work, measures)
                self.rounds.arrive(upload.key, contribution, time.monotonic())
            self._release()
            self.changed.notify_all()
            return _ACCEPTED

    def _settled(self, upload: Upload) -> wire.Receipt | None:
        """The receipt for an upload that needs no more bytes, whatever they are."""
        if upload.kind == wire.UploadHeader.INITIAL:
            is_here = self.model is not None or self.initial is not None
            return _ACCEPTED if is_here else None
        settled = self.rounds.settled(upload.key)
        if settled != "stale":
            return _ACCEPTED if settled else None
        fragment, version, _ = upload.key
        present = self.rounds.versions[fragment]
        text = f"version {version} is not wanted, the present one is {present}"
        return wire.Receipt(status=wire.Receipt.STALE, text=text)

    def _rejection(self, upload: Upload, text: str) -> wire.Receipt:
        site = upload.key.site
        self.intake.close(upload)
        self.rounds.refused[site] += 1
        self.last_refusal = f"contribution of {site} refused: {text}"
        self._refuse(site, self.last_refusal)
        return wire.Receipt(status=wire.Receipt.REJECTED, text=text)

    def refuse(self, site: str, text: str) -> None:
        """See `Hub`; a quorum does not wait for who is refused again and again."""
        with self.changed:
            self.shut_out[site] = text
            if self._rounds is not None:
                self._rounds.setbacks[site] += 1
                self.changed.notify_all()
        self._refuse(site, text)

    def _refuse(self, site: str, text: str) -> None:
        with self.changed:
            self.rejected += 1
            told = self._refusals[site].tell(text, time.monotonic())
        if told:
            self._event("rejected", site, told)

    # Downloads -----------------------------------------------------------------------------

    @_bounded
    def download(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """See `Hub`."""
        with self.changed:
            self.registry.find(site)
            num_fragments = len(self.rounds.versions)
        if request.run_id != self._run_id:
            raise SessionLost(f"download is of run {request.run_id}, this is {self._run_id}")
        if request.fragment >= num_fragments:
            raise PayloadError(
                f"download of fragment {request.fragment} where there are {num_fragments}; "
                "start site and coordinator from the same app"
            )
        if request.kind == wire.DownloadRequest.UPDATE:
            return self._update(site, request)
        if request.kind in _SNAPSHOTS:
            return self._snapshot(site, request)
        raise PayloadError(
            f"download of kind {request.kind} is none that this run has; "
            "start site and coordinator from the same app"
        )

    def _update(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """An update, after waiting up to `wait_s` for it."""
        deadline = time.monotonic() + min(MAX_WAIT_S, request.wait_s)
        fragment = request.fragment
        with self.changed:
            while True:
                self.registry.check(site)
                answer, payload = self.rounds.answer(site, fragment, request.version)
                if payload is not None:
                    return self._ready(site, fragment, request.version, (), payload)
                remaining = deadline - time.monotonic()
                if answer != "wait" or remaining <= 0:
                    break
                self.changed.wait(remaining)
            status = {
                "wait": wire.DownloadHeader.NOT_YET,
                "done": wire.DownloadHeader.DONE,
                "superseded": wire.DownloadHeader.SUPERSEDED,
            }[answer]
            told = self.rounds.tell(site, fragment)._asdict()
            version = self.rounds.versions[fragment]
            return Delivery(wire.DownloadHeader(status=status, version=version, **told), None)

    def _snapshot(self, site: str, request: wire.DownloadRequest) -> Delivery:
        key, held = (site, request.kind), request.held_sha256
        with self.changed:
            model, published = self.model, tuple(self.rounds.versions)
            kept = self._snapshots.get(key) if request.checksum else None
            is_behind = False
            if request.kind == wire.DownloadRequest.GLOBAL:
                self._note_back(site)
                is_behind = bool(request.version) and self.rounds.is_behind(site, request.version)
            told = self.rounds.tell(site, 0)._asdict()
        if model is None:
            return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
        if held and (is_behind or held == model.hash_at(published)):
            versions = (request.version,) if is_behind else published
            status, version = wire.DownloadHeader.HELD, model.version_of(versions)
            header = wire.DownloadHeader(status=status, version=version, versions=versions, **told)
            return Delivery(header, None)
        if is_behind and not kept:
            with self.changed:
                self.rounds.note_back(site, request.version, repeats=False)
                self._event("warning", site, _older_text(site, request.version, self.rounds))
        payload, versions = kept or self._new_snapshot(key, model)
        with self.changed:
            if self._keeps_updates and request.kind == wire.DownloadRequest.GLOBAL:
                # These weights may be committed and not published yet: what the site is told of its
                # contribution must be of the same version, or it would wait for one more.
                self.changed.wait_for(
                    lambda: self.rounds.is_over or self.rounds.versions >= list(versions),
                    MAX_WAIT_S,
                )
            return self._ready(site, 0, model.version_of(versions), versions, payload)

    def _new_snapshot(self, key: tuple[str, int], model: GlobalModel) -> tuple[Payload, _Versions]:
        """For a site: one that another has of the same versions, so that memory stays that of one.

        A copy takes long: one is made at a time, and never under the lock that guards all.
        """
        kind = key[1]
        with self._copying:
            with self.changed:
                versions = tuple(model.versions)
                others = [kept for (_, other), kept in self._snapshots.items() if other == kind]
            same = (kept for kept in others if kept[1] == versions)
            kept = next(same, None) or _SNAPSHOTS[kind](model)
            with self.changed:
                self._snapshots[key] = kept
        return kept

    def _ready(
        self, site: str, fragment: int, version: int, versions: _Versions, payload: Payload
    ) -> Delivery:
        if not fragment:
            self.registry.sites[site].version = version
        header = wire.DownloadHeader(
            status=wire.DownloadHeader.READY,
            version=version,
            versions=versions,
            num_bytes=payload.num_bytes,
            checksum=payload.checksum,
            chunk_bytes=self._chunk_bytes,
            durable_version=self.durable_version,
            **self.rounds.tell(site, fragment)._asdict(),
        )
        return Delivery(header, payload)

    # Membership ----------------------------------------------------------------------------

    def decide(self, verb: Verb, site: str) -> None:
        """The operator has decided on a site, and `Registry.objection` has nothing to say."""
        done: list[Contribution] = []
        with self.changed:
            sending = self._intake.open_of(site) if self._intake else []
            self.registry.decide(verb, site, sending, self._rounds is not None)
            if verb == "eject" and self._intake and self._rounds:
                for upload in sending:
                    self._intake.close(upload, self.registry.refusal(site))
                done = self._rounds.forget(site)
            self._release()
            self._follow()
        for contribution in done:
            contribution.reception.close()

    def survey(self) -> dict[str, Any]:
        """Where the run stands, for whom it waits, and its sites; times in Unix seconds."""
        with self.changed:
            now_s, rounds, registry = time.monotonic(), self._rounds, self.registry
            to_unix = time.time() - now_s
            round_ = rounds.round if rounds else None
            if rounds is None or round_ is None:  # who sends the initial weights is waited for, too
                awaited = [registry.first] if rounds else self.agreement.missing()
            else:
                awaited = rounds.owing(registry.live(now_s))
            sending = [up.key.site for up in self._intake.open_of()] if self._intake else []
            rows = [
                {
                    "site": name,
                    "state": registry.state_of(name, now_s, name in awaited, name in sending),
                    "version": site.version,
                    "heard": site.heard_s + to_unix if site.heard_s else None,
                }
                for name, site in registry.sites.items()
            ]
            return {
                "version": rounds.progress if rounds else 0,
                "since": (round_.began_s if round_ else self._began_s) + to_unix,
                "waits_for": awaited,
                "sites": rows,
            }

    def notice_lost(self) -> tuple[list[str], list[str]]:
        """Sites that have fallen silent since the last call, and those that are heard again."""
        with self.changed:
            lost = self.registry.newly_lost(time.monotonic())
            self._release()
            returned, self.registry.returned = self.registry.returned, []
            return lost, returned

    def _release(self) -> None:
        """Let sites go that have nothing on its way in any more, and were to leave."""
        gone = self.registry.release(self._intake.open_of() if self._intake else ())
        for name in gone if self._rounds else ():
            self._event("leave", name, f"{name} left: it was drained")
        if gone:
            self._follow()

    def _follow(self) -> None:
        """Rounds, and the sites' agreement, follow the registry."""
        self.agreement.expect(self.registry.admitted())
        if self._rounds is not None:
            self._rounds.expect(self.registry.awaited())
        self.changed.notify_all()

    # For the run ---------------------------------------------------------------------------

    def missing_of_initial(self) -> int | None:
        """Chunks that are still on their way, of whichever site has fewest; None if none is."""
        with self.changed:
            kind = wire.UploadHeader.INITIAL
            open_ones = [up for up in self.intake.open_of() if up.kind == kind]
            found = [self.intake.find(upload) for upload in open_ones]
        return min((len(reception.missing()) for reception in found if reception), default=None)

    def refuse_initial(self, text: str) -> None:
        """The initial weights that are here are not those that the sites agreed on."""
        with self.changed:
            site, self.initial = self.registry.opener, None
        self._refuse(site, text)

    def set_model(self, model: GlobalModel) -> None:
        """The global weights are here."""
        with self.changed:
            self.model, self.initial = model, None
            self.changed.notify_all()

    def advance(self) -> tuple[Verdict, list[Merge[Contribution]]]:
        """See `Rounds.advance`."""
        now_s = time.monotonic()
        with self.changed:
            verdict, merges = self.rounds.advance(now_s, len(self.registry.live(now_s)))
            if verdict == "close" and not self._keeps_updates:
                self._snapshots.clear()
            return verdict, merges

    def publish(self, payload: Payload, *, is_own: bool = False) -> None:
        """See `Rounds.publish`; frees the contributions that are done with."""
        with self.changed:
            done = self.rounds.publish(payload, is_own=is_own)
            for key, contribution, _, _ in self.rounds.round.merged if self.rounds.round else ():
                self.gate.note(key.fragment, contribution.measures.figures())
            self.intake.forget(*self.rounds.least_wanted())
            self.changed.notify_all()
        for contribution in done:
            contribution.reception.close()
        self.intake.free()

    def finish(self, text: str, is_complete: bool = False) -> None:
        """Tell every site that the run is over, and whether it has done what it was to do."""
        with self.changed:
            self.stop_text = self.stop_text or text
            self._is_complete = self._is_complete or is_complete
            if self._rounds is not None:
                self._rounds.is_over = True
            for name in self.registry.sites:
                self.registry.tell(name, wire.CoordinatorSignal.STOP, text, self._is_complete)
            self.changed.notify_all()


def _older_text(site: str, checkpoint: int, rounds: CoordinatorRounds) -> str:
    begin = f"go on from version {checkpoint}" if checkpoint else "begin anew"
    return (
        f"{site} has no checkpoint of version {rounds.versions[0]}: its data order and optimisers "
        f"{begin}, which changes the weights that come of it"
    )


def _upload(site: str, header: wire.UploadHeader) -> Upload:
    return Upload(header.kind, Key(header.fragment, header.version, site))
