"""Sums under masks: what the coordinator adds up unread, and reads once enough sites have agreed.

The seeds of the survivors' own masks, and of those that they share with sites that are not in the
sum, come in shares (`fedwan.protocol.unmasking`). Each is known by its hash: a site that gives a
false share is found out, and others' are taken.

Every site's keys come with its Join, and all of them with the answer; `Masking` holds what a
coordinator keeps of it.

Memory: one accumulator of the fragment's values, a byte each up to 8 bits on the wire, else two; as
much is written to disk each round.
"""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations, islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedwan.codecs import Codec, Coded
from fedwan.codecs.masked import KeyStreams, Masked, Sum, check_maskable, first_sizes
from fedwan.codecs.payload import TRAILER_BYTES
from fedwan.coordinator.intake import Contribution, Measures
from fedwan.doctor.sampling import Sample, Sampler
from fedwan.errors import CheckpointError, IdentityError, PayloadError, RunStopped, UserError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from fedwan.link.tls import Identity
from fedwan.protocol.round import Key, Merge, Round
from fedwan.protocol.unmasking import (
    SHARE_BYTES,
    Unmasking,
    basis_of,
    check_bundle,
    hash_of,
    keys_statement,
)
from fedwan.state import (
    Layout,
    OnDemand,
    State,
    check_tensors,
    read_tensors,
    read_tensors_meta,
    sweep,
    write_tensors,
)

if TYPE_CHECKING:
    from fedwan.coordinator.federation import Federation

MASKED_SUMS = "masked"
"""Folder of a run: sums whose masks sites may have been asked to take off."""
_MOST_CERTIFICATE = 1 << 16
_MOST_TRIES = 10_000
"""Groups of shares that are put together, of which one at least holds no false one."""


class Sizes:
    """Of the parameters of each fragment, in their order: what sites round by, by version."""

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._kept = [{0: first_sizes(fragment.layout)} for fragment in fragments]

    def of(self, fragment: int, version: int) -> bytes:
        """16 bits each; empty where they are not known any more."""
        return self._kept[fragment].get(version, b"")

    def of_all(self, versions: Sequence[int]) -> bytes:
        """Those of all fragments, one after the other."""
        return b"".join(self.of(*key) for key in enumerate(versions))

    def set(self, fragment: int, version: int, sizes: Sequence[int]) -> None:
        """What the contributions to a version are to be rounded by; kept is the one before, too."""
        kept = self._kept[fragment]
        kept[version] = np.array(sizes, "<u2").tobytes()
        for old in [v for v in kept if v < version - 1]:
            del kept[old]

    def state(self) -> list[dict[str, str]]:
        """For a checkpoint."""
        return [{str(v): sizes.hex() for v, sizes in kept.items()} for kept in self._kept]

    def load_state(self, state: Sequence[Mapping[str, str]]) -> None:
        """The inverse."""
        self._kept = [{int(v): bytes.fromhex(s) for v, s in kept.items()} for kept in state]


class Masking:
    """The sites' public keys, the sizes that they round by, and the sum whose masks come off."""

    def __init__(self, run_id: str, names: Sequence[str], needed: int) -> None:
        self.run_id = run_id
        self.names, self.needed = list(names), needed
        self.identity: Identity | None = None
        """The coordinator's, by whose authorities keys are vouched for; None within a process."""
        self.epoch = secrets.randbits(63) | 1
        """Of this start of the coordinator: what is sent anew goes under other masks."""
        self.sizes = Sizes([])
        self.present: Unmasking | None = None
        self.asked: dict[tuple[int, int], list[str]] = {}
        """Survivors by fragment and version, of sums that a checkpoint may not outlive yet."""
        self._cards: dict[str, wire.MaskCard] = {}

    def objection(self, site: str, card: wire.MaskCard) -> str:
        """Why a site's keys are of no use to the others, or nothing. Needs no lock."""
        lengths = len(card.exchange_key), len(card.signing_key)
        most = max(len(card.certificate), len(card.signature))
        if card.site != site or lengths != (32, 32) or most > _MOST_CERTIFICATE:
            return "masking keys are missing; start site and coordinator from the same app"
        try:
            X25519PrivateKey.generate().exchange(
                X25519PublicKey.from_public_bytes(card.exchange_key)
            )
            if self.identity is not None:
                said = keys_statement(self.run_id, card)
                self.identity.verify(site, card.certificate, card.signature, said)
        except (ValueError, IdentityError) as error:
            return f"masking keys are refused: {error}"
        return ""

    def conflict(self, site: str, card: wire.MaskCard) -> str:
        """Why a site's keys cannot be its keys of this run, or nothing: they stay the same."""
        known = self._cards.get(site, card)
        if (known.exchange_key, known.signing_key) == (card.exchange_key, card.signing_key):
            return ""
        return (
            f"site {site} comes with other masking keys than the run began with, so that its "
            "masks would not come off; give it back its folder of this run, or eject it"
        )

    def keep(self, site: str, card: wire.MaskCard) -> None:
        """Take the keys of a site that is welcome; its certificate may be a new one."""
        self._cards[site] = card

    def needs(self, site: str, others: Collection[str]) -> str:
        """Why nobody can do without a site yet while there are these others, or nothing."""
        if site not in self._cards:
            return (
                f"{site} has not joined yet, and masks are agreed on with the keys of all sites; "
                "wait for it, or begin a run without it"
            )
        for (_, version), survivors in self.asked.items():
            if site in survivors and len({*survivors} & {*others}) < self.needed:
                return (
                    f"{site} is needed to take the masks off round {version + 1}; ask again once "
                    "the run is two checkpoints further"
                )
        return ""

    def note_durable(self, version: int) -> None:
        """Even if the newest checkpoint is lost, the run goes on from this version."""
        self.asked = {key: names for key, names in self.asked.items() if key[1] >= version}

    def welcome(self) -> dict[str, Any]:
        """Fields of the answer to a Join."""
        found = [self._cards[name] for name in self.names if name in self._cards]
        return {"roster": found, "epoch": self.epoch}

    def check(self, key: Key, bundle: wire.MaskBundle, weights_sha256: str) -> None:
        """Refuse a contribution whose masks would not come off.

        `weights_sha256` is of the fragment's weights at that version; empty where they are unknown.
        """
        check_bundle(bundle, len(self.names))
        if bundle.epoch != self.epoch:
            raise PayloadError("contribution under masks of another start of the coordinator")
        if weights_sha256 and bundle.basis != self.basis(*key[:2], weights_sha256):
            raise PayloadError(
                f"contribution starts from other weights than version {key.version}'s, or is "
                "rounded by other sizes"
            )

    def basis(self, fragment: int, version: int, weights_sha256: str) -> bytes:
        """See `basis_of`."""
        return basis_of(weights_sha256, self.sizes.of(fragment, version))

    def question(self, site: str, fragment: int, version: int) -> wire.Unmask | None:
        """What a site that asks for an update is asked instead, if anything."""
        return self.present.question(site, fragment, version) if self.present else None

    def hear(self, site: str, answer: wire.Unmasked) -> None:
        """A site's part; a `PayloadError` where it has not signed what it was asked to."""
        if (present := self.present) is None:
            return
        if answer.signature and not present.is_signed and site in self._cards:
            key = Ed25519PublicKey.from_public_bytes(self._cards[site].signing_key)
            try:
                key.verify(answer.signature, present.statement(self.run_id))
            except InvalidSignature:
                raise PayloadError(f"{site} has signed another list of survivors") from None
        present.hear(site, answer)

    def begin(
        self, layout: Layout, fragments: Sequence[Fragment], past: Mapping[str, Any] | None
    ) -> None:
        """The run begins, or goes on from a checkpoint's state."""
        check_maskable(layout)
        self.sizes = Sizes(fragments)
        if past:
            for name, card in past["cards"].items():
                self._cards[name] = wire.MaskCard.FromString(bytes.fromhex(card))
            self.sizes.load_state(past["sizes"])

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        cards = {name: card.SerializeToString().hex() for name, card in self._cards.items()}
        return {"cards": cards, "sizes": self.sizes.state()}


class MaskedMerger:
    """Adds up the contributions to one fragment; as `merge.Merger`, but all count alike."""

    def __init__(self, layout: Layout, up: Codec, num_sites: int) -> None:
        self._sums = {name: Sum(spec, up.mask_bits, num_sites) for name, spec in layout.items()}
        self.sampler = Sampler({})
        self._count = 0
        self.is_saved = False

    def add(
        self, tensors: Iterable[tuple[str, Coded]], weight: float = 1.0, scale: float = 1.0
    ) -> Sample:
        """Add one contribution, whose values nobody can tell."""
        for name, coded in tensors:
            assert isinstance(coded, Masked)
            self._sums[name].add(coded)
        self._count += 1
        return {}

    def save(self, folder: Path, round_: Round[Contribution], run_id: str) -> None:
        """Write the sum, and what it is made of."""
        path, previous = _files(folder, round_.fragment)
        values = OnDemand(self._sums, lambda name: self._sums[name].state()[0])
        meta = {
            "run_id": run_id,
            "fragment": round_.fragment.index,
            "version": round_.version,
            "sizes": {name: total.state()[1] for name, total in self._sums.items()},
            "merged": [_to_row(merge) for merge in round_.merged],
        }
        folder.mkdir(exist_ok=True)
        write_tensors(path, values, meta, previous)
        self.is_saved = True

    def load(self, path: Path, basis: bytes) -> list[Merge[Contribution]]:
        """What a sum that was saved is made of; nothing if it is not of this basis."""
        values, meta = read_tensors(path)
        merged = [_from_row(row, meta["fragment"], meta["version"]) for row in meta["merged"]]
        if any(m.contribution.bundle and m.contribution.bundle.basis != basis for m in merged):
            return []
        for name, total in self._sums.items():
            total.load_state(values[name], meta["sizes"][name])
        self._count, self.is_saved = len(merged), True
        return merged

    def open(self, masks: KeyStreams, sizes: bytes) -> tuple[State, list[int]]:
        """The mean, and the sizes for the next version; the accumulator starts anew."""
        merged, following = State(), []
        for (name, total), size in zip(
            self._sums.items(), memoryview(sizes).cast("H"), strict=True
        ):
            merged[name], found = total.read(masks, size, self._count)
            following.append(found)
        self._count, self.is_saved = 0, False
        return merged, following


def _files(folder: Path, fragment: Fragment) -> tuple[Path, Path]:
    """For its newest sum, and the one before: the newest checkpoint may give way to the other."""
    index = fragment.index
    return folder / f"{index}.safetensors", folder / f"{index}.previous.safetensors"


def saved_sums(
    folder: Path, run_id: str, fragments: Sequence[Fragment], versions: Sequence[int]
) -> dict[tuple[int, int], Path]:
    """Files of a run's sums that are whole, by fragment and version, from these versions on."""
    found = {}
    sweep(folder)
    for fragment in fragments:
        for path in _files(folder, fragment):
            with suppress(CheckpointError):
                check_tensors(path)
                meta = read_tensors_meta(path)
                if meta["run_id"] == run_id and meta["version"] >= versions[fragment.index]:
                    found[fragment.index, meta["version"]] = path
    return found


def _to_row(merge: Merge[Contribution]) -> dict[str, str]:
    payload, work, _, bundle = merge.contribution
    assert bundle is not None
    return {
        "site": merge.key.site,
        "work": work.SerializeToString().hex(),
        "bundle": bundle.SerializeToString().hex(),
        "trailer": bytes(payload.read(payload.num_bytes - TRAILER_BYTES, TRAILER_BYTES)).hex(),
    }


def _from_row(row: Mapping[str, str], fragment: int, version: int) -> Merge[Contribution]:
    bundle = wire.MaskBundle.FromString(bytes.fromhex(row["bundle"]))
    work = wire.Work.FromString(bytes.fromhex(row["work"]))
    payload = Buffer(TRAILER_BYTES)  # of it, the journal names the checksum
    payload.write(0, bytes.fromhex(row["trailer"]))
    contribution = Contribution(payload, work, Measures({}, {}), bundle)
    return Merge(Key(fragment, version, row["site"]), contribution, 0, 1.0)


def take_masks_off(
    hub: Federation,
    round_: Round[Contribution],
    weights_sha256: str,
    merger: MaskedMerger,
    folder: Path,
    look_round: Callable[[], None],
    patience_s: float,
) -> State:
    """What a closed round's contributions come to, once enough of its sites have given shares.

    The sum is in `folder` before anybody is asked: who signs a list of survivors signs no other one
    for that version, so a coordinator that comes back goes on with the same sum.

    Raises:
        RunStopped: they have not within `patience_s`.
        UserError: a site's own shares are false.
    """
    masking, began_s = hub.masking, time.monotonic()
    assert masking is not None
    index, version = round_.fragment.index, round_.version
    with hub.changed:
        masking.asked[index, version] = [merge.key.site for merge in round_.merged]
    if not merger.is_saved:
        merger.save(folder, round_, masking.run_id)
    bundles = {m.key.site: m.contribution.bundle for m in round_.merged if m.contribution.bundle}
    with hub.changed:
        basis = masking.basis(index, version, weights_sha256)
        asked = masking.present = Unmasking(
            masking.names, masking.needed, index, version, basis, bundles
        )
        hub.changed.notify_all()
    while (masks := key_streams(asked, masking.names, bundles)) is None:
        look_round()
        if time.monotonic() - began_s > patience_s:
            raise RunStopped(
                f"the sum of round {version + 1} is still under masks: it has waited "
                f"{patience_s:g} s for {', '.join(asked.waits_for)}; bring the sites back and "
                "continue with --resume"
            )
        with hub.changed:
            hub.tick()
    with hub.changed:
        masking.present = None
    merged, sizes = merger.open(masks, masking.sizes.of(index, version))
    with hub.changed:
        masking.sizes.set(index, version + 1, sizes)
    return merged


def key_streams(
    asked: Unmasking, names: Sequence[str], bundles: Mapping[str, wire.MaskBundle]
) -> KeyStreams | None:
    """What takes a sum's masks off; None while shares are too few that are true.

    A `UserError` where a site's own shares are false, so that nobody can take its mask off.
    """
    given = dict(asked.shares)
    if len(given) < asked.needed:
        return None
    added: list[bytes] = []
    taken: list[bytes] = []
    for number, (site, bundle) in enumerate(bundles.items()):
        others = [name for name in names if name != site]
        for at, other in enumerate(["", *asked.missing]):
            part = slice(SHARE_BYTES * at, SHARE_BYTES * (at + 1))
            shares = {
                names.index(giver) + 1: share[number][part]
                for giver, share in given.items()
                if share[number]
            }
            expected = bundle.hashes[1 + others.index(other) if other else 0]
            seed = _put_together(shares, asked.needed, expected)
            if seed is None:
                if len(given) < len(bundles):
                    return None
                raise UserError(
                    f"the masks of {site} cannot be taken off: shares do not fit together, its own "
                    "or another site's; eject it and go on with --resume"
                )
            # What a site has added is taken off: its own mask, and those with sites after it.
            is_added = not other or names.index(site) < names.index(other)
            (taken if is_added else added).append(seed)
    return KeyStreams(added, taken)


def _put_together(shares: Mapping[int, bytes], least: int, expected: bytes) -> bytes | None:
    """The seed that shares make, if as many of them as are needed are true."""
    for some in islice(combinations(shares.items(), least), _MOST_TRIES):
        seed: bytes = Shamir.combine(list(some), ssss=False)
        if hash_of(seed) == expected:
            return seed
    return None
