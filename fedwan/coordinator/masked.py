"""Sums under masks: what the coordinator adds up unread, and reads once enough sites have agreed.

The seeds of the survivors' own masks, and of those that they share with sites that are not in the
sum, come in shares (`fedwan.protocol.unmasking`). Each is known by its hash: a site that gives a
false share is found out, and others' are taken.

A sum is on disk before anybody is asked: who signs a list of survivors signs no other one for that
version, so a coordinator that comes back goes on with the same sum.

Memory: one accumulator of the fragment's values, a byte each up to 8 bits on the wire, else two; as
much is written to disk each round.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import combinations
from pathlib import Path
from typing import TYPE_CHECKING

from Crypto.Protocol.SecretSharing import Shamir

from fedwan.codecs import Codec, Coded
from fedwan.codecs.masked import KeyStreams, Masked, Sum
from fedwan.coordinator.intake import Contribution, Measures
from fedwan.doctor.sampling import Sample, Sampler
from fedwan.errors import CheckpointError, RunStopped, UserError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.buffer import Buffer
from fedwan.protocol.round import Key, Merge, Round
from fedwan.protocol.unmasking import SHARE_BYTES, Unmasking, hash_of
from fedwan.state import (
    Layout,
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
_MOST_TRIES = 1_000
"""Groups of shares that are put together: all, or where there are more, some at random."""


class MaskedMerger:
    """Adds up the contributions to one fragment; as `merge.Merger`, but all count alike."""

    def __init__(self, layout: Layout, up: Codec, num_sites: int) -> None:
        self._sums = {name: Sum(spec, up.mask_bits, num_sites) for name, spec in layout.items()}
        self.sampler = Sampler({})
        self._count = 0
        self.is_saved = False
        """Whether what was added up is on disk."""

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
        files = _files(folder, round_.fragment)
        path = files[round_.version % len(files)]
        sums = {name: total.state() for name, total in self._sums.items()}
        meta = {
            "run_id": run_id,
            "fragment": round_.fragment.index,
            "version": round_.version,
            "sizes": {name: sizes for name, (_, sizes) in sums.items()},
            "merged": [_to_row(merge) for merge in round_.merged],
        }
        folder.mkdir(exist_ok=True)
        write_tensors(path, {name: values for name, (values, _) in sums.items()}, meta)
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


def _files(folder: Path, fragment: Fragment) -> list[Path]:
    """For its sums of two rounds, in turn: the newest checkpoint may give way to the other."""
    return [folder / f"{fragment.index}-{at}.safetensors" for at in range(2 * fragment.per_round)]


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
    _, work, _, payload_hash, signature, bundle = merge.contribution
    assert bundle is not None
    return {
        "site": merge.key.site,
        "work": work.SerializeToString().hex(),
        "bundle": bundle.SerializeToString().hex(),
        "payload": payload_hash,
        "signature": signature.hex(),
    }


def _from_row(row: Mapping[str, str], fragment: int, version: int) -> Merge[Contribution]:
    bundle = wire.MaskBundle.FromString(bytes.fromhex(row["bundle"]))
    work = wire.Work.FromString(bytes.fromhex(row["work"]))
    proof = row["payload"], bytes.fromhex(row["signature"])
    contribution = Contribution(Buffer(0), work, Measures({}, {}), *proof, bundle)
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

    The sum is in `folder` before anybody is asked. A `RunStopped` if they have not within
    `patience_s`, a `UserError` if a site's own shares are false.
    """
    masking, began_s = hub.masking, time.monotonic()
    assert masking is not None
    index, version = round_.fragment.index, round_.version
    if len(round_.merged) < masking.needed:
        raise UserError(
            f"of the contributions to round {version + 1}, {len(round_.merged)} can be added up, "
            f"and masks come off {masking.needed}: {hub.last_refusal}"
        )
    if not merger.is_saved:
        merger.save(folder, round_, masking.run_id)
    found = {m.key.site: m.contribution.bundle for m in round_.merged}
    # In the order of sites: one that was admitted again comes last otherwise.
    bundles = {name: bundle for name in masking.names if (bundle := found.get(name))}
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
    merged, sizes = merger.open(masks, masking.sizes(index, version))
    with hub.changed:
        masking.set_sizes(index, version + 1, sizes)
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
                    "or another site's, and no site gives others for this sum; begin another run "
                    "without it, from this one's weights (fedwan export, init.NETWORK=PATH)"
                )
            # What a site has added is taken off: its own mask, and those with sites after it.
            is_added = not other or names.index(site) < names.index(other)
            (taken if is_added else added).append(seed)
    return KeyStreams(added, taken)


def _put_together(shares: Mapping[int, bytes], least: int, expected: bytes) -> bytes | None:
    """The seed that shares make, if as many of them as are needed are true."""
    groups: Iterable[Sequence[tuple[int, bytes]]] = combinations(shares.items(), least)
    if math.comb(len(shares), least) > _MOST_TRIES:
        # In their order all of these would hold the first share, which may be the false one.
        rng, there = random.Random(0), list(shares.items())  # noqa: S311
        groups = (rng.sample(there, least) for _ in range(_MOST_TRIES))
    for some in groups:
        seed: bytes = Shamir.combine(list(some), ssss=False)
        if hash_of(seed) == expected:
            return seed
    return None
