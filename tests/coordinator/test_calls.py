"""Calls of sites in any order, decisions of the operator, rounds and time: what holds after each.

`python -m benchmarks fuzz --only calls` has hypothesis make many more of the same sequences.
"""

from __future__ import annotations

import time
from collections import Counter, defaultdict
from collections.abc import Callable
from itertools import count
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from fedwan.codecs import Payload
from fedwan.coordinator.evaluator import find
from fedwan.errors import FedwanError
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.registry import KEPT_SESSIONS
from fedwan.protocol.round import Key
from tests.coordinator.by_hand import (
    BEGINS_S,
    CHUNK,
    KEYS,
    SETUPS,
    VERSIONS,
    H,
    RunByHand,
    checksum_of,
    payload_of,
)
from tests.planes import RUN, SITES
from tests.support import read_all

AGAIN = 80
MOST_EVENTS = 75
"""That a site may have in the journal, and one more in five seconds."""
COUNTS: Counter[str] = Counter()
"""Of all sequences: how many, calls, those that were refused, and the slowest one's time."""

every = st.sampled_from((*SITES, "s4"))  # the last has a certificate, and is not in the run
members = st.sampled_from(SITES)
sessions = st.sampled_from(("own", "own", "own", "a", "b", "new"))
near = st.integers(-2, 2)
fragments = st.integers(0, 2)
contents = st.sampled_from(("good", "other", "large", "nan"))
hellos = st.sampled_from(
    ("", "", "", "run_id", "site", "protocol", "layout_json", "initial_sha256", "checkpoint")
)
headers = st.sampled_from(
    ("", "", "", "initial", "run_id", "kind", "num_bytes", "chunk_bytes", "samples", "steps", "nan")
)
others = st.sampled_from(("", "", "turn", "eject", "join", "open"))
figures = st.sampled_from(('{"fd": 1.5, "modes": [1, 2]}', '{"fd": NaN}', '{"t": 1}', "[", ""))


class Calls(RuleBasedStateMachine):
    """A coordinator, and what a reader of docs/wire.md expects of it."""

    @initialize(name=st.sampled_from(sorted(SETUPS)), rounds=st.sampled_from((-1, 0, 1, 2)))
    def begin(self, name: str, rounds: int) -> None:
        self.run = RunByHand(name)
        self.hub, self.registry = self.run.hub, self.run.registry
        self.session = dict.fromkeys((*SITES, "s4"), "")
        self.past: set[str] = set()
        """Sessions that were replaced, or have left."""
        self.open: dict[str, tuple[wire.UploadHeader, Payload, Any]] = {}
        self.sent: dict[Key, set[int]] = defaultdict(set)
        """Checksums of what a site has written."""
        self.accepted: set[Key] = set()
        self.asked: set[str] = set()
        self.latest: list[tuple[Callable[..., Any], tuple[Any, ...]]] = []
        self.has_repeated = False
        self.number = count()
        if rounds < 0:  # nobody is there
            return
        for _ in range(2):
            for site in SITES:
                self.join(site, "a", "")
            self.turn()
        self.open_upload("s1", "own", 0, 0, "good", "initial")
        self._whole("s1")
        self.turn()
        self.turn()
        for _ in range(rounds):
            self.round("", "good")

    def teardown(self) -> None:
        if hasattr(self, "run"):
            self.run.end()
            COUNTS["sequences"] += 1

    def _ask(self, call: Callable[..., Any], *args: Any) -> Any:
        """What comes of a call: an answer, or an error of the tree."""
        COUNTS["calls"] += 1
        began_s = time.process_time()
        try:
            return call(*args)
        except FedwanError as error:
            COUNTS["refused"] += 1
            assert str(error).isprintable() and len(str(error)) < 1200
            return error
        finally:
            took_s = time.process_time() - began_s
            COUNTS["slowest_us"] = max(COUNTS["slowest_us"], int(1e6 * took_s))

    def _do(self, what: Callable[..., Any], *args: Any) -> None:
        self.latest = [*self.latest[-1:], (what, args)]
        what(*args)
        self._hold()

    def _hold(self) -> None:
        """What a site has the coordinator keep and tell is bounded."""
        self.hub.survey()
        most = MOST_EVENTS + (self.run.now_s - BEGINS_S) / 5
        assert max(self.run.told.values(), default=0) < most, self.run.told
        for site, entry in self.registry.sites.items():
            assert entry.session == self.session[site]
            assert len(entry.replaced) <= KEPT_SESSIONS and len(entry.owed) <= 5
            if self.hub._intake is not None:
                held = [key for kept in self.hub.rounds._whole for key in kept if key[1] == site]
                held += self.hub.intake.open_of(site)  # type: ignore[arg-type]
                of_each = 3 + self.run.setup.policy.max_staleness
                assert len(held) <= len(self.run.fragments) * of_each

    def _is_in(self, site: str) -> None:
        """It was answered: it has joined, and the operator has not put it out."""
        assert self.session[site] and self.registry.refusal(site) is None

    # The coordinator's own -------------------------------------------------------------------

    @rule()
    def turn(self) -> None:
        """The round loop comes round."""
        before = len(self.run.merged)
        self.run.turn()
        for key, checksum in [*self.run.merged.items()][before:]:
            assert self.registry.sites[key.site].standing != "ejected"
            assert checksum in self.sent[key]
        last = self.hub._rounds.round if self.hub._rounds else None
        if last is not None and last.is_closed and not last.is_on_arrival:
            due = {key for key in self.accepted if key[:2] == (last.fragment.index, last.version)}
            # Those of unknown weights under masks are compared with them once they are known.
            assert due <= {*(merge.key for merge in last.merged), *last.left_out}
            assert not last.left_out or self.hub.masking
        self._hold()

    @rule(seconds=st.sampled_from((1.0, 15.0, 70.0, 1000.0)))
    def time_passes(self, seconds: float) -> None:
        self.run.wait(seconds)
        self.hub.notice()

    @rule(site=members, verb=st.sampled_from(("drain", "eject", "admit", "admit")))
    def decide(self, site: str, verb: Any) -> None:
        """The operator does."""
        if self.registry.objection(verb, site):
            return
        self.hub.decide(verb, site)
        if verb == "eject" or (verb == "drain" and self.hub.masking):  # who unmasks no more
            self.accepted = {k for k in self.accepted if k.site != site or k in self.run.merged}
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

    @precondition(lambda self: bool(self.run.published))
    @rule()
    def stop(self) -> None:
        self.hub.finish("the operator stops it")

    # Sites -----------------------------------------------------------------------------------

    @rule(without=st.sampled_from(("", "", *SITES)), what=contents)
    def round(self, without: str, what: str) -> None:
        """Sites do what they should, all but one perhaps; another one sends what it likes."""
        there = [site for site in SITES if site != without]
        rounds = self.hub._rounds
        fragment = rounds.round.fragment.index if rounds and rounds.round else 0
        for site in there:
            self.send(site, fragment, 0, what if site == there[0] else "good", "")
        self.turn()
        for site in 2 * there if self.hub.masking else ():
            self.unmask(site, 0, "")
        self.turn()

    @precondition(lambda self: bool(self.latest) and not self.has_repeated)
    @rule()
    def again(self) -> None:
        """One asks the same again and again, one thing or two."""
        self.has_repeated = True
        for what, args in self.latest * AGAIN:
            what(*args)
        self._hold()

    def _session(self, site: str, session: str) -> str:
        return self.session[site] if session == "own" else f"{site}-{session}"

    @rule(site=every, session=sessions, wrong=hellos)
    def join(self, site: str, session: str, wrong: str) -> None:
        self._do(self._join, site, self._session(site, session), wrong)

    def _join(self, site: str, session: str, wrong: str) -> None:
        if session.endswith("new"):  # another one each time
            session = f"{site}-{next(self.number)}"
        hello = self.run.hello(site, session)
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
        site=every, session=sessions, what=st.sampled_from(("attach", "hear", "detach", "refuse"))
    )
    def control(self, site: str, session: str, what: str) -> None:
        self._do(self._control, site, self._session(site, session), what)

    def _control(self, site: str, session: str, what: str) -> None:
        if what == "hear":
            self._ask(self.hub.heard, site, wire.SiteSignal(session=session, step=2**50))
        elif what == "refuse":
            self._ask(self.hub.refuse, site, "its certificate has expired")
        else:
            found = self._ask(getattr(self.hub, what), site, session)
            if what == "attach" and not isinstance(found, FedwanError):
                assert session == self.session[site] and found.qsize() <= 5

    @rule(site=members, fragment=st.integers(0, 1), off=near, what=contents, meanwhile=others)
    def send(self, site: str, fragment: int, off: int, what: str, meanwhile: str) -> None:
        """A whole contribution."""
        self.open_upload(site, "own", fragment, off, what, "")
        self._whole(site, meanwhile)

    @rule(site=every, session=sessions, fragment=fragments, off=near, what=contents, wrong=headers)
    def open_upload(
        self, site: str, session: str, fragment: int, off: int, what: str, wrong: str
    ) -> None:
        versions = self.run.versions
        index = min(fragment, len(versions) - 1)
        version = max(0, versions[index] + off)
        payload = payload_of(self.run.name, index, what)
        if wrong == "initial":
            fragment, version, payload = 0, 0, payload_of(self.run.name, -1, what)
        key = Key(fragment, version, site)
        header = self.run.header(key, self._session(site, session), payload)
        if wrong == "run_id":
            header.run_id = "another"
        elif wrong in ("initial", "kind"):
            header.kind = wire.UploadHeader.INITIAL if wrong == "initial" else 7  # type: ignore[assignment]
        elif wrong in ("num_bytes", "chunk_bytes"):
            setattr(header, wrong, 7)
        elif wrong in ("samples", "steps"):
            setattr(header.work, wrong, 0 if wrong == "samples" else 2**53)
        elif wrong == "nan":
            header.work.compute_s = float("nan")
        self._do(self._open_upload, site, header, payload)

    def _open_upload(self, site: str, header: wire.UploadHeader, payload: Payload) -> None:
        found = self._ask(self.hub.open_upload, site, header)
        if isinstance(found, FedwanError):
            return
        self._is_in(site)
        assert header.session == self.session[site] and header.run_id == RUN
        if isinstance(found, wire.Receipt):
            self._receive(site, header, found)
        else:
            self.open[site] = header, payload, found

    @rule(site=members, first=st.integers(0, 3), num=st.integers(0, 4))
    def write(self, site: str, first: int, num: int) -> None:
        if site in self.open:
            self._do(self._write, site, first, num)

    def _write(self, site: str, first: int, num: int) -> None:
        header, payload, reception = self.open[site]
        content = read_all(payload)
        self.sent[Key(header.fragment, header.version, site)].add(checksum_of(payload))
        for at in range(first * CHUNK, min((first + num) * CHUNK, len(content) + CHUNK), CHUNK):
            self._ask(reception.write, at, content[at : at + CHUNK])

    @rule(site=members, meanwhile=others)
    def close(self, site: str, meanwhile: str) -> None:
        if site in self.open:
            self._do(self._close, site, meanwhile)

    def _close(self, site: str, meanwhile: str) -> None:
        """Something else may happen while the payload is looked at."""
        header, intake = self.open[site][0], self.hub.intake
        happens: dict[str, Callable[[], Any]] = {
            "turn": self.turn,
            "eject": lambda: self.decide(site, "eject"),
            "join": lambda: self._join(site, f"{site}-new", ""),
            "open": lambda: self.open_upload(site, "own", header.fragment, 0, "other", ""),
        }

        def inspect(*args: Any) -> Any:
            happens.get(meanwhile, lambda: None)()
            return type(intake).inspect(intake, *args)

        with patch.object(intake, "inspect", inspect):
            found = self._ask(self.hub.close_stripe, site, header)
        if not isinstance(found, FedwanError):
            self._receive(site, header, found)

    def _whole(self, site: str, meanwhile: str = "") -> None:
        if site in self.open:
            self.write(site, 0, -(-self.open[site][1].num_bytes // CHUNK))
            self.close(site, meanwhile)

    def _receive(self, site: str, header: wire.UploadHeader, receipt: wire.Receipt) -> None:
        assert receipt.text.isprintable() and len(receipt.text) < 1200
        is_contribution = header.kind == wire.UploadHeader.CONTRIBUTION
        is_out = self.registry.sites[site].standing == "ejected"
        if receipt.status == wire.Receipt.ACCEPTED and is_contribution and not is_out:
            self.accepted.add(Key(header.fragment, header.version, site))

    @rule(
        site=every,
        kind=st.integers(0, 5),
        fragment=fragments,
        off=near,
        held=st.sampled_from(("", "mine", "another")),
        wait_s=st.sampled_from((0.0, 0.0, 5.0, float("nan"), -1.0)),
    )
    def download(
        self, site: str, kind: int, fragment: int, off: int, held: str, wait_s: float
    ) -> None:
        versions, model = self.run.versions, self.hub.model
        version = max(0, versions[min(fragment, len(versions) - 1)] + off)
        request = wire.DownloadRequest(
            run_id=RUN,
            kind=kind,  # type: ignore[arg-type]
            fragment=fragment,
            version=version,
            wait_s=wait_s,
            checksum=off % 2,
        )
        if held:
            mine = model.hash_at(tuple(versions)) if model else ""
            request.held_sha256 = mine if held == "mine" else "0" * 64
            request.held_versions[:] = [max(0, v - (held != "mine")) for v in versions]
        self._do(self._download, site, request)

    def _download(self, site: str, request: wire.DownloadRequest) -> None:
        found = self._ask(self.hub.download, site, request)
        if isinstance(found, FedwanError):
            return
        header, payload = found
        self._is_in(site)
        assert header.run_step <= H * (VERSIONS + 1)
        assert (payload is not None) == (header.status == wire.DownloadHeader.READY)
        if request.kind != wire.DownloadRequest.UPDATE:
            assert all(map(int.__le__, header.versions, self.hub.rounds.versions))
        elif payload is not None:
            assert payload is self.run.published[request.fragment, request.version]
        elif header.status == wire.DownloadHeader.NOT_YET:
            assert request.version > self.hub.rounds.versions[request.fragment]

    @rule(site=every, off=near, text=figures)
    def report(self, site: str, off: int, text: str) -> None:
        version = max(0, self.hub.rounds.version + off) if self.hub._rounds else 0
        report = wire.QualityReport(run_id=RUN, version=version, figures_json=text)
        self._do(self._report, site, report)

    def _report(self, site: str, report: wire.QualityReport) -> None:
        may = self.asked | {self.registry.opener}
        self._ask(self.hub.report, site, report)
        for reports in self.hub.evaluation.found(self.hub.live()):
            assert reports.keys() <= may and find(reports).version <= self.hub.rounds.version + 1

    @rule(site=every, session=sessions, error=st.sampled_from(("", "no GPU\x1b[2J" * 100)))
    def leave(self, site: str, session: str, error: str) -> None:
        self._do(self._leave, site, self._session(site, session), error)

    def _leave(self, site: str, session: str, error: str) -> None:
        found = self._ask(self.hub.leave, site, wire.Farewell(session=session, error=error))
        if not isinstance(found, FedwanError) and session == self.session[site]:
            assert site not in self.hub.live()
            self.past.add(session)

    @rule(site=every, off=near, wrong=st.sampled_from(("", "", "signature", "shares", "long")))
    def unmask(self, site: str, off: int, wrong: str) -> None:
        answer = self.run.unmasked(site)
        answer.version = max(0, answer.version + off)
        if wrong == "signature" or site not in KEYS:
            answer.signature = bytes(64)
        elif wrong:
            more = CHUNK * (wrong == "long")
            answer.shares[:] = [bytes(len(share) + more) for share in answer.shares]
        self._do(self._ask, self.hub.unmask, site, answer)


TestCalls = pytest.mark.slow(Calls.TestCase)
TestCalls.settings = settings(
    max_examples=200,
    stateful_step_count=20,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
