"""Masks that come off, whoever falls silent, and only of one sum."""

from __future__ import annotations

import random
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.codecs import codec_by_name
from fedwan.codecs.masked import first_sizes
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.masked import MaskedMerger, key_streams
from fedwan.errors import IdentityError, PayloadError, UserError
from fedwan.link import pki
from fedwan.link import wire_pb2 as wire
from fedwan.link.tls import Identity
from fedwan.protocol.unmasking import Unmasking, basis_of, check_bundle, majority
from fedwan.site import masker
from fedwan.site.masker import Masker
from fedwan.state import Layout, clone
from tests.support import spec

NAMES = ["s1", "s2", "s3", "s4", "s5"]
LAYOUT: Layout = {"net/a": spec((40,)), "net/b": spec((3, 3))}
SIZES = first_sizes(LAYOUT)
WEIGHTS = "5ha"
BASIS = basis_of(WEIGHTS, SIZES)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("masks")
    pki.federation(folder, [], NAMES)
    return folder


class Sites:
    """All sites of a run, and the payloads that they have sent."""

    def __init__(self, folder: Path, state: Path, epoch: int = 1, names: Sequence[str] = NAMES):
        self.names = list(names)
        self.codec = codec_by_name("masked4", len(names))
        self.maskers = {}
        for name in names:
            (state / name).mkdir(parents=True, exist_ok=True)
            identity = Identity.load(folder / name)
            self.maskers[name] = Masker(
                identity, "run", self.names, majority(len(names)), state / name
            )
        self.cards = [masker.card() for masker in self.maskers.values()]
        for each in self.maskers.values():
            each.meet(self.cards, epoch)

    def send(
        self, version: int, senders: Collection[str]
    ) -> tuple[MaskedMerger, dict[str, wire.MaskBundle], dict[str, Tensor]]:
        """A version's contributions: merged under masks, their bundles, and what they come to."""
        merger = MaskedMerger(LAYOUT, self.codec, len(self.names))
        bundles, total = {}, {name: torch.zeros(s.shape) for name, s in LAYOUT.items()}
        for name in self.names:
            if name not in senders:
                continue
            codec, bundles[name] = self.maskers[name].seal(self.codec, 0, version, WEIGHTS, SIZES)
            check_bundle(bundles[name], len(self.names))
            delta = {key: 0.01 * torch.randn(s.shape) for key, s in LAYOUT.items()}
            payload, owed = codec.encode(clone(delta), {}, LAYOUT)
            merger.add(self.codec.read_each(payload, LAYOUT))
            for key in LAYOUT:
                total[key] += delta[key] - owed[key]
        return merger, bundles, total

    def question(self, name: str, version: int, bundles: Mapping[str, wire.MaskBundle]) -> Any:
        """What a site is asked first of a version's sum."""
        question = Unmasking(NAMES, 3, 0, version, BASIS, bundles).question(name, 0, version + 1)
        assert question is not None
        return question

    def signed(self, bundles: Mapping[str, wire.MaskBundle]) -> tuple[Unmasking, wire.Unmask]:
        """Version 0, whose list three sites have signed, and what the fourth is asked then."""
        asked = Unmasking(NAMES, 3, 0, 0, BASIS, bundles)
        for name in NAMES[:3]:
            if (question := asked.question(name, 0, 1)) is not None:
                assert not question.sealed
                asked.hear(name, self.maskers[name].answer(question))
        question = asked.question("s4", 0, 1)
        assert question is not None and len(question.sealed) == len(NAMES)
        return asked, question

    def ask(self, asked: Unmasking, version: int, answering: Collection[str]) -> None:
        """Put both questions to some sites."""
        for _ in ("sign", "reveal"):
            for name in answering:
                if (question := asked.question(name, 0, version + 1)) is not None:
                    asked.hear(name, self.maskers[name].answer(question))


@pytest.fixture
def sites(folder: Path, tmp_path: Path) -> Sites:
    return Sites(folder, tmp_path)


def check(merger: MaskedMerger, masks: object, total: Mapping[str, Tensor], count: int) -> None:
    merged, _ = merger.open(masks, SIZES)  # type: ignore[arg-type]
    for name, value in total.items():
        assert torch.allclose(merged[name], value / count, atol=1e-7)


def test_masks_come_off_whoever_falls_silent(folder: Path, tmp_path: Path) -> None:
    sites, dice = Sites(folder, tmp_path), random.Random(3)
    for version in range(30):
        senders = [n for n in NAMES if dice.random() < 0.8] or NAMES
        if len(senders) < majority(len(NAMES)):
            senders = NAMES
        merger, bundles, total = sites.send(version, senders)
        asked = Unmasking(NAMES, 3, 0, version, BASIS, bundles)
        some = dice.sample(senders, dice.randint(2, len(senders)))
        sites.ask(asked, version, some)
        if len(some) < asked.needed:
            assert key_streams(asked, NAMES, bundles) is None
            assert set(asked.waits_for) == set(senders) - set(some)
            sites.ask(asked, version, senders)
        masks = key_streams(asked, NAMES, bundles)
        check(merger, masks, total, len(senders))


def test_a_version_is_summed_over_one_list_of_sites_alone(
    sites: Sites, folder: Path, tmp_path: Path
) -> None:
    _, bundles, _ = sites.send(7, NAMES)
    first = Unmasking(NAMES, 3, 0, 7, BASIS, bundles)
    sites.ask(first, 7, NAMES)
    fewer = {name: bundles[name] for name in NAMES[:4]}
    one_less = sites.question("s1", 7, fewer)
    with pytest.raises(PayloadError, match="summed over s1, s2, s3, s4, s5 before; another sum"):
        sites.maskers["s1"].answer(one_less)
    # Nor by another process of the site, or after another start of the coordinator.
    for epoch in (1, 2):
        again = Sites(folder, tmp_path, epoch)
        again.send(7, NAMES)  # as a process does that takes another's place
        assert [c.exchange_key for c in again.cards] == [c.exchange_key for c in sites.cards]
        with pytest.raises(PayloadError, match="another sum of it, over s1, s2, s3, s4, would"):
            again.maskers["s1"].answer(one_less)
        assert again.maskers["s1"].answer(again.question("s1", 7, bundles)).signature
    # The same sites' other payloads, under one start, would tell their difference.
    _, others, _ = sites.send(7, NAMES)
    with pytest.raises(PayloadError, match="another sum"):
        sites.maskers["s1"].answer(sites.question("s1", 7, others))


def test_shares_are_given_where_more_than_half_have_signed(sites: Sites) -> None:
    _, bundles, _ = sites.send(0, NAMES)
    _, question = sites.signed(bundles)
    for change in ("repeat", "forge", "drop"):
        forged = wire.Unmask()
        forged.CopyFrom(question)
        if change == "repeat":
            forged.signers[:] = ["s1"] * 3
            forged.signatures[:] = [question.signatures[0]] * 3
        elif change == "forge":
            forged.signatures[2] = bytes(64)
        else:
            del forged.signers[2:]
        with pytest.raises(PayloadError, match="shares are given where 3 sites have signed"):
            sites.maskers["s4"].answer(forged)
    sites.maskers["s1"].seal(sites.codec, 0, 1, WEIGHTS, bytes(4))
    with pytest.raises(PayloadError, match="starts from other weights, or is rounded otherwise"):
        sites.maskers["s1"].answer(sites.question("s1", 1, bundles))
    few = {name: bundles[name] for name in NAMES[:2]}
    with pytest.raises(PayloadError, match="a sum of s1, s2 alone is asked for; 3 of 5 sites"):
        sites.maskers["s1"].answer(sites.question("s1", 1, few))


def test_shares_of_another_attempt_are_not_given(sites: Sites) -> None:
    _, first, _ = sites.send(0, NAMES)
    _, second, _ = sites.send(0, NAMES)  # under the same masks with the others
    _, question = sites.signed(first)
    question.sealed[0] = second["s1"].sealed[NAMES.index("s4")]
    shares = sites.maskers["s4"].answer(question).shares
    assert shares[0] == b"" and all(len(share) == 16 for share in shares[1:])


def test_shares_of_another_number_or_length_are_refused(sites: Sites) -> None:
    _, bundles, _ = sites.send(0, NAMES)
    asked, question = sites.signed(bundles)
    answer = sites.maskers["s4"].answer(question)
    for shares in ([], [b"1" * 15, *answer.shares[1:]], answer.shares[1:]):
        if shares:
            with pytest.raises(PayloadError, match="shares of s4 are not as long as was asked for"):
                asked.hear("s4", wire.Unmasked(shares=shares))
        else:
            asked.hear("s4", wire.Unmasked())
        assert "s4" in asked.waits_for
    asked.hear("s4", answer)
    assert "s4" not in asked.waits_for


def test_a_site_that_signs_another_list_ends_nobody(sites: Sites) -> None:
    _, bundles, _ = sites.send(0, NAMES)
    masking = Masking("run", NAMES, 3)
    masking.epoch = 1
    for card in sites.cards:
        masking.keep(card.site, card)
    masking.present = asked = Unmasking(NAMES, 3, 0, 0, BASIS, bundles)
    with pytest.raises(PayloadError, match="s1 has signed another list of survivors"):
        masking.hear("s1", wire.Unmasked(signature=bytes(64)))
    for name in NAMES[1:4]:
        question = asked.question(name, 0, 1)
        assert question is not None
        masking.hear(name, sites.maskers[name].answer(question))
    assert asked.is_signed
    late = wire.Unmasked(fragment=0, version=0, signature=bytes(64))
    masking.present = Unmasking(NAMES, 3, 0, 1, BASIS, bundles)
    masking.hear("s1", late)  # of the question before: no fault of its
    assert "s1" in masking.present.waits_for


def test_a_record_of_what_was_given_bears_a_torn_line(folder: Path, tmp_path: Path) -> None:
    path = tmp_path / "s1" / "masks.jsonl"
    path.parent.mkdir()
    path.write_text('[1, 0, 3, ["s1"')
    again, orphans = Sites(folder, tmp_path), Sites(folder, tmp_path)
    _, bundles, _ = again.send(0, NAMES)
    again.maskers["s1"].answer(again.question("s1", 0, bundles))
    for others in (Sites(folder, tmp_path), orphans):  # of a later process, and of one beside it
        _, bundles, _ = others.send(0, NAMES[:4])
        with pytest.raises(PayloadError, match="another sum"):
            others.maskers["s1"].answer(others.question("s1", 0, bundles))


@pytest.mark.parametrize("name", ["masks.key", "masks.roster"])
def test_a_damaged_file_of_keys_is_named(name: str, folder: Path, tmp_path: Path) -> None:
    Sites(folder, tmp_path)
    path = tmp_path / "s2" / name
    path.write_bytes(path.read_bytes()[:-3])
    with pytest.raises(UserError, match=f"s2/{name} is damaged: restore it"):
        Sites(folder, tmp_path)


def test_who_gives_false_shares_is_found_out(sites: Sites) -> None:
    merger, bundles, total = sites.send(0, NAMES)
    asked = Unmasking(NAMES, 3, 0, 0, BASIS, bundles)
    sites.ask(asked, 0, NAMES[:3])
    asked.shares["s2"] = [bytes(16)] * len(NAMES)
    assert key_streams(asked, NAMES, bundles) is None  # and others are asked
    sites.ask(asked, 0, NAMES)
    check(merger, key_streams(asked, NAMES, bundles), total, len(NAMES))

    merger, bundles, total = sites.send(2, NAMES)  # s3 gives s1 and s2 what they cannot open
    for place in (0, 1):
        bundles["s3"].sealed[place] = bytes(len(bundles["s3"].sealed[place]))
    asked = Unmasking(NAMES, 3, 0, 2, BASIS, bundles)
    sites.ask(asked, 2, NAMES[:3])
    assert asked.shares["s1"][2] == asked.shares["s2"][2] == b""
    assert key_streams(asked, NAMES, bundles) is None
    sites.ask(asked, 2, NAMES)
    check(merger, key_streams(asked, NAMES, bundles), total, len(NAMES))

    _, bundles, _ = sites.send(1, NAMES)
    bundles["s3"].hashes[0] = bytes(16)  # of another seed than its shares are of
    asked = Unmasking(NAMES, 3, 0, 1, BASIS, bundles)
    sites.ask(asked, 1, NAMES)
    with pytest.raises(UserError, match="the masks of s3 cannot be taken off.* begin another run"):
        key_streams(asked, NAMES, bundles)


def test_keys_are_those_that_a_trusted_certificate_vouches_for(
    folder: Path, tmp_path: Path, foreign_identities: Path
) -> None:
    sites = Sites(folder, tmp_path / "a", names=NAMES[:3])
    fresh = Masker(Identity.load(folder / "s2"), "run", NAMES[:3], 2, _made(tmp_path / "b"))
    for forge in ("authority", "name", "run", "keys"):
        foreign = foreign_identities / "s1" if forge == "authority" else folder / "s1"
        run_id = "another" if forge == "run" else "run"
        other = Masker(Identity.load(foreign), run_id, NAMES[:3], 2, _made(tmp_path / forge)).card()
        if forge == "keys":
            other.exchange_key = sites.cards[1].exchange_key
        cards = [other, fresh.card(), sites.cards[2]]
        if forge == "name":
            cards[0].CopyFrom(sites.cards[2])
            cards[0].site = "s1"
        with pytest.raises(IdentityError, match="s1"):
            fresh.meet(cards, 1)
    with pytest.raises(UserError, match="names the sites s1, s2 where the run's are s1, s2, s3"):
        fresh.meet(sites.cards[:2], 1)
    fresh.meet([sites.cards[0], fresh.card(), sites.cards[2]], 1)
    lost = Masker(Identity.load(folder / "s1"), "run", NAMES[:3], 2, _made(tmp_path / "c"))
    with pytest.raises(IdentityError, match="other masking keys than before"):
        fresh.meet([lost.card(), fresh.card(), sites.cards[2]], 2)
    assert (tmp_path / "b" / "masks.key").stat().st_mode & 0o777 == 0o600


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True)
    return folder


@pytest.mark.parametrize("num", range(3, 64))
def test_no_two_lists_of_a_version_find_signers_of_their_own(num: int) -> None:
    assert num < 2 * majority(num) <= num + 2


def test_of_two_sites_each_would_know_the_other_s_part(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="masks hide nothing between 2 sites; take 3"):
        Sites(folder, tmp_path, names=NAMES[:2])


def test_no_mask_is_used_for_a_second_start_fragment_version_or_basis(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    sites, used = Sites(folder, tmp_path), list[bytes]()
    monkeypatch.setattr(masker, "KeyStreams", lambda *seeds: used.extend(sum(seeds, [])))
    first = sites.maskers["s1"]
    for epoch, fragment, version, weights in (
        *((1, 0, 0, WEIGHTS), (1, 1, 0, WEIGHTS), (1, 0, 1, WEIGHTS)),
        *((1, 0, 0, "other"), (2, 0, 0, WEIGHTS)),
    ):
        first.meet(sites.cards, epoch)
        first.seal(sites.codec, fragment, version, weights, SIZES)
    assert len(used) == len({*used}) == 5 * len(NAMES)
