"""Whole runs under masks, and contributions whose masks would not come off."""

from __future__ import annotations

import shutil
from pathlib import Path
from threading import Condition
from types import SimpleNamespace
from typing import Any

import pytest
from Crypto.Protocol.SecretSharing import Shamir

from fedwan.config import Config
from fedwan.coordinator import members
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.masked import MaskedMerger, _put_together, take_masks_off
from fedwan.errors import ConfigError, PayloadError, UserError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.link.loopback import LoopbackLink
from fedwan.link.tls import Identity
from fedwan.protocol.registry import Registry
from fedwan.protocol.round import Key
from fedwan.protocol.unmasking import hash_of
from fedwan.simulation import Absence
from fedwan.site.masker import Masker
from tests.planes import Bench, Wires, header_of, layout_of_size, payload_of
from tests.support import GAN, NET, DyingLink, Stopped, run_tiny, tiny_config


def config_of(strategy: str = "diloco", **sections: Any) -> Config:
    sections.setdefault("codec", {"up": "masked6"})
    sections = {"steps": 24} | sections
    return tiny_config(strategy, sites=3, **sections)


@pytest.mark.slow
def test_all_sites_end_on_the_same_weights_and_so_does_a_run_that_was_resumed(
    tmp_path: Path,
) -> None:
    config = config_of()
    whole_run = run_tiny(tmp_path / "a", config)
    (sha256,) = whole_run.hashes
    rows = whole_run.rounds()
    assert len(rows) == 36 and not any(row["cosines"] or row["norms"] for row in rows)

    config.checkpoint.every = 1
    with pytest.raises(Stopped):
        run_tiny(
            tmp_path / "b",
            config,
            wrap=lambda name, link: DyingLink(link, 5) if name == "s2" else link,
        )
    again = run_tiny(tmp_path / "b", config, resume=True)
    assert again.hashes == {sha256}
    exact = run_tiny(tmp_path / "c", config_of(codec={"up": "fp32"}))
    distance = sum(float((exact.state[n] - v).square().sum()) for n, v in whole_run.state.items())
    length = sum(float(v.square().sum()) for v in exact.state.values())
    assert distance < 1e-3 * length


@pytest.mark.slow
def test_a_sum_that_sites_have_been_asked_about_outlives_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = config_of()
    config.checkpoint.every = 1
    (sha256,) = run_tiny(tmp_path / "a", config).hashes
    opening, adding, opened, added = MaskedMerger.open, MaskedMerger.add, [0], [0]

    class Killed(Exception):  # noqa: N818
        pass

    def open_or_die(self: MaskedMerger, *args: Any) -> Any:
        opened[0] += 1
        if opened[0] == 4:
            raise Killed
        return opening(self, *args)

    def count(self: MaskedMerger, *args: Any) -> Any:
        added[0] += 1
        return adding(self, *args)

    monkeypatch.setattr(MaskedMerger, "open", open_or_die)
    with pytest.raises(Killed):
        run_tiny(tmp_path / "b", config)
    monkeypatch.setattr(MaskedMerger, "add", count)
    shutil.copytree(tmp_path / "b", tmp_path / "c")
    assert run_tiny(tmp_path / "b", config, resume=True).hashes == {sha256}
    assert added[0] == 3 * (12 - 4)
    path = tmp_path / "c" / "masked" / "0-1.safetensors"
    *whole, last = path.read_bytes()  # random: any given byte may be there already
    path.write_bytes(bytes([*whole, last ^ 1]))
    with pytest.raises(PayloadError, match="version 3 was summed over s1, s2, s3 before; another"):
        run_tiny(tmp_path / "c", config, resume=True)


@pytest.mark.slow
def test_all_sums_of_a_network_that_travels_more_often_outlive_the_coordinator(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    networks = {"discriminator": {"h": 2}}
    codec = {"up": "masked6"}
    config = tiny_config("diloco", GAN, sites=3, h=8, steps=32, codec=codec, network=networks)
    opening, opened = MaskedMerger.open, [0]

    def open_or_die(self: MaskedMerger, *args: Any) -> Any:
        opened[0] += 1
        if opened[0] == 9:
            raise ZeroDivisionError
        return opening(self, *args)

    monkeypatch.setattr(MaskedMerger, "open", open_or_die)
    with pytest.raises(ZeroDivisionError):
        run_tiny(tmp_path, config)
    assert len(run_tiny(tmp_path, config, resume=True).hashes) == 1


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["streaming_diloco", "local_sgd"])
def test_a_round_does_without_a_site_that_is_gone(tmp_path: Path, strategy: str) -> None:
    h = 4 if strategy == "streaming_diloco" else 2
    cut = {"stream": {"fragments": 2, "tau": 1}} if h == 4 else {}
    rounds = {"quorum": 2, "patience_s": 60}
    config = config_of(strategy, h=h, steps=20 * h, round=rounds, **cut)
    ran = run_tiny(tmp_path, config, absences={"s2": Absence(1 / 3, 2 / 3)})
    assert len(ran.hashes) == 1
    of_each = [len(ran.rounds(site)) for site in ("s1", "s2", "s3")]
    assert min(of_each) > 0 and sum(of_each) < 3 * 20 * (2 if cut else 1)


def test_a_contribution_whose_masks_would_not_come_off_is_refused() -> None:
    names = ["s1", "s2", "s3"]
    masking = Masking("run", names, 2)
    layout = layout_of_size(8)
    masking.begin(layout, whole(layout), None)
    good = wire.MaskBundle(epoch=masking.epoch, sealed=[bytes(76)] * 3, hashes=[bytes(16)] * 3)
    good.basis = masking.basis(0, 0, "of s1")
    masking.check(Key(0, 0, "s1"), good, "of s1")
    with pytest.raises(PayloadError, match="starts from other weights than version 0's, or is"):
        masking.check(Key(0, 0, "s1"), good, "of the run")
    good.basis += bytes(1 << 20)
    with pytest.raises(PayloadError, match="without the shares that take its masks off"):
        masking.check(Key(0, 0, "s1"), good, "")
    good.basis = good.basis[:32]
    good.epoch += 1
    with pytest.raises(PayloadError, match="masks of another start of the coordinator"):
        masking.check(Key(0, 0, "s1"), good, "of s1")
    del good.sealed[0]
    with pytest.raises(PayloadError, match="without the shares that take its masks off"):
        masking.check(Key(0, 0, "s1"), good, "of s1")
    assert "keys are missing" in masking.objection("s1", wire.MaskCard(site="s1"))


def test_keys_that_would_end_other_sites_are_refused(
    tmp_path: Path, identities: Path, foreign_identities: Path
) -> None:
    names = ["s1", "s2", "s3"]
    masking = Masking("run", names, 3)
    own = tmp_path / "own"
    shutil.copytree(identities / "coordinator", own)
    masking.identity = Identity.load(own, "coordinator")

    def card_of(folder: Path, name: str) -> wire.MaskCard:
        (state := tmp_path / name).mkdir()
        return Masker(Identity.load(folder / "s1"), "run", names, 3, state).card()

    good, foreign = card_of(identities, "a"), card_of(foreign_identities, "b")
    assert not masking.objection("s1", good)
    assert "of no authority that is trusted here" in masking.objection("s1", foreign)
    other = wire.MaskCard()
    other.CopyFrom(good)
    other.signing_key = foreign.signing_key
    assert "does not vouch for what s1 is said to send" in masking.objection("s1", other)
    other.exchange_key = bytes(32)  # with which every secret would be nought
    assert "masking keys are refused" in masking.objection("s1", other)
    both = [(folder / "s1" / "ca.crt").read_bytes() for folder in (identities, foreign_identities)]
    (own / "ca.crt").write_bytes(b"".join(both))  # a second authority takes over, in mid-run
    assert not masking.objection("s1", foreign) and not masking.objection("s1", good)


@pytest.mark.slow
def test_over_real_connections_a_run_under_masks_ends_on_the_same_bits(
    tmp_path: Path, identities: Path
) -> None:
    config = config_of("streaming_diloco", h=4, stream={"fragments": 2, "tau": 1})
    with Wires(identities) as wires:
        ran = run_tiny(tmp_path / "wire", config, wrap=wires.wrap)
    (sha256,) = ran.hashes
    assert run_tiny(tmp_path / "loop", config).hashes == {sha256}


def test_an_operator_cannot_let_go_of_a_site_whose_shares_are_needed() -> None:
    registry = Registry(["s1", "s2", "s3"], 10.0)
    registry.least = 3
    for verb in ("drain", "eject"):
        assert "without s2 there are 2 sites, and 3 take the masks off" in registry.objection(
            verb, "s2"
        )
    registry.least = 2
    assert not registry.objection("eject", "s2")
    masking = Masking("run", ["s1", "s2", "s3"], 2)
    assert "s2 has not joined yet, and masks are agreed on" in masking.needs("s2", ["s1", "s3"])
    masking.keep("s2", wire.MaskCard(site="s2"))
    masking.asked[0, 4] = ["s2", "s3"]
    assert "to take the masks off round 5; ask again" in masking.needs("s2", ["s1", "s3"])
    masking.asked[1, 9] = ["s2", "s3"]  # of a network that travels twice a round
    masking.note_durable([5, 9])
    assert "to take the masks off round 10" in masking.needs("s2", ["s1", "s3"])
    masking.note_durable([5, 10])
    assert not masking.needs("s2", ["s1", "s3"])


@pytest.mark.parametrize(
    ("strategy", "sections", "message"),
    [
        ("scaffnew", {}, "does not go with strategy 'scaffnew'.* set strategy=diloco"),
        ("async_diloco", {}, "does more with contributions than to add them up"),
        (
            "diloco",
            {"round": {"least_steps": 1}},
            "or local_sgd and round.least_steps=0, or codec.up=int4",
        ),
        ("diloco", {"round": {"merge": "median"}}, "round.merge = 'median' reads"),
        ("diloco", {"checkpoint": {"every": 3}}, "summed twice under masks.* checkpoint.every=1"),
        ("diloco", {"round": {"quorum": 1}}, "more than half of all sites.* set round.quorum=2"),
    ],
)
def test_masks_go_where_contributions_are_added_up(
    strategy: str, sections: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        config_of(strategy, **sections)
    with pytest.raises(ConfigError, match="sites = 2; set sites=3"):
        tiny_config("diloco", sites=2, codec={"up": "masked4"})


def test_running_statistics_are_no_sum(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="running statistics.* use networks without batch norm"):
        run_tiny(tmp_path, config_of(inner=NET), norm=True)


def test_a_site_that_was_admitted_again_does_not_change_the_order_of_a_sum(tmp_path: Path) -> None:
    names = ["s1", "s2", "s3"]
    merged = [
        SimpleNamespace(
            key=Key(0, 4, site), contribution=SimpleNamespace(bundle=wire.MaskBundle(epoch=7))
        )
        for site in ("s2", "s1", "s3")
    ]
    masking = Masking("run", names, 2)
    masking.basis = lambda *_: b""  # type: ignore[method-assign]
    hub: Any = SimpleNamespace(masking=masking, changed=Condition())
    round_: Any = SimpleNamespace(fragment=SimpleNamespace(index=0), version=4, merged=merged)

    def look() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        take_masks_off(hub, round_, "", SimpleNamespace(is_saved=True), tmp_path, look, 1.0)  # type: ignore[arg-type]
    assert masking.present is not None
    asked = masking.present.question("s1", 0, 5)
    assert asked is not None and list(asked.survivors) == names


def test_who_is_in_the_present_sum_is_needed_for_it() -> None:
    masking = Masking("run", ["s1", "s2", "s3"], 2)
    for name in masking.names:
        masking.keep(name, wire.MaskCard(site=name))
    merges = [SimpleNamespace(key=Key(0, 4, name)) for name in ("s1", "s3")]
    round_ = SimpleNamespace(fragment=SimpleNamespace(index=0), version=4, merged=merges)
    hub: Any = SimpleNamespace(
        changed=Condition(),
        registry=SimpleNamespace(absent=lambda now_s: [], moved_s=0.0),
        _look=lambda: 0.0,
        rounds=SimpleNamespace(advance=lambda *_: ("wait", merges), present=round_),
        live=lambda: masking.names,
        masking=masking,
        _of_present_weights=lambda merges: merges,
    )
    assert not masking.needs("s1", ["s2", "s3"])
    Federation.advance(hub)
    assert "is needed to take the masks off round 5" in masking.needs("s1", ["s2", "s3"])
    assert not masking.needs("s2", ["s1", "s3"])


def test_what_came_before_its_weights_were_known_is_compared_with_them_later() -> None:
    masking = Masking("run", ["s1", "s2", "s3"], 2)
    masking.set_sizes(0, 4, [3])
    merges, refused, left_out = [], [], []
    for site, weights in (("s1", "right"), ("s2", "other"), ("s3", "right")):
        bundle = wire.MaskBundle(epoch=masking.epoch, basis=masking.basis(0, 4, weights))
        bundle.sealed[:], bundle.hashes[:] = [bytes(76)] * 3, [hash_of(b"")] * 3
        merges.append(
            SimpleNamespace(
                key=Key(0, 4, site), contribution=SimpleNamespace(bundle=bundle, work=wire.Work())
            )
        )
    hub: Any = SimpleNamespace(
        masking=masking,
        model=SimpleNamespace(known_hash=lambda *_: "right"),
        rounds=SimpleNamespace(leave_out=left_out.append),
        refuse_contribution=lambda key, why, work: refused.append((key.site, why)),
    )
    assert Federation._of_present_weights(hub, merges) == [merges[0], merges[2]]  # type: ignore[arg-type]
    assert left_out == [merges[1]]
    assert refused[0][0] == "s2" and "starts from other weights than version 4's" in refused[0][1]
    # Of so few nobody could take the masks off.
    hub.changed, hub.last_refusal = Condition(), "contribution of s2 refused"
    round_: Any = SimpleNamespace(fragment=SimpleNamespace(index=0), version=4, merged=merges[:1])
    with pytest.raises(
        UserError, match="round 5, 1 can be added up, and masks come off 2: contribution"
    ):
        take_masks_off(hub, round_, "", SimpleNamespace(is_saved=True), Path(), print, 1.0)  # type: ignore[arg-type]


def contributing(folder: Path, *sites: str) -> Bench:
    """A round that has begun, and whole contributions of these sites."""
    bench = Bench(folder)
    for site in bench.registry.sites:
        bench.hub.join(site, bench.hello(site))
    with bench.hub.changed:
        bench.rounds.begin(0.0)
    for site in sites:
        link, payload = LoopbackLink(bench.hub, site), payload_of(1.0, bench.layout)
        link.join(bench.hello(site))
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
    bench.hub.masking = Masking("run", list(bench.registry.sites), 2)
    bench.registry.least = 2
    for site in bench.registry.sites:
        bench.hub.masking.keep(site, wire.MaskCard(site=site))
    return bench


def test_what_a_drained_site_has_sent_and_nobody_has_added_up_is_in_no_sum(tmp_path: Path) -> None:
    bench = contributing(tmp_path, "s3")
    run: Any = SimpleNamespace(hub=bench.hub)
    told = members.answer(run, {"ask": "drain", "site": "s3"})
    assert told["text"] == "s3 is out; nothing more of it is taken"
    assert bench.registry.sites["s3"].standing == "drained"
    assert bench.contribution("s3") is None
    assert bench.rounds.round is not None and bench.rounds.round.waiting == ["s1", "s2"]


def test_nothing_is_added_up_while_a_decision_on_a_site_is_written(tmp_path: Path) -> None:
    bench = contributing(tmp_path, "s1")
    found = []

    def write(*_: Any, **__: Any) -> None:
        found.append(bench.hub.advance())

    bench.hub.event = write  # type: ignore[method-assign]
    members.answer(SimpleNamespace(hub=bench.hub), {"ask": "eject", "site": "s1"})  # type: ignore[arg-type]
    assert found == [("wait", [])] and bench.contribution("s1") is None
    assert bench.hub.masking and not bench.hub.masking.is_deciding, "the others are waited for"


@pytest.mark.parametrize("num", [5, 20])
def test_a_false_share_that_comes_first_is_found_out(num: int) -> None:
    seed, least = bytes(range(16)), num // 2 + 1
    shares = dict(Shamir.split(least, num, seed, ssss=False))
    shares[1] = bytes(16)
    assert _put_together(shares, least, hash_of(seed)) == seed
    few = {number: shares[number] for number in range(1, least + 1)}
    assert _put_together(few, least, hash_of(seed)) is None


def test_neither_of_a_site_s_keys_changes_while_a_run_lasts() -> None:
    masking = Masking("run", ["s1", "s2", "s3"], 2)
    keys = {"exchange_key": bytes(32), "signing_key": bytes(32)}
    for certificate in (b"", b"renewed"):
        card = wire.MaskCard(site="s1", certificate=certificate, **keys)
        assert not masking.conflict("s1", card)
        masking.keep("s1", card)
    for name in keys:
        card = wire.MaskCard(site="s1", **keys | {name: b"1" * 32})
        assert "other masking keys than the run began with" in masking.conflict("s1", card)
