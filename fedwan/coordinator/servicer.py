"""Everything a site can ask of the coordinator: parsed, locked, and put to the state machines.

Handler threads of the data plane come in through the `Hub` methods; the run
(`fedwan.coordinator.run`) takes contributions out and puts updates in.
"""

# ruff: noqa: D102 (methods are those of `fedwan.link.base.Hub`)

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import wraps
from operator import ge
from queue import SimpleQueue
from typing import Any, TypeVar, cast

from google.protobuf.message import Message

from fedwan.codecs import Payload
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.intake import Contribution, Measures, Upload, check_proof
from fedwan.errors import NotJoined, PayloadError, SessionLost
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery, Proof, Signals
from fedwan.link.buffer import Buffer, FileBuffer, UploadReception
from fedwan.protocol.agreement import Claim
from fedwan.protocol.evidence import statement_of
from fedwan.protocol.gate import overcounted
from fedwan.protocol.limits import Report, bound, read_report
from fedwan.protocol.round import Key

MAX_WAIT_S = 10.0
"""Longest that a download waits here before the site must ask again."""
_WEIGHTS = (wire.DownloadRequest.GLOBAL, wire.DownloadRequest.EMA, wire.DownloadRequest.OUTER)
_ACCEPTED = wire.Receipt(status=wire.Receipt.ACCEPTED)
_INCOMPLETE = wire.Receipt(status=wire.Receipt.INCOMPLETE)
_TOO_OFTEN = "{} has joined too often; it is let in again in a while"
Call = TypeVar("Call", bound=Callable[..., Any])


def _bounded(call: Call) -> Call:
    """Check a message before the call heeds it; tell of what is refused."""

    @wraps(call)
    def checked(self: Servicer, site: str, message: Message, *args: Any, **kwargs: Any) -> Any:
        try:
            bound(message, self.passed_s())
            return call(self, site, message, *args, **kwargs)
        except PayloadError as error:
            self._refuse(site, str(error))
            raise

    return cast(Call, checked)


class Servicer(Federation):
    """Implements `fedwan.link.base.Hub`."""

    # Join, heartbeats, farewell ------------------------------------------------------------

    def join(self, site: str, hello: wire.Hello) -> wire.Welcome:
        try:
            bound(hello, self.passed_s())
            with self.changed:
                self._check_join(site, hello)
                is_known = self.agreement.knows(hello.layout_json)
                if not is_known and not self._joins[site].spend(time.monotonic()):
                    return wire.Welcome(is_waiting=True, text=_TOO_OFTEN.format(site))
            # Until there are weights to take over, its own are what counts.
            checkpoint = hello.checkpoint if self.model else 0
            # Another layout takes long, and much memory: one at a time.
            with nullcontext() if is_known else self._reading:
                claim = self.agreement.claim(Claim.of(hello), checkpoint)
                objection = self.agreement.objection(site, claim)
            if self.masking and (problem := self.masking.objection(site, hello.card)):
                raise PayloadError(problem)
        except PayloadError as error:
            self._refuse(site, f"site {site}'s {error}")
            return wire.Welcome(refusal=f"site {site}'s {error}")
        with self.changed:
            self._check_join(site, hello)
            rounds, refusal = self._rounds, ""
            if self.masking:
                refusal = self.masking.conflict(site, hello.card)
            refusal = refusal or self.agreement.join(site, hello, claim, objection)
            if refusal:
                self._refuse(site, refusal)
                return wire.Welcome(refusal=refusal)
            if self.masking:
                self.masking.keep(site, hello.card)
            now_s = time.monotonic()
            self.shut_out.pop(site, None)
            if rounds is None:
                self.registry.sites[site].heard_s = now_s
                self.changed.notify_all()
                return wire.Welcome(is_waiting=True, text=self.agreement.waits_for())
            if hello.is_bound and list(hello.held_versions) != list(rounds.versions):
                raise NotJoined(f"site {site!r} is at other versions than the run; join first")
            is_other = self.registry.sites[site].session != hello.session
            if is_other and not self._joins[site].spend(now_s):
                return wire.Welcome(is_waiting=True, text=_TOO_OFTEN.format(site))
            is_new = self.registry.admit(site, hello.session, now_s)
            self._follow()
            if is_new:
                self._note_join(site, hello)
            return wire.Welcome(
                versions=rounds.versions if self.model else [],
                send_initial=self.model is None and self.registry.first == site,
                run_step=rounds.run_step,
                start=self.start_id,
                **(self.masking.welcome() if self.masking else {}),
            )

    def _check_join(self, site: str, hello: wire.Hello) -> None:
        """Send a site away that may not join; what is no fault of its gets it another ticket.

        First of all one of another run, which somebody on the path may have led here: what it is
        told of its standing would be final.
        """
        if hello.run_id != self._run_id:
            raise SessionLost(f"site is of run {hello.run_id}, this is {self._run_id}")
        self.registry.check(site)
        if hello.config_sha256 != self._config_sha256:
            raise NotJoined("the run was started again with other settings; join first")
        if self.stop_text and self._rounds is None:  # else the site hears of it by a signal
            raise SessionLost(f"the run is over: {self.stop_text}")

    def _note_join(self, site: str, hello: wire.Hello) -> None:
        """A process has been let in."""
        rounds, entry = self.rounds, self.registry.sites[site]
        is_rejoin = entry.joins > 1
        rounds.setbacks[site] += is_rejoin
        entry.checkpoint, entry.lives_on = hello.checkpoint, bool(hello.held_versions)
        verb = "rejoined" if is_rejoin else "joined"
        at = f" at version {rounds.version}" if rounds.version else ""
        if rounds.is_behind(site, hello.checkpoint):
            at += ", and takes the steps to it again"
        why = f"; {hello.error}" if hello.error else ""
        proof = {"certificate": hello.certificate.decode()} if hello.certificate else {}
        self._certificates[site] = hello.certificate
        self.event("rejoin" if is_rejoin else "join", site, f"{site} {verb}{at}{why}", **proof)

    def attach(self, site: str, session: str) -> Signals:
        signals: Signals = SimpleQueue()
        with self.changed:
            self.registry.attach(site, session, signals, time.monotonic())
            self._note_back(site)
        return signals

    def _note_back(self, site: str) -> None:
        """A process that has joined goes on: the Join was none of a dead one that came late."""
        entry = self.registry.sites[site]
        checkpoint, entry.checkpoint = entry.checkpoint, None
        if checkpoint is None:
            return
        if self.rounds.note_back(site, checkpoint) and not entry.lives_on:
            self._warn_of_older(site, checkpoint)

    def _note_lost(self, site: str, version: int) -> None:
        """A process cannot take the steps of the last round again; once for each version."""
        entry = self.registry.sites[site]
        if entry.lost != version:
            entry.lost = version
            self.rounds.note_back(site, version, repeats=False)
            self._warn_of_older(site, version)

    def _warn_of_older(self, site: str, checkpoint: int) -> None:
        """What a site goes on from; and where all begin anew, should the coordinator die now."""
        begin = f"go on from version {checkpoint}" if checkpoint else "begin anew"
        text = (
            f"{site} has no checkpoint of version {self.rounds.versions[0]}: its data order and "
            f"optimisers {begin}, which changes the weights that come of it"
        )
        self.event("warning", site, text, anew_from=list(self.rounds.anew_from))

    @_bounded
    def heard(self, site: str, signal: wire.SiteSignal) -> None:
        with self.changed:
            self.registry.hear(site, signal.session, signal.step, time.monotonic())

    def detach(self, site: str, session: str) -> None:
        with self.changed:
            self.registry.drop(site, session)

    @_bounded
    def report(self, site: str, report: wire.QualityReport) -> None:
        answer: Report | None = None
        try:
            answer, problem = read_report(report)
        except PayloadError as error:
            problem = str(error)
        with self.changed:
            if report.run_id == self._run_id:
                self.registry.find(site)
            present, version = self.rounds.version, report.version
            if report.run_id != self._run_id or version > present + 1:
                answer = None
                problem = (
                    f"report on version {version} of run {report.run_id} where run {self._run_id} "
                    f"is at version {present}; refused"
                )
            if report.run_id == self._run_id and self.registry.answer(site, version):
                self.evaluation.hear(site, answer)
                self.changed.notify_all()
        if problem:
            raise PayloadError(problem)

    @_bounded
    def unmask(self, site: str, answer: wire.Unmasked) -> None:
        with self.changed:
            self.registry.find(site)
            if self.masking:
                self.masking.hear(site, answer)
                self.changed.notify_all()

    @_bounded
    def leave(self, site: str, farewell: wire.Farewell) -> None:
        with self.changed:
            entry = self.registry.find(site)
            if entry.session != farewell.session or entry.has_left:
                return
            entry.has_left = True
            self._snapshots.clear(site)
            self.farewells[site] = farewell
            text = f"{site} left: {farewell.error}" if farewell.error else f"{site} finished"
            self.event("leave", site, text, **self.unmerge(farewell.work))
            self.changed.notify_all()

    # Uploads -------------------------------------------------------------------------------

    @_bounded
    def open_upload(self, site: str, header: wire.UploadHeader) -> UploadReception | wire.Receipt:
        upload = _upload(site, header)
        if not self.masking:
            header.ClearField("bundle")  # which nobody bounds
        header = copy.deepcopy(header)  # what was cleared would stay in memory with the other
        self.intake.free()
        with self.changed:
            self.registry.find(site, header.session)
            self._note_back(site)  # before its stream is there, maybe
            if header.run_id != self._run_id:
                raise PayloadError(f"upload is of run {header.run_id}, this is {self._run_id}")
            self.intake.check(upload)
            settled = self._settled(upload, header.work)
            if settled is not None:
                return settled
            is_contribution = upload.kind == wire.UploadHeader.CONTRIBUTION
            try:
                if upload.kind == wire.UploadHeader.INITIAL and site in self.false_openers:
                    raise PayloadError(f"other initial weights of {site} were refused before")
                if is_contribution:
                    self.rounds.check(upload.key, header.work)
                    if self.masking:
                        weights = self.model.known_hash(*upload.key[:2]) if self.model else ""
                        self.masking.check(upload.key, header.bundle, weights)
                reception = self.intake.open(upload, header)
            except PayloadError as error:
                return self._rejection(upload, header, str(error))
            if is_contribution:
                self.rounds.announce(upload.key, time.monotonic())
                if self.rounds.updates.keeps_past:
                    # Rounds do not clear them here, and a copy of the average that is out costs
                    # another with every update.
                    self._snapshots.clear(site)
            return reception

    @_bounded
    def close_stripe(
        self, site: str, header: wire.UploadHeader, proof: Proof | None = None
    ) -> wire.Receipt:
        upload = _upload(site, header)
        with self.changed:
            settled = self._settled(upload, header.work)
            reception = self.intake.find(upload)
            if settled is not None:
                return settled
            if reception is None or reception.header.checksum != header.checksum:
                # Refused, or replaced by other bytes: asking anew tells the site what holds.
                return _INCOMPLETE
            if upload.kind == wire.UploadHeader.INITIAL and self.initial is not None:
                return _INCOMPLETE  # another site's are looked at: whole ones are asked for again
        payload = reception.claim()
        if payload is None:
            return wire.Receipt(status=wire.Receipt.INCOMPLETE, missing=reception.missing())
        # Check the whole payload, and lay it out for merging unless it was replaced meanwhile.
        payload_hash = reception.hashes.payload()
        measures, problem = self._inspect(upload, reception, payload, payload_hash, proof)
        with self.changed:
            settled = self._settled(upload, header.work)
            if self.intake.find(upload) is not reception:
                return settled or _INCOMPLETE
            if not problem and settled is None and upload.kind == wire.UploadHeader.CONTRIBUTION:
                figures = measures.figures()
                problem = self.overcounted(upload.key.fragment, figures)
                problem = problem or self.oversized(upload.key, figures)
            if problem:
                return self._rejection(upload, header, problem)
            if settled is not None:
                self.intake.close(upload)
                return settled
            if upload.kind == wire.UploadHeader.INITIAL and self.initial is not None:
                reception.give_back()  # another site's came meanwhile
                return _INCOMPLETE
            if upload.kind == wire.UploadHeader.INITIAL:
                self.initial, self.registry.opener = (site, payload), site
                self.registry.settle(upload.key.site, wire.CoordinatorSignal.SEND_INITIAL)
            else:
                self.intake.take(upload)
                work = reception.header.work
                bundle = reception.header.bundle if self.masking else None
                signature = proof.signature if proof else b""
                contribution = Contribution(
                    payload, work, measures, payload_hash, signature, bundle
                )
                if proof:
                    self._note_certificate(site, proof.certificate)
                self.rounds.arrive(upload.key, contribution, time.monotonic())
            self._release()
            self.changed.notify_all()
            return _ACCEPTED

    def _inspect(
        self,
        upload: Upload,
        reception: UploadReception,
        payload: Buffer | FileBuffer,
        payload_hash: str,
        proof: Proof | None,
    ) -> tuple[Measures, str]:
        """What a whole payload measures, or what is wrong with it or its signature; no lock."""
        try:
            if proof and upload.kind == wire.UploadHeader.CONTRIBUTION:
                check_proof(proof, statement_of(reception.header, upload.key.site, payload_hash))
            return self.intake.inspect(upload, payload), ""
        except PayloadError as error:
            return Measures({}, {}), str(error)
        except Exception:
            with self.changed:  # never leave it claimed and unchecked: the site would wait for ever
                if self.intake.find(upload) is reception:
                    self.intake.close(upload)
            raise

    def _note_certificate(self, site: str, certificate: bytes) -> None:
        """Tell of one that no Join has shown: the site's identity was renewed."""
        if self._certificates.get(site) != certificate:
            self._certificates[site] = certificate
            text = f"{site} shows another certificate"
            self.event("renewed", site, text, certificate=certificate.decode())

    def _settled(self, upload: Upload, work: wire.Work) -> wire.Receipt | None:
        """The receipt for an upload that needs no more bytes, whatever they are."""
        if upload.kind == wire.UploadHeader.INITIAL:
            return _ACCEPTED if self.model is not None else None
        settled = self.rounds.settled(upload.key)
        if settled != "stale":
            return _ACCEPTED if settled else None
        fragment, version, site = upload.key
        present = self.rounds.versions[fragment]
        now_s = time.monotonic()
        if self.rounds.note_dropped(upload.key, work, now_s):
            late = f"{site}'s contribution to version {version} is dropped, it came at {present}"
            self.event("late", site, late, **self.unmerge(work))
        text = f"version {version} is not wanted, the present one is {present}"
        step = self.rounds.others_step(now_s, site)
        return wire.Receipt(status=wire.Receipt.STALE, text=text, others_step=step)

    def overcounted(self, fragment: int, figures: Mapping[str, float]) -> str:
        """See `fedwan.protocol.gate.overcounted`; nothing before the weights are here."""
        present = self.model.counters(fragment) if self.model else {}
        return overcounted(figures, present, self.rounds.most_counted(fragment))

    def _rejection(self, upload: Upload, header: wire.UploadHeader, text: str) -> wire.Receipt:
        """Counted once, however often a site sends it whose receipt is lost on the way."""
        key, mark = upload.key, _mark(header, text)
        self.intake.close(upload)
        if self._last_refused.get((key.site, key.fragment)) != mark:
            self._last_refused[key.site, key.fragment] = mark
            self.refuse_contribution(key, text, header.work)
        return wire.Receipt(status=wire.Receipt.REJECTED, text=text)

    def refuse(self, site: str, text: str) -> None:
        """See `Hub`; a quorum does not wait for who is refused again and again.

        Unless the site is there: then it was somebody with an identity of its that holds no more.
        """
        with self.changed:
            if site:
                self.shut_out[site] = text
            if site and self._rounds is not None and site not in self.live():
                self._rounds.setbacks[site] += 1
                self.changed.notify_all()
        self._refuse(site, text)

    # Downloads -----------------------------------------------------------------------------

    @_bounded
    def download(self, site: str, request: wire.DownloadRequest) -> Delivery:
        if request.run_id != self._run_id:
            raise SessionLost(f"download is of run {request.run_id}, this is {self._run_id}")
        with self.changed:
            self.registry.find(site)
            num_fragments = len(self.rounds.versions)
        if request.fragment >= num_fragments:
            raise PayloadError(
                f"download of fragment {request.fragment} where there are {num_fragments}; "
                "start site and coordinator from the same app"
            )
        if request.kind == wire.DownloadRequest.UPDATE:
            return self._update(site, request)
        if request.kind in _WEIGHTS:
            return self._snapshot(site, request)
        raise PayloadError(
            f"download of kind {request.kind} is none that this run has; "
            "start site and coordinator from the same app"
        )

    def _update(self, site: str, request: wire.DownloadRequest) -> Delivery:
        """An update, after waiting up to `wait_s` for it."""
        deadline = time.monotonic() + min(MAX_WAIT_S, request.wait_s)
        fragment, waits = request.fragment, request.wait_s > 0
        with self.changed:
            while True:
                self.registry.check(site)
                status, payload = self.rounds.answer(site, fragment, request.version, waits=waits)
                if payload is not None:
                    return self._ready(site, fragment, request.version, (), payload)
                unmasking = self.masking.present if self.masking else None
                if unmasking and (asked := unmasking.question(site, fragment, request.version)):
                    status = wire.DownloadHeader.UNMASK
                    return Delivery(wire.DownloadHeader(status=status, unmask=asked), None)
                remaining = deadline - time.monotonic()
                if status != wire.DownloadHeader.NOT_YET or remaining <= 0:
                    break
                self.changed.wait(remaining)
            version = self.rounds.versions[fragment]
            return Delivery(self.rounds.tell(site, fragment, status=status, version=version), None)

    def _snapshot(self, site: str, request: wire.DownloadRequest) -> Delivery:
        kind, held, holds = request.kind, request.held_sha256, list(request.held_versions)
        with self.changed:
            model, published = self.model, tuple(self.rounds.versions)
            can_follow = holds != list(published) and self.rounds.updates.lead(holds, published)
            kept = self._snapshots.find(site, kind) if request.checksum else None
            is_behind = False
            if kind == wire.DownloadRequest.GLOBAL:
                self._note_back(site)
                is_behind = bool(request.version) and self.rounds.is_behind(
                    site, request.version - 1
                )
            step = self.rounds.others_step(time.monotonic(), site)
            told = self.rounds.tell(site, 0, status=wire.DownloadHeader.HELD, others_step=step)
        if model is None:
            return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
        if can_follow:
            told.status = wire.DownloadHeader.BEHIND
            told.versions.extend(published)
            return Delivery(told, None)
        if held and (is_behind or held == model.hash_at(published)):
            told.versions.extend((request.version - 1,) if is_behind else published)
            told.version = model.version_of(told.versions)
            told.sizes = self._sizes(enumerate(told.versions))
            return Delivery(told, None)
        if is_behind and not kept:
            with self.changed:
                self._note_lost(site, request.version - 1)
        if (kept := kept or self._snapshots.take(site, kind, model)) is None:
            return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
        payload, versions = kept
        with self.changed:
            # These weights may be committed and not published yet, or not be on disk, where privacy
            # needs that. Also, what a site is told of its contribution must be of the same version,
            # or it would wait for one more.
            def is_published() -> bool:
                return all(map(ge, self.rounds.versions, versions))

            self.changed.wait_for(lambda: self.rounds.is_over or is_published(), MAX_WAIT_S)
            if not is_published():
                if self.rounds.is_over:
                    raise SessionLost(f"the run is over: {self.stop_text}")
                return Delivery(wire.DownloadHeader(status=wire.DownloadHeader.NOT_YET), None)
            return self._ready(site, 0, model.version_of(versions), versions, payload)

    def _ready(
        self, site: str, fragment: int, version: int, versions: tuple[int, ...], payload: Payload
    ) -> Delivery:
        if not fragment:
            self.registry.sites[site].version = version
        header = self.rounds.tell(
            site,
            fragment,
            status=wire.DownloadHeader.READY,
            version=version,
            versions=versions,
            num_bytes=payload.num_bytes,
            checksum=payload.checksum,
            chunk_bytes=self._chunk_bytes,
            durable_version=self.durable_version,
            sizes=self._sizes(enumerate(versions) if versions else [(fragment, version)]),
        )
        return Delivery(header, payload)

    def _sizes(self, keys: Iterable[tuple[int, int]]) -> bytes:
        """What sites round by, of fragments at versions; nothing without masks."""
        return b"".join(self.masking.sizes(*key) for key in keys) if self.masking else b""


def _mark(header: wire.UploadHeader, text: str) -> tuple[object, ...]:
    """The same where a site sends again what was refused for this reason, and of no other one."""
    work = header.work.SerializeToString(deterministic=True)
    return header.session, header.kind, header.version, header.checksum, work, text


def _upload(site: str, header: wire.UploadHeader) -> Upload:
    return Upload(header.kind, Key(header.fragment, header.version, site))
