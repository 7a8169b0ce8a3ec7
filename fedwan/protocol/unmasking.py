"""Taking the masks off a round's sum: whom the coordinator asks what, as a state machine.

    survivors   the sites whose contributions are added up, once the round is closed
    sign        each is asked to sign this list, and signs one for a version only
    reveal      who sees that a quorum has signed the list gives its shares: of the seeds of
                survivors' own masks, and of those that survivors have with who is none

So no coordinator can have a site's own mask from some and its masks with others from the rest. A
run's quorum, more than half of all sites, suffices for either answer; others that fall silent
meanwhile are not waited for. After Bonawitz et al. 2017 ("Practical secure aggregation"), figure 4,
for active adversaries; but masks with who drops out are seeds of one version, which every survivor
has shared beforehand, so that no key is ever given away. Not locked.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence

from fedwan.errors import PayloadError
from fedwan.link import wire_pb2 as wire

LEAST_SITES = 3
"""Of two, each knows the other's part of a sum."""
SHARE_BYTES = 16
SIGNATURE_BYTES = 64


def majority(num_sites: int) -> int:
    """The fewest sites that may be asked to sign a list, and for shares.

    Two lists of one version, each signed by q of N sites, have 2 q - N signers in common.
    """
    return num_sites // 2 + 1


def hash_of(seed: bytes) -> bytes:
    """What a seed that was put together again must hash to."""
    return hashlib.sha256(b"fedwan seed" + seed).digest()[:SHARE_BYTES]


def digest_of(bundle: wire.MaskBundle) -> bytes:
    """What stands for one contribution's secrets in a list of survivors, and seals their shares.

    Each attempt to send has a seed of its own, so that shares of another one do not open under it.
    """
    what = [bundle.epoch, bundle.basis.hex(), [seed.hex() for seed in bundle.hashes]]
    return hashlib.sha256(json.dumps(["fedwan attempt", *what]).encode()).digest()


def keys_statement(run_id: str, card: wire.MaskCard) -> bytes:
    """What a site's certificate vouches for: its keys of a run."""
    keys = [card.exchange_key.hex(), card.signing_key.hex()]
    return json.dumps(["fedwan masks", run_id, card.site, *keys]).encode()


def basis_of(weights_sha256: str, sizes: bytes) -> bytes:
    """What all contributions to a version have alike: who differs has masks that do not come off.

    A coordinator that gave sites other weights, or had them round to nothing, could else arrange
    that a sum is one site's part (Pasquini et al. 2022, 2111.07380).
    """
    return hashlib.sha256(weights_sha256.encode() + sizes).digest()


def statement(run_id: str, asked: wire.Unmask) -> bytes:
    """What sites sign: whose contributions are added up, of which version."""
    digests = [digest.hex() for digest in asked.digests]
    what = [run_id, asked.epoch, asked.fragment, asked.version, asked.basis.hex()]
    what += [list(asked.survivors), digests]
    return json.dumps(["fedwan survivors", *what]).encode()


def check_bundle(bundle: wire.MaskBundle, num_sites: int) -> None:
    """Refuse one that has not what so many sites need."""
    sealed = {len(data) for data in bundle.sealed}
    hashes = {len(data) for data in bundle.hashes}
    lengths = (len(bundle.sealed), len(bundle.hashes), len(bundle.basis))
    expected = (num_sites, num_sites, hashlib.sha256().digest_size)
    if lengths != expected or hashes != {SHARE_BYTES} or len(sealed) != 1:
        raise PayloadError("contribution comes without the shares that take its masks off")
    if max(sealed) > (num_sites + 2) * SHARE_BYTES:
        raise PayloadError(f"a share of {max(sealed)} bytes; {num_sites} sites need less")


class Unmasking:
    """Of one round."""

    def __init__(
        self,
        names: Sequence[str],
        needed: int,
        fragment: int,
        version: int,
        basis: bytes,
        bundles: Mapping[str, wire.MaskBundle],
    ) -> None:
        """`bundles` of the survivors, in the order of `names`."""
        self._names = list(names)
        self._bundles = bundles
        self._asked = wire.Unmask(
            fragment=fragment,
            version=version,
            basis=basis,
            survivors=bundles,
            digests=[digest_of(bundle) for bundle in bundles.values()],
            epoch=next(iter(bundles.values())).epoch,
        )
        self._signatures: dict[str, bytes] = {}
        self.shares: dict[str, list[bytes]] = {}
        """By site that gave them: of each survivor its seed's, and those with `missing`; empty
        where what that survivor had sealed for the site is none."""
        self.needed = needed
        """Sites that must sign, and give shares."""
        self.missing = [name for name in names if name not in bundles]

    @property
    def waits_for(self) -> list[str]:
        """Survivors that have not answered the question that is open."""
        answered = self.shares if self.is_signed else self._signatures
        return [name for name in self._bundles if name not in answered]

    @property
    def is_signed(self) -> bool:
        """Whether the list is."""
        return len(self._signatures) >= self.needed

    def question(self, site: str, fragment: int, version: int) -> wire.Unmask | None:
        """What a site that waits for the update of a version is asked, if it has not answered."""
        is_of_it = (fragment, version) == (self._asked.fragment, self._asked.version + 1)
        if not is_of_it or site not in self.waits_for:
            return None
        asked = wire.Unmask()
        asked.CopyFrom(self._asked)
        if self.is_signed:
            asked.signers.extend(self._signatures)
            asked.signatures.extend(self._signatures.values())
            place = self._names.index(site)
            asked.sealed.extend(bundle.sealed[place] for bundle in self._bundles.values())
        return asked

    def statement(self, run_id: str) -> bytes:
        """What is signed."""
        return statement(run_id, self._asked)

    def asks(self, site: str, answer: wire.Unmasked) -> bool:
        """Whether this is an answer to the question that is open, and the site's first."""
        key = answer.fragment, answer.version
        return key == (self._asked.fragment, self._asked.version) and site in self.waits_for

    def hear(self, site: str, answer: wire.Unmasked) -> None:
        """Take an answer that was asked for, whose signature was checked if it has one."""
        if not self.is_signed:
            if len(answer.signature) == SIGNATURE_BYTES:
                self._signatures[site] = answer.signature
            return
        if not answer.shares:
            return
        lengths = {0, SHARE_BYTES * (1 + len(self.missing))}
        is_of_each = len(answer.shares) == len(self._bundles)
        if not is_of_each or not lengths.issuperset(map(len, answer.shares)):
            raise PayloadError(f"shares of {site} are not as long as was asked for")
        self.shares[site] = list(answer.shares)
