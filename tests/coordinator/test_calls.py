"""Calls of sites in any order, decisions of the operator, rounds and time: what holds after each.

`python -m benchmarks fuzz --only calls` has hypothesis make many more of the same sequences.
"""

from __future__ import annotations

import functools
from collections import Counter, defaultdict
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fedwan import outer
from fedwan.codecs import Codec, Payload, Reading, fp32, int4, int8
from fedwan.codecs.masked import KeyStreams, bind, first_sizes, masked
from fedwan.codecs.payload import checksum_of
from fedwan.coordinator import federation, servicer
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.masked import MaskedMerger, key_streams
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.quality import find
from fedwan.coordinator.server_step import step_outer
from fedwan.coordinator.servicer import CoordinatorRounds, Servicer
from fedwan.errors import FedwanError
from fedwan.fragments import Fragmentation, strided, whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL
from fedwan.protocol.agreement import Agreement
from fedwan.protocol.gate import Gate
from fedwan.protocol.policy import RoundPolicy, barrier
from fedwan.protocol.registry import KEPT_SESSIONS, Registry
from fedwan.protocol.round import Key, Merge
from fedwan.protocol.unmasking import Unmasking, hash_of
from fedwan.state import Layout, hash_state, layout_to_json
from fedwan.strategy import Strategy
from tests.planes import RUN, SITES
from tests.support import read_all, spec

CHUNK = 1 << 10
BATCH, H, VERSIONS = 4, 2, 4
AGAIN = 100
COUNTS: Counter[str] = Counter()
"""Calls of all sequences, and those that were refused."""


class Setup(NamedTuple):
    """A way to train together; contributions of a fragment have three chunks."""

    policy: RoundPolicy
    up: Codec
    num_values: int
    cut: Fragmentation = whole
    clock: Literal["versions", "samples"] = "versions"

    @property
    def layout(self) -> Layout:
        return {f"net/{name}.weight": spec((self.num_values,)) for name in "ab"}


SETUPS = {
    "barrier": Setup(barrier(3, patience_s=60.0), fp32(), 300),
    "late": Setup(barrier(3, 2, 60.0, 1, has_deadline=True), int4(), 5000, strided(2, H)),
    "arrivals": Setup(RoundPolicy(3, 1, 60.0, False, 2, 0.5, 1), int8(), 1200, whole, "samples"),
    "masked": Setup(barrier(3, 2, 60.0), masked(4, 3), 1800),
}
KEYS = {site: Ed25519PrivateKey.generate() for site in SITES}
SEEDS = {site: [bytes([ord(site[1]), n] * 8) for n in range(3)] for site in SITES}
"""Of its own mask, and of those with the others."""


@functools.cache
def contribution(setup: str, fragment: int, what: str) -> Payload:
    """Of small values, large ones, or some that are not finite; under masks nobody can tell."""
    given = SETUPS[setup]
    layout = given.cut(given.layout)[fragment].layout
    value = 0.0 if given.up.mask_bits else {"large": 1e17, "nan": float("nan")}.get(what, 0.0)
    rng = torch.Generator().manual_seed(len(what))
    values = {n: torch.randn(s.shape, generator=rng) + value for n, s in layout.items()}
    up = given.up
    if up.mask_bits:
        sizes = memoryview(first_sizes(layout)).cast("H").tolist()
        up = bind(up, len(SITES), sizes, KeyStreams([bytes(16)]))
    return up.encode(values, {}, layout)[0]


@functools.cache
def shares(owner: str, number: int) -> dict[int, bytes]:
    """Of a seed, by who has it."""
    return dict(Shamir.split(2, len(SITES), SEEDS[owner][number], ssss=False))


class Clock:
    """Passes when it is told to, and while the coordinator waits."""

    def __init__(self) -> None:
        self.now_s = 1000.0

    def wait(self, timeout: float | None = None) -> bool:
        self.now_s += timeout or 0.0
        return True


sites = st.sampled_from((*SITES, "s4"))  # the last has a certificate, and is not in the run
sessions = st.sampled_from(("own", "own", "own", "a", "b", "c"))
near = st.integers(-2, 2)


class Calls(RuleBasedStateMachine):
    """A coordinator, and what a reader of docs/wire.md would expect of it."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), has_begun=st.booleans())
    def begin(self, name: str, has_begun: bool) -> None:
        self.name, self.setup, self.clock = name, SETUPS[name], Clock()
        now = SimpleNamespace(monotonic=lambda: self.clock.now_s, time=lambda: self.clock.now_s)
        self.patches = [patch.object(module, "time", now) for module in (federation, servicer)]
        for each in self.patches:
            each.start()
        self.layout = self.setup.layout
        self.weights = {n: torch.zeros(s.shape) for n, s in self.layout.items()}
        step = step_outer({"net": outer.sgd(lr=1.0)})
        given = (self.setup.cut, step, self.setup.up, fp32(), self.setup.policy)
        self.strategy = Strategy("delta", H, *given, clock=self.setup.clock)
        self.registry = Registry(SITES, 20.0)
        self.told: Counter[str | None] = Counter()
        self.hub = Servicer(RUN, self.registry, Agreement(SITES, 3), self._note, CHUNK)
        self.hub.changed.wait = self.clock.wait  # type: ignore[method-assign]
        self.hub.gate = Gate(0.0 if self.setup.up.mask_bits else 20.0, 3)
        self.hub.masking = Masking(RUN, SITES, 2) if self.setup.up.mask_bits else None
        self.session = dict.fromkeys((*SITES, "s4"), "")
        self.past: set[str] = set()
        """Sessions that were replaced, or have left."""
        self.open: dict[str, tuple[wire.UploadHeader, Payload, Any]] = {}
        self.sent: dict[Key, set[int]] = defaultdict(set)
        self.accepted: set[Key] = set()
        self.merged: set[Key] = set()
        self.published: dict[tuple[int, int], Payload] = {}
        self.asked: set[str] = set()
        self.latest: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        if has_begun:
            for site in SITES:
                self.join(site, "a", "")
            self.turn()
            for site in SITES:
                self.join(site, "a", "")
            self.hub.set_model(self._model())
            self.turn()

    def teardown(self) -> None:
        for each in getattr(self, "patches", ()):
            each.stop()

    def _note(self, event: str, site: str | None, text: str, **details: Any) -> None:
        assert text.isprintable() and len(text) < 1200
        self.told[site] += 1

    def _model(self) -> GlobalModel:
        return GlobalModel(dict(self.weights), self.layout, self.strategy, 1e3)

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """What comes of a call: an answer, or an error of the tree."""
        COUNTS["cases"] += 1
        try:
            return call(*args)
        except FedwanError as error:
            COUNTS["refused"] += 1
            assert str(error).isprintable() and len(str(error)) < 1200
            return error

    def _do(self, what: Callable[..., Any], *args: Any) -> Any:
        self.latest = [*self.latest[-1:], (what, args)]
        found = what(*args)
        self._hold()
        return found

    def _hold(self) -> None:
        """What a site can have the coordinator keep and tell is bounded."""
        hub = self.hub
        hub.survey()
        for site, entry in self.registry.sites.items():
            assert len(entry.replaced) <= KEPT_SESSIONS and len(entry.owed) <= 5
            assert self.told[site] < 60 + (self.clock.now_s - 1000.0) / 5, self.told
            if hub._intake is not None:
                most = len(self.strategy.fragments(self.layout)) * (
                    3 + self.setup.policy.max_staleness
                )
                whole = [k for kept in hub.rounds._whole for k in kept if k[1] == site]
                assert len(hub.intake.open_of(site)) + len(whole) <= most
            assert entry.session == self.session[site]
        assert self.told["s4"] + self.told[None] < 60 + (self.clock.now_s - 1000.0) / 5

    # The coordinator's own -------------------------------------------------------------------

    @rule()
    def turn(self) -> None:
        """The round loop comes round."""
        hub = self.hub
        hub.notice()
        if hub.stop_text:
            return
        if hub._rounds is None:
            if hub.agreement.agreed:
                self._start()
        elif hub.model is None:
            self._open()
        else:
            try:
                self._round(hub.rounds, hub.model)
            except FedwanError as error:
                hub.finish(str(error))
        self._hold()

    def _start(self) -> None:
        self.fragments = self.strategy.fragments(self.layout)
        if self.hub.masking:
            self.hub.masking.begin(self.layout, self.fragments, None)
        rounds = CoordinatorRounds(self.strategy, self.fragments, SITES, VERSIONS, BATCH)
        up = self.setup.up
        self.mergers = [
            MaskedMerger(f.layout, up, 3) if up.mask_bits else Merger(f.layout)
            for f in self.fragments
        ]
        self.hub.start(rounds, Intake(self.layout, self.fragments, up, Path("spool")))

    def _open(self) -> None:
        hub = self.hub
        hub.registry.replace_first(hub.notice(), self.clock.now_s)
        if (payload := hub.initial) is not None:
            initial = fp32().decode(payload, whole(self.layout)[0].layout)
            if hash_state(initial) == hash_state(self.weights):
                hub.set_model(self._model())
            else:
                hub.refuse_initial("another hash")

    def _round(self, rounds: CoordinatorRounds, model: GlobalModel) -> None:
        hub = self.hub
        if rounds.is_done:
            hub.finish("the run is complete", is_complete=True)
            return
        if (
            rounds.round is None
            or rounds.round.version < model.versions[rounds.round.fragment.index]
        ):
            rounds.begin(self.clock.now_s)
        assert (present := rounds.round) is not None
        fragment, version = present.fragment, present.version
        merger = self.mergers[fragment.index]
        if not present.is_closed:
            verdict, merges = hub.advance()
            for merge in merges:
                self._check(merge)
                reading = Reading(self.setup.up, merge.contribution.payload, fragment.layout)
                merger.add(reading, merge.contribution.work.samples / rounds.nominal, merge.scale)
            if verdict == "stop":
                hub.finish("nobody came")
            if verdict != "close":
                return
            due = {key for key in self.accepted if key[:2] == (fragment.index, version)}
            assert present.is_on_arrival or due <= {merge.key for merge in present.merged}
        if hub.masking:
            bundles = {m.key.site: m.contribution.bundle for m in present.merged}
            if hub.masking.present is None:
                basis = hub.masking.basis(fragment.index, version, model.hash_of(fragment))
                asked = (SITES, 2, fragment.index, version, basis, bundles)
                hub.masking.present = Unmasking(*asked)
            if (masks := key_streams(hub.masking.present, SITES, bundles)) is None:
                return
            hub.masking.present = None
            merged, following = merger.open(masks, hub.masking.sizes.of(fragment.index, version))
            hub.masking.sizes.set(fragment.index, version + 1, following)
        else:
            merged = merger.take()
        payload = model.commit(fragment, merged, present.samples, rounds.times(), rounds.run_step)
        hub.publish(payload)
        assert rounds.versions == model.versions and model.versions[fragment.index] == version + 1
        assert all(bool(value.isfinite().all()) for value in model.state.values())
        self.published[fragment.index, version + 1] = payload

    def _check(self, merge: Merge[Contribution]) -> None:
        """A contribution is merged once, as its site has sent it, and is fit to be."""
        assert merge.key not in self.merged
        self.merged.add(merge.key)
        assert self.registry.sites[merge.key.site].standing != "ejected"
        assert checksum_of(merge.contribution.payload) in self.sent[merge.key]

    @rule(seconds=st.sampled_from((1.0, 15.0, 70.0, 1000.0)))
    def time_passes(self, seconds: float) -> None:
        self.clock.now_s += seconds
        self.hub.notice()

    @rule(site=st.sampled_from(SITES), verb=st.sampled_from(("drain", "eject", "admit", "admit")))
    def decide(self, site: str, verb: Any) -> None:
        """The operator does."""
        if self.registry.objection(verb, site):
            return
        self.hub.decide(verb, site)
        if verb == "eject":
            self.accepted = {key for key in self.accepted if key.site != site or key in self.merged}
        if not self.registry.sites[site].session:
            self.past.add(self.session[site])
            self.session[site] = ""
        self._hold()

    @precondition(lambda self: self.hub.model is not None)
    @rule()
    def ask_quality(self) -> None:
        hub, kind = self.hub, wire.CoordinatorSignal.EVALUATE
        for site in hub.evaluation.choose(hub.live(), hub.rounds.latest):
            hub.registry.tell(site, kind, version=hub.rounds.version)
            self.asked.add(site)

    @precondition(lambda self: self.hub.model is not None and sum(self.told.values()) > 12)
    @rule()
    def stop(self) -> None:
        self.hub.finish("the operator stops it")

    @precondition(lambda self: bool(self.latest))
    @rule()
    def again(self) -> None:
        """A site repeats what was asked last, one call or two."""
        for what, args in self.latest * AGAIN:
            what(*args)
        self._hold()

    # What sites ask --------------------------------------------------------------------------

    def _session(self, site: str, session: str) -> str:
        return self.session[site] if session == "own" else f"{site}-{session}"

    @rule(
        site=sites,
        session=sessions,
        wrong=st.sampled_from(
            (
                "",
                "",
                "",
                "run_id",
                "site",
                "protocol",
                "layout_json",
                "initial_sha256",
                "checkpoint",
            )
        ),
    )
    def join(self, site: str, session: str, wrong: str) -> None:
        self._do(self._join, site, self._session(site, session), wrong)

    def _join(self, site: str, session: str, wrong: str) -> None:
        hello = wire.Hello(
            run_id=RUN,
            protocol=PROTOCOL,
            site=site,
            session=session,
            layout_json=layout_to_json(self.layout),
            initial_sha256=hash_state(self.weights),
            frozen_sha256=hash_state({}),
        )
        if self.hub.masking and site in KEYS:
            key = KEYS[site].public_key().public_bytes_raw()
            exchange = bytes([9]) + bytes(31)
            hello.card.CopyFrom(wire.MaskCard(site=site, exchange_key=exchange, signing_key=key))
        if wrong:
            setattr(hello, wrong, 1 if wrong in ("protocol", "checkpoint") else "other")
        found = self._ask(self.hub.join, site, hello)
        if isinstance(found, FedwanError) or found.refusal or found.is_waiting:
            return
        assert site in SITES and wrong in ("", "checkpoint") and session not in self.past
        if self.session[site] != session:
            self.past.add(self.session[site])
        self.session[site] = session
        assert list(found.versions) == (self.hub.rounds.versions if self.hub.model else [])

    @rule(
        site=sites, session=sessions, what=st.sampled_from(("attach", "hear", "detach", "refuse"))
    )
    def control(self, site: str, session: str, what: str) -> None:
        self._do(self._control, site, self._session(site, session), what)

    def _control(self, site: str, session: str, what: str) -> None:
        if what == "attach":
            found = self._ask(self.hub.attach, site, session)
            assert isinstance(found, FedwanError) or (
                session == self.session[site] and found.qsize() <= 5
            )
        elif what == "hear":
            self._ask(self.hub.heard, site, wire.SiteSignal(session=session, step=2**50))
        elif what == "detach":
            self._ask(self.hub.detach, site, session)
        else:
            self._ask(self.hub.refuse, site, "its certificate has expired")

    def _header(
        self, site: str, session: str, fragment: int, off: int, what: str, wrong: str
    ) -> tuple[wire.UploadHeader, Payload]:
        versions = self.hub._rounds.versions if self.hub._rounds else [0]
        fragment = min(fragment, len(versions))
        version = max(0, versions[min(fragment, len(versions) - 1)] + off)
        kind = wire.UploadHeader.INITIAL if wrong == "initial" else wire.UploadHeader.CONTRIBUTION
        payload = contribution(self.name, min(fragment, len(versions) - 1), what)
        if wrong == "initial":
            version = fragment = 0
            state = self.weights if what == "good" else {n: v + 1 for n, v in self.weights.items()}
            payload = fp32().encode(state, {}, self.layout)[0]
        header = wire.UploadHeader(
            run_id="another" if wrong == "run_id" else RUN,
            session=session,
            kind=7 if wrong == "kind" else kind,
            fragment=fragment,
            version=version,
            num_bytes=payload.num_bytes + (wrong == "num_bytes"),
            checksum=payload.checksum + (wrong == "checksum"),
            chunk_bytes=1 if wrong == "chunk_bytes" else CHUNK,
            work=wire.Work(steps=1, samples=0 if wrong == "samples" else BATCH),
        )
        if wrong == "steps":
            header.work.steps = header.work.samples = 2**53
        if wrong == "seconds":
            header.work.compute_s = float("nan")
        if (masking := self.hub.masking) and site in SITES:
            model, key = self.hub.model, (fragment, version)
            known = model.known_hash(*key) if model and fragment < len(versions) else ""
            header.bundle.epoch = masking.epoch + (wrong == "epoch")
            header.bundle.sealed.extend([bytes(76)] * 3)
            header.bundle.hashes.extend(map(hash_of, SEEDS[site]))
            if fragment < len(versions) and self.hub._rounds:
                header.bundle.basis = masking.basis(*key, known)
        return header, payload

    @rule(
        site=sites,
        session=sessions,
        fragment=st.integers(0, 2),
        off=near,
        what=st.sampled_from(("good", "other", "large", "nan")),
        wrong=st.sampled_from(
            (
                "",
                "",
                "",
                "",
                "initial",
                "initial",
                "run_id",
                "kind",
                "num_bytes",
                "checksum",
                "chunk_bytes",
                "samples",
                "steps",
                "seconds",
                "epoch",
            )
        ),
    )
    def open_upload(
        self, site: str, session: str, fragment: int, off: int, what: str, wrong: str
    ) -> None:
        given = self._header(site, self._session(site, session), fragment, off, what, wrong)
        self._do(self._open_upload, site, *given)

    def _open_upload(self, site: str, header: wire.UploadHeader, payload: Payload) -> None:
        found = self._ask(self.hub.open_upload, site, header)
        if isinstance(found, FedwanError):
            return
        assert header.session == self.session[site] and header.run_id == RUN
        if isinstance(found, wire.Receipt):
            self._receive(site, header, found)
        else:
            self.open[site] = header, payload, found

    @precondition(lambda self: bool(self.open))
    @rule(data=st.data(), first=st.integers(0, 3), count=st.integers(0, 4))
    def write(self, data: st.DataObject, first: int, count: int) -> None:
        self._do(self._write, data.draw(st.sampled_from(sorted(self.open))), first, count)

    def _write(self, site: str, first: int, count: int) -> None:
        header, payload, reception = self.open[site]
        content = read_all(payload)
        self.sent[Key(header.fragment, header.version, site)].add(checksum_of(payload))
        for at in range(first * CHUNK, (first + count) * CHUNK, CHUNK):
            self._ask(reception.write, at, content[at : at + CHUNK])

    @precondition(lambda self: bool(self.open))
    @rule(data=st.data(), meanwhile=st.sampled_from(("", "", "", "turn", "eject", "join", "open")))
    def close(self, data: st.DataObject, meanwhile: str) -> None:
        self._do(self._close, data.draw(st.sampled_from(sorted(self.open))), meanwhile)

    def _close(self, site: str, meanwhile: str) -> None:
        """Something else may happen while the payload is looked at."""
        header, _, _ = self.open[site]
        intake = self.hub.intake
        look = type(intake).inspect

        def inspect(*args: Any) -> Any:
            if meanwhile == "turn":
                self.turn()
            elif meanwhile == "eject":
                self.decide(site, "eject")
            elif meanwhile == "join":
                self._join(site, f"{site}-c", "")
            elif meanwhile == "open":
                self._ask(
                    self.hub.open_upload,
                    site,
                    self._header(site, self.session[site], header.fragment, 0, "other", "")[0],
                )
            return look(intake, *args)

        with patch.object(intake, "inspect", inspect):
            found = self._ask(self.hub.close_stripe, site, header)
        if not isinstance(found, FedwanError):
            self._receive(site, header, found)

    def _receive(self, site: str, header: wire.UploadHeader, receipt: wire.Receipt) -> None:
        assert receipt.text.isprintable() and len(receipt.text) < 1200
        is_contribution = header.kind == wire.UploadHeader.CONTRIBUTION
        standing = self.registry.sites[site].standing
        if receipt.status == wire.Receipt.ACCEPTED and is_contribution and standing != "ejected":
            self.accepted.add(Key(header.fragment, header.version, site))

    @rule(
        site=st.sampled_from(SITES),
        fragment=st.integers(0, 1),
        what=st.sampled_from(("good", "good", "other", "nan")),
    )
    def contribute(self, site: str, fragment: int, what: str) -> None:
        """As an honest site does, all of it at once."""
        self.open_upload(site, "own", fragment, 0, what, "")
        if site in self.open:
            self._do(self._write, site, 0, 4)
            self._do(self._close, site, "")

    @rule(
        site=sites,
        kind=st.integers(0, 5),
        fragment=st.integers(0, 2),
        off=near,
        held=st.sampled_from(("", "mine", "another")),
        wait_s=st.sampled_from((0.0, 0.0, 5.0, float("nan"), -1.0)),
        checksum=st.sampled_from((0, 0, 1)),
    )
    def download(self, site: str, **fields: Any) -> None:
        self._do(self._download, site, fields)

    def _download(self, site: str, given: dict[str, Any]) -> None:
        hub, fields = self.hub, dict(given)
        versions = hub._rounds.versions if hub._rounds else [0]
        at = min(fields["fragment"], len(versions) - 1)
        version = max(0, versions[at] + fields.pop("off"))
        held = fields.pop("held")
        request = wire.DownloadRequest(run_id=RUN, version=version, **fields)
        if held:
            mine = hub.model.hash_at(tuple(versions)) if hub.model else ""
            request.held_sha256 = mine if held == "mine" else "0" * 64
            request.held_versions.extend(max(0, v - (held != "mine")) for v in versions)
        found = self._ask(hub.download, site, request)
        if isinstance(found, FedwanError):
            return
        header, payload = found
        assert self.session[site] and header.run_step <= H * VERSIONS * 3
        assert (payload is not None) == (header.status == wire.DownloadHeader.READY)
        if request.kind != wire.DownloadRequest.UPDATE:
            assert all(map(int.__le__, header.versions, hub.rounds.versions))
        elif payload is not None:
            assert payload is self.published[request.fragment, version]
        elif header.status == wire.DownloadHeader.NOT_YET:
            assert version > hub.rounds.versions[request.fragment]

    @rule(
        site=sites,
        off=near,
        text=st.sampled_from(('{"fd": 1.5, "modes": [1, 2]}', '{"fd": NaN}', '{"t": 1}', "[", "")),
    )
    def report(self, site: str, off: int, text: str) -> None:
        version = max(0, self.hub.rounds.version + off) if self.hub._rounds else 0
        self._do(self._report, site, version, text)

    def _report(self, site: str, version: int, text: str) -> None:
        may = self.asked | {self.registry.opener}
        report = wire.QualityReport(run_id=RUN, version=version, figures_json=text)
        self._ask(self.hub.report, site, report)
        for reports in self.hub.evaluation.found(self.hub.live()):
            assert reports.keys() <= may and find(reports).version <= self.hub.rounds.version + 1

    @rule(site=sites, session=sessions, error=st.sampled_from(("", "no GPU\x1b[2J" * 100)))
    def leave(self, site: str, session: str, error: str) -> None:
        self._do(self._leave, site, self._session(site, session), error)

    def _leave(self, site: str, session: str, error: str) -> None:
        found = self._ask(self.hub.leave, site, wire.Farewell(session=session, error=error))
        if not isinstance(found, FedwanError) and session == self.session[site]:
            assert site not in self.hub.live()
            self.past.add(session)

    @rule(
        site=sites, off=st.integers(-1, 1), is_true=st.booleans(), size=st.sampled_from((1, 1, 3))
    )
    def unmask(self, site: str, off: int, is_true: bool, size: int) -> None:
        present = self.hub.masking.present if self.hub.masking else None
        answer = wire.Unmasked(version=max(0, off), signature=bytes(64))
        if present is not None and site in SITES:
            answer.version = max(0, present._asked.version + off)
            if is_true:
                answer.signature = KEYS[site].sign(present.statement(RUN))
            others = {owner: [n for n in SITES if n != owner] for owner in present._bundles}
            for owner in present._bundles:
                numbers = [0, *(1 + others[owner].index(n) for n in present.missing)]
                mine = b"".join(shares(owner, n)[SITES.index(site) + 1] for n in numbers)
                answer.shares.append(mine * size if is_true else bytes(len(mine) * size))
        self._do(self._ask, self.hub.unmask, site, answer)


TestCalls = Calls.TestCase
TestCalls.settings = settings(
    max_examples=100,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
