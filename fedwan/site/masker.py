"""A site's masks: its keys of a run, the secrets of each contribution, and what it gives of them.

With every other site it agrees on a secret (X25519); of that come the seeds of the masks that the
two share, one for each version, which the one adds and the other takes away. A mask of its own lies
on top, of a new seed for each attempt to send. Seeds leave in shares, sealed for each site, with
the contribution. `answer` gives shares, of one list of survivors for a version and of no other, and
only once a quorum of all sites has signed it: what was given is on disk before it leaves.

Keys are this site's of this run, made here, in its folder; a certificate vouches for them.
"""

from __future__ import annotations

import hashlib
import json
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

from Crypto.Protocol.SecretSharing import Shamir
from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from filelock import FileLock

from fedwan.codecs import Codec
from fedwan.codecs.masked import SEED_BYTES, KeyStreams, bind
from fedwan.errors import IdentityError, PayloadError, UserError
from fedwan.files import replace_bytes, replace_text
from fedwan.link import wire_pb2 as wire
from fedwan.link.tls import Identity
from fedwan.protocol.unmasking import (
    LEAST_SITES,
    SHARE_BYTES,
    basis_of,
    digest_of,
    hash_of,
    keys_statement,
    statement,
)

_NONCE_BYTES = 12
_KEY = "masks.key"


class Masker:
    """One site's, in one run; `names` are those of all sites, of which `needed` agree on a sum."""

    def __init__(
        self, identity: Identity, run_id: str, names: Sequence[str], needed: int, folder: Path
    ) -> None:
        self._needed = needed
        self._identity, self._run_id, self._names = identity, run_id, list(names)
        self._place = self._names.index(identity.name)
        self._folder, path = folder, folder / _KEY
        if not path.exists():
            replace_bytes(path, secrets.token_bytes(64), 0o600)
        content = path.read_bytes()
        if len(content) != 64:
            raise _damaged(path)
        self._key = X25519PrivateKey.from_private_bytes(content[:32])
        self._signer = Ed25519PrivateKey.from_private_bytes(content[32:64])
        self._secrets: list[bytes] = []
        """Shared with each site; the one in this site's place is its own."""
        self._signers: dict[str, Ed25519PublicKey] = {}
        self._epoch = 0
        self._bases: dict[int, tuple[int, bytes]] = {}
        """By fragment, the version that was sealed last, and what all are to have alike there."""
        self._given = _Given(folder / "masks.jsonl")

    @staticmethod
    def holds(folder: Path) -> bool:
        """Whether a site has begun a run under masks here."""
        return (folder / _KEY).exists()

    def card(self) -> wire.MaskCard:
        """This site's public keys."""
        card = wire.MaskCard(
            site=self._identity.name,
            exchange_key=self._key.public_key().public_bytes_raw(),
            signing_key=self._signer.public_key().public_bytes_raw(),
            certificate=self._identity.cert_pem,
        )
        card.signature = self._identity.sign(keys_statement(self._run_id, card))
        return card

    def meet(self, roster: Sequence[wire.MaskCard], epoch: int) -> None:
        """Agree on secrets with all sites, whose keys stay the same for the whole run.

        An `IdentityError` where no certificate vouches for one, or it is not the one of before.
        """
        if [card.site for card in roster] != self._names:
            raise UserError(
                f"the coordinator names the sites {', '.join(card.site for card in roster)} where "
                f"the run's are {', '.join(self._names)}; masks are agreed on with all of them"
            )
        if len(roster) < LEAST_SITES:
            raise UserError(f"masks hide nothing between {len(roster)} sites; take {LEAST_SITES}")
        # Certificates may expire, and authorities be followed by others, while a run lasts.
        path = self._folder / "masks.roster"
        try:
            met = json.loads(path.read_text()) if path.exists() else {}
        except ValueError:
            raise _damaged(path) from None
        found = []
        for card in roster:
            keys = keys_statement(self._run_id, card)
            if card.site not in met:
                self._identity.verify(card.site, card.certificate, card.signature, keys)
                met[card.site] = keys.decode()
            elif met[card.site] != keys.decode():
                raise IdentityError(
                    f"site {card.site} is said to have other masking keys than before; ask whoever "
                    "runs it, and begin a new run if it has lost its folder"
                )
            is_own = card.site == self._identity.name
            try:
                theirs = X25519PublicKey.from_public_bytes(card.exchange_key)
                shared = self._key.private_bytes_raw() if is_own else self._key.exchange(theirs)
                self._signers[card.site] = Ed25519PublicKey.from_public_bytes(card.signing_key)
            except ValueError as error:
                raise IdentityError(f"site {card.site}'s masking keys are none: {error}") from None
            found.append(shared)
        replace_text(path, json.dumps(met))
        self._secrets, self._epoch = found, epoch

    def seal(
        self, codec: Codec, fragment: int, version: int, weights_sha256: str, sizes: bytes
    ) -> tuple[Codec, wire.MaskBundle]:
        """How the contribution to a version is coded, and its secrets' shares, which go with it.

        `weights_sha256` is of the fragment's global weights that it started from.
        """
        basis, at = basis_of(weights_sha256, sizes), (self._epoch, fragment, version)
        self._bases[fragment] = version, basis
        own = secrets.token_bytes(SEED_BYTES)
        seeds = [
            own if place == self._place else self._derive(place, f"mask {basis.hex()}", *at)
            for place in range(len(self._names))
        ]
        masks = KeyStreams(seeds[self._place :], seeds[: self._place])
        order = [own, *(seed for seed in seeds if seed is not own)]
        shares = [dict(Shamir.split(self._needed, len(seeds), seed, ssss=False)) for seed in order]
        hashed = [hash_of(seed) for seed in order]
        bundle = wire.MaskBundle(epoch=self._epoch, basis=basis, hashes=hashed)
        attempt = digest_of(bundle)
        for place in range(len(seeds)):
            content = b"".join(share[place + 1] for share in shares)
            nonce = secrets.token_bytes(_NONCE_BYTES)
            key = AESGCM(self._derive(place, f"shares of {self._place}", *at))
            bundle.sealed.append(nonce + key.encrypt(nonce, content, attempt))
        numbers = memoryview(sizes).cast("H")
        return bind(codec, len(seeds), list(numbers), masks), bundle

    def answer(self, asked: wire.Unmask) -> wire.Unmasked:
        """This site's part; a `PayloadError` says why it gives none."""
        reply = wire.Unmasked(fragment=asked.fragment, version=asked.version)
        said = statement(self._run_id, asked)
        names = list(asked.survivors)
        if names != [n for n in self._names if n in names] or len(asked.digests) != len(names):
            raise PayloadError(f"a sum of {names} is asked for, which are not this run's sites")
        if self._identity.name not in names or len(names) < self._needed:
            raise PayloadError(
                f"a sum of {', '.join(names)} alone is asked for; {self._needed} of "
                f"{len(self._names)} sites are the fewest, and this one must be among them"
            )
        if self._bases.get(asked.fragment) != (asked.version, asked.basis):
            raise PayloadError(
                f"a sum of version {asked.version} is asked for that starts from other weights, or "
                "is rounded otherwise, than what this site has sent"
            )
        if not asked.signers:
            self._given.note(asked, said)
            reply.signature = self._signer.sign(said)
            return reply
        self._check_signed(asked, said)
        if len(asked.sealed) != len(names):
            raise PayloadError("shares are asked for and not all are there")
        self._given.note(asked, said)
        at = asked.epoch, asked.fragment, asked.version
        for name, data, attempt in zip(names, asked.sealed, asked.digests, strict=True):
            place = self._names.index(name)
            key = AESGCM(self._derive(place, f"shares of {place}", *at))
            try:
                content = key.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], attempt)
            except (InvalidTag, ValueError):
                content = b""
            if len(content) != SHARE_BYTES * len(self._names):
                reply.shares.append(b"")  # none that this site could open: others have theirs
                continue
            others = [other for other in self._names if other != name]
            wanted = [0, *(1 + at for at, other in enumerate(others) if other not in names)]
            parts = [content[SHARE_BYTES * at : SHARE_BYTES * (at + 1)] for at in wanted]
            reply.shares.append(b"".join(parts))
        return reply

    def _check_signed(self, asked: wire.Unmask, said: bytes) -> None:
        valid = set()
        for name, signature in zip(asked.signers, asked.signatures, strict=False):
            with suppress(KeyError, InvalidSignature):
                self._signers[name].verify(signature, said)
                valid.add(name)
        if len(valid) < self._needed:
            raise PayloadError(
                f"a list of survivors is signed by {', '.join(sorted(valid)) or 'nobody'}; shares "
                f"are given where {self._needed} sites have signed it"
            )

    def _derive(self, place: int, what: str, epoch: int, fragment: int, version: int) -> bytes:
        """A key of 16 bytes that this site shares with the one in a place."""
        context = json.dumps(["fedwan", self._run_id, epoch, what, fragment, version])
        kdf = HKDF(hashes.SHA256(), SEED_BYTES, None, context.encode())
        return kdf.derive(self._secrets[place])


def _damaged(path: Path) -> UserError:
    return UserError(
        f"{path} is damaged: restore it from a copy, or have this site drained; what it sends "
        "under other keys could not be summed"
    )


class _Given:
    """What this site has signed, one list of survivors for a version, on disk."""

    def __init__(self, path: Path) -> None:
        self._path, self._lock = path, FileLock(path.with_suffix(".lock"))
        if not path.exists():
            replace_bytes(path, b"")  # its name is on disk before the first line

    def note(self, asked: wire.Unmask, statement: bytes) -> None:
        """Note a list, or refuse it: two sums tell what they differ in."""
        key, names = [asked.fragment, asked.version], list(asked.survivors)
        mine, before = [names, hashlib.sha256(statement).hexdigest()], None
        # Another process of this site, which outlives its successor's start, may sign as well.
        with self._lock, open(self._path, "a+", encoding="utf-8") as file:
            file.seek(0)
            for line in file:
                with suppress(ValueError):  # a torn line: what it tells of had not left
                    fragment, version, *said = json.loads(line)
                    before = said if [fragment, version] == key else before
            if before is None:
                # A line of its own, though the one before may be torn.
                file.write("\n" + json.dumps([*key, *mine]) + "\n")
                file.flush()
                os.fsync(file.fileno())
        if before not in (None, mine):
            raise PayloadError(
                f"version {asked.version} was summed over {', '.join(before[0])} before; another "
                f"sum of it, over {', '.join(names)}, would tell what single sites have sent; "
                "begin a new run from its weights (init.NETWORK=PATH)"
            )
