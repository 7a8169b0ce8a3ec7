"""A coordinator whose round loop comes round when a test says so, in time that the test passes."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NamedTuple
from unittest.mock import patch

import torch
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from fedwan import outer
from fedwan.codecs import Codec, Payload, Reading, fp32, int4, int8
from fedwan.codecs.masked import KeyStreams, bind, first_sizes, masked
from fedwan.codecs.payload import Source
from fedwan.coordinator import federation, servicer
from fedwan.coordinator.federation import CoordinatorRounds
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.masked import MaskedMerger, key_streams
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.servicer import Servicer
from fedwan.errors import UserError
from fedwan.fragments import Fragmentation, strided, whole
from fedwan.link import wire_pb2 as wire
from fedwan.outer.step import step_outer
from fedwan.protocol.agreement import Agreement
from fedwan.protocol.gate import Gate
from fedwan.protocol.policy import RoundPolicy
from fedwan.protocol.registry import Registry
from fedwan.protocol.round import Key, Round
from fedwan.protocol.unmasking import Unmasking, hash_of
from fedwan.state import State, hash_state
from fedwan.strategy import Strategy
from tests.planes import RUN, SITES, hello_of
from tests.support import spec

CHUNK, BATCH, H, VERSIONS = 1 << 10, 4, 2, 4
BEGINS_S, SILENCE_S = 1000.0, 20.0


class Setup(NamedTuple):
    """A way to train together, where contributions have a few chunks."""

    policy: RoundPolicy
    up: Codec
    num_values: int
    """Of each of two tensors."""
    cut: Fragmentation = whole
    clock: Literal["versions", "samples"] = "versions"


SETUPS = {
    "all": Setup(RoundPolicy(3, 3, 60.0), fp32(), 300),
    "late": Setup(RoundPolicy(3, 2, 60.0, True, 1), int4(), 5000, strided(2, H)),
    "arrivals": Setup(RoundPolicy(3, 1, 60.0, False, 2, 0.5, 1), int8(), 1200, whole, "samples"),
    "masked": Setup(RoundPolicy(3, 2, 60.0), masked(4, 3), 1800),
}
KEYS = {site: Ed25519PrivateKey.from_private_bytes(site.encode() * 16) for site in SITES}
SEEDS = {site: [bytes([ord(site[1]), n] * 8) for n in range(3)] for site in SITES}
"""Of its own mask, and of those with the others."""


@functools.cache
def shares(owner: str, number: int) -> dict[int, bytes]:
    """Of a seed, by the number of who has it."""
    return dict(Shamir.split(2, len(SITES), SEEDS[owner][number], ssss=False))


@functools.cache
def payload_of(name: str, fragment: int, what: str) -> Payload:
    """`good`, `other`, `large` or `nan` values; under masks nobody can tell. -1: initial ones."""
    setup = SETUPS[name]
    layout = {f"net/{n}.weight": spec((setup.num_values,)) for n in "ab"}
    generator = torch.Generator().manual_seed(len(what))
    if fragment < 0:
        values = {n: torch.full(s.shape, float(what != "good")) for n, s in layout.items()}
        return fp32().encode(values, {}, layout)[0]
    layout, up = setup.cut(layout)[fragment].layout, setup.up
    if up.mask_bits:
        sizes = memoryview(first_sizes(layout)).cast("H").tolist()
        up, what = bind(up, len(SITES), sizes, KeyStreams([bytes(16)])), "good"
    more = {"large": 1e17, "nan": float("nan")}.get(what, 0.0)
    values = {n: torch.randn(s.shape, generator=generator) + more for n, s in layout.items()}
    return up.encode(values, {}, layout)[0]


def checksum_of(source: Source) -> int:
    """What a payload ends with."""
    return int.from_bytes(source.read(source.num_bytes - 8, 8), "little")


class RunByHand:
    """Three sites, `s1` to `s3`, four versions."""

    def __init__(self, name: str) -> None:
        self.name, self.setup, self.now_s = name, SETUPS[name], BEGINS_S
        time = SimpleNamespace(monotonic=lambda: self.now_s, time=lambda: self.now_s)
        self._patches = [patch.object(module, "time", time) for module in (federation, servicer)]
        for each in self._patches:
            each.start()
        self.layout = {f"net/{n}.weight": spec((self.setup.num_values,)) for n in "ab"}
        self.fragments = self.setup.cut(self.layout)
        step = step_outer({"net": outer.sgd(lr=1.0)})
        given = (self.setup.cut, step, self.setup.up, fp32(), self.setup.policy)
        self.strategy = Strategy("delta", H, *given, clock=self.setup.clock)
        self.registry = Registry(SITES, SILENCE_S)
        self.told: Counter[str | None] = Counter()
        """Events, by site."""
        agreement = Agreement(SITES, len(SITES))
        self.hub = Servicer(RUN, self.registry, agreement, self._note, CHUNK)
        self.hub.changed.wait = self.wait  # type: ignore[method-assign]
        is_masked = bool(self.setup.up.mask_bits)
        self.hub.gate = Gate(0.0 if is_masked else 20.0, len(SITES))
        self.hub.masking = Masking(RUN, SITES, 2) if is_masked else None
        up = self.setup.up
        self._mergers: list[Any] = [
            MaskedMerger(f.layout, up, len(SITES)) if is_masked else Merger(f.layout)
            for f in self.fragments
        ]
        self.merged: dict[Key, int] = {}
        """Checksums of what was."""
        self.published: dict[tuple[int, int], Payload] = {}

    def end(self) -> None:
        for each in self._patches:
            each.stop()

    def wait(self, timeout: float | None = None) -> bool:
        """Time passes where the coordinator waits, and when a test says so."""
        self.now_s += timeout or 0.0
        return True

    def _note(self, event: str, site: str | None, text: str, **details: Any) -> None:
        assert text.isprintable() and len(text) < 1200
        self.told[site] += 1

    @property
    def versions(self) -> list[int]:
        return self.hub._rounds.versions if self.hub._rounds else [0]

    @property
    def weights(self) -> State:
        """Initial ones."""
        return {name: torch.zeros(spec.shape) for name, spec in self.layout.items()}

    # What sites say --------------------------------------------------------------------------

    def hello(self, site: str, session: str) -> wire.Hello:
        hello = hello_of(site, session, self.layout, _zeros_sha256(self.name))
        if self.hub.masking and site in KEYS:
            key = KEYS[site].public_key().public_bytes_raw()
            card = wire.MaskCard(site=site, exchange_key=b"\t" + bytes(31), signing_key=key)
            hello.card.CopyFrom(card)
        return hello

    def header(self, key: Key, session: str, payload: Payload) -> wire.UploadHeader:
        """Of a contribution."""
        fragment, version, site = key
        header = wire.UploadHeader(
            run_id=RUN,
            session=session,
            fragment=fragment,
            version=version,
            num_bytes=payload.num_bytes,
            checksum=payload.checksum,
            chunk_bytes=CHUNK,
            work=wire.Work(steps=1, samples=BATCH),
        )
        if (masking := self.hub.masking) and site in SITES and fragment < len(self.versions):
            model, known = self.hub.model, ""
            if model and version == model.versions[fragment]:
                known = model.hash_of(self.fragments[fragment])
            header.bundle.epoch, header.bundle.sealed[:] = masking.epoch, [bytes(76)] * 3
            header.bundle.hashes[:] = map(hash_of, SEEDS[site])
            if self.hub._rounds:
                header.bundle.basis = masking.basis(fragment, version, known)
        return header

    def unmasked(self, site: str) -> wire.Unmasked:
        """What an honest site answers to either question."""
        present = self.hub.masking.present if self.hub.masking else None
        if present is None or site not in SITES:
            return wire.Unmasked(signature=bytes(64), shares=[bytes(16)])
        answer = wire.Unmasked(fragment=present._asked.fragment, version=present._asked.version)
        answer.signature = KEYS[site].sign(present.statement(RUN))
        for owner in present._bundles:
            others = [name for name in SITES if name != owner]
            numbers = [0, *(1 + others.index(name) for name in present.missing)]
            given = [shares(owner, number)[SITES.index(site) + 1] for number in numbers]
            answer.shares.append(b"".join(given))
        return answer

    # The round loop, as `CoordinatedRun` has it ----------------------------------------------

    def turn(self) -> None:
        """It comes round."""
        hub = self.hub
        lost = hub.notice()
        if hub.stop_text:
            return
        if hub._rounds is None:
            if hub.agreement.agreed:
                self._start()
        elif hub.model is None:
            hub.registry.replace_first(lost, self.now_s)
            if hub.initial is not None:
                self._take_initial(fp32().decode(hub.initial[1], whole(self.layout)[0].layout))
        else:
            self._round(hub.rounds, hub.model)

    def _start(self) -> None:
        if self.hub.masking:
            self.hub.masking.begin(self.layout, self.fragments, None)
        rounds = CoordinatorRounds(self.strategy, self.fragments, SITES, VERSIONS, BATCH)
        self.hub.start(rounds, Intake(self.layout, self.fragments, self.setup.up, Path("spool")))

    def _take_initial(self, initial: State) -> None:
        if hash_state(initial) == _zeros_sha256(self.name):
            self.hub.set_model(GlobalModel(initial, self.layout, self.strategy, 1e3))
        else:
            self.hub.refuse_initial(self.hub.initial[0], "another hash")

    def _round(self, rounds: CoordinatorRounds, model: GlobalModel) -> None:
        if rounds.is_done:
            self.hub.finish("the run is complete", is_complete=True)
            return
        last = rounds.round
        if last is None or last.version < model.versions[last.fragment.index]:
            last = rounds.begin(self.now_s)
        if (last.is_closed or self._gather(rounds, last)) and (merged := self._merged(last, model)):
            fragment, version = last.fragment, last.version + 1
            payload = model.commit(
                fragment, merged, last.samples, rounds.counts_as(), rounds.run_step
            )
            self.hub.publish(payload)
            assert rounds.versions == model.versions and rounds.versions[fragment.index] == version
            assert all(bool(value.isfinite().all()) for value in model.state.values())
            self.published[fragment.index, version] = payload

    def _gather(self, rounds: CoordinatorRounds, present: Round[Contribution]) -> bool:
        """Whether the round closes."""
        verdict, merges = self.hub.advance()
        for merge in merges:
            assert merge.key not in self.merged, "merged twice"
            self.merged[merge.key] = checksum_of(merge.contribution.payload)
            reading = Reading(self.setup.up, merge.contribution.payload, present.fragment.layout)
            weight = merge.contribution.work.samples / rounds.nominal
            self._mergers[present.fragment.index].add(reading, weight, merge.scale)
        if verdict == "stop":
            self.hub.finish("nobody came")
        return verdict == "close"

    def _merged(self, round_: Round[Contribution], model: GlobalModel) -> State | None:
        """What the round comes to, once its masks are off."""
        masking, index, version = self.hub.masking, round_.fragment.index, round_.version
        merger = self._mergers[index]
        if masking is None:
            return merger.take()  # type: ignore[no-any-return]
        bundles = {m.key.site: m.contribution.bundle for m in round_.merged}
        assert None not in bundles.values()
        if masking.present is None:
            basis = masking.basis(index, version, model.hash_of(round_.fragment))
            asked = (masking.names, masking.needed, index, version, basis, bundles)
            masking.present = Unmasking(*asked)  # type: ignore[arg-type]
        try:
            masks = key_streams(masking.present, SITES, bundles)  # type: ignore[arg-type]
        except UserError as error:  # all have given shares, and false ones
            self.hub.finish(str(error))
            return None
        if masks is None:
            return None
        masking.present = None
        merged: State
        first = masking.sizes(index, version)
        merged, _ = merger.open(masks, first)
        masking.set_sizes(index, version + 1, memoryview(first).cast("H").tolist())  # as sent
        return merged


@functools.cache
def _zeros_sha256(name: str) -> str:
    return hash_state({f"net/{n}.weight": torch.zeros(SETUPS[name].num_values) for n in "ab"})
