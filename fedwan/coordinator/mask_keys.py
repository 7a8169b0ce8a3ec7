"""Who takes part in sums under masks: the sites' keys, what they round by, and who is asked what.

Every site's keys come with its Join, and all of them with the answer; they stay the same for the
whole run. `Masking` is part of the coordinator's hub, and its lock's owner calls it.
"""

from __future__ import annotations

import secrets
from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey

from fedwan.codecs.masked import check_maskable, first_sizes
from fedwan.errors import IdentityError, PayloadError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.tls import Identity
from fedwan.protocol.round import Key
from fedwan.protocol.unmasking import Unmasking, basis_of, check_bundle, keys_statement
from fedwan.state import Layout

_MOST_CERTIFICATE = 1 << 16


class Masking:
    """The sites' public keys, the sizes that they round by, and the sum whose masks come off."""

    def __init__(self, run_id: str, names: Sequence[str], needed: int) -> None:
        self.run_id = run_id
        self.names, self.needed = list(names), needed
        self.identity: Identity | None = None
        """The coordinator's, by whose authorities keys are vouched for; None within a process."""
        self.epoch = secrets.randbits(63) | 1
        """Of this start: what is sent anew goes under other masks."""
        self.present: Unmasking | None = None
        self.asked: dict[tuple[int, int], list[str]] = {}
        """Survivors by fragment and version, of sums that a checkpoint may not outlive yet; of the
        present one who is in it so far."""
        self.is_deciding = False
        """While the operator's decision on a site is written: nothing is added up meanwhile, or the
        site might be in a sum that it was not needed for."""
        self._cards: dict[str, wire.MaskCard] = {}
        self._sizes: dict[tuple[int, int], bytes] = {}

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

    def note_durable(self, versions: Sequence[int]) -> None:
        """Even if the newest checkpoint is lost, fragments go on from these versions."""
        self.asked = {(i, v): names for (i, v), names in self.asked.items() if v >= versions[i]}

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
        return basis_of(weights_sha256, self.sizes(fragment, version))

    def sizes(self, fragment: int, version: int) -> bytes:
        """What sites round a fragment's parameters by, in their order, 16 bits each.

        Empty where it is not known any more.
        """
        return self._sizes.get((fragment, version), b"")

    def set_sizes(self, fragment: int, version: int, sizes: Sequence[int]) -> None:
        """What the contributions to a version are to be rounded by; kept is the one before, too."""
        self._sizes[fragment, version] = np.array(sizes, "<u2").tobytes()
        self._sizes.pop((fragment, version - 2), None)

    def hear(self, site: str, answer: wire.Unmasked) -> None:
        """A site's part; a `PayloadError` where it has not signed what it was asked to."""
        if (present := self.present) is None or not present.asks(site, answer):
            return  # of an earlier question, say
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
        self._sizes = {(i, 0): first_sizes(part.layout) for i, part in enumerate(fragments)}
        if past:
            for name, card in past["cards"].items():
                self._cards[name] = wire.MaskCard.FromString(bytes.fromhex(card))
            self._sizes = {(i, v): bytes.fromhex(kept) for i, v, kept in past["sizes"]}

    def state(self) -> dict[str, Any]:
        """For a checkpoint."""
        cards = {name: card.SerializeToString().hex() for name, card in self._cards.items()}
        sizes = [(*key, kept.hex()) for key, kept in self._sizes.items()]
        return {"cards": cards, "sizes": sizes}
