"""Private sites: clipped, noised as the accountant asks, the same again after a kill."""

from __future__ import annotations

import math
import secrets
from collections.abc import Mapping
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from scipy.stats import norm
from torch import Tensor

from fedwan.app import load_run
from fedwan.config import Config, PrivacyConfig
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.intake import Contribution, Measures
from fedwan.coordinator.model import CHECKPOINT, GlobalModel
from fedwan.coordinator.site_privacy import SitePrivacy
from fedwan.errors import ConfigError
from fedwan.fragments import whole
from fedwan.link import wire_pb2 as wire
from fedwan.privacy import EPSILON, Spending
from fedwan.protocol.round import Key, Merge, Round
from fedwan.state import Role, State, read_tensors_meta, state_of
from tests.support import (
    GAN,
    NET,
    Killed,
    Ran,
    RewritingLink,
    encoded,
    killed_after,
    random_state,
    run_tiny,
    same_bits,
    spec,
    tiny_config,
)

LAYOUT = {"d/w": spec((300, 200)), "g/w": spec((60_000,))}
CLIP = 0.25
NO_MEASURES = Measures({}, {})


def config_of(strategy: str = "local_sgd", inner: Any = NET, **sections: Any) -> Config:
    privacy = {"epsilon": 8.0, "unit": f"site:{CLIP}"}
    sections = {"sites": 3, "steps": 12, "privacy": privacy} | sections
    return tiny_config(strategy, inner, **sections)


def privacy_of(**settings: Any) -> SitePrivacy:
    config = Config(sites=3, steps=60, h=2, privacy=PrivacyConfig(8.0, f"site:{CLIP}"))
    config.privacy = PrivacyConfig(**vars(config.privacy) | settings)
    return SitePrivacy(config, LAYOUT, whole(LAYOUT))


def round_of(version: int = 4, seeds: tuple[int, ...] = (1, 2, 3)) -> Round[Contribution]:
    (fragment,) = whole(LAYOUT)
    payloads: list[Any] = [encoded(random_state(seed, LAYOUT), LAYOUT) for seed in seeds]
    merged = [
        Merge(
            Key(0, version, f"s{seed}"),
            Contribution(payload, wire.Work(), NO_MEASURES, f"{payload.checksum:x}"),
            0,
            1.0,
        )
        for seed, payload in zip(seeds, payloads, strict=True)
    ]
    return Round(fragment, version, 0.0, False, {}, merged=merged)


def noise_of(privacy: SitePrivacy, round_: Round[Contribution]) -> State:
    merged = {name: torch.zeros(spec.shape) for name, spec in LAYOUT.items()}
    privacy.make_private(merged, round_)
    return merged


def test_noise_on_the_sum_has_the_deviation_that_the_accountant_asked_for() -> None:
    privacy, round_ = privacy_of(), round_of()
    noise = noise_of(privacy, round_)
    for value in noise.values():
        assert float(3 * value.std()) == pytest.approx(privacy.noise * CLIP, rel=0.02)
    assert not torch.equal(noise["d/w"].flatten()[:100], noise["g/w"][:100])
    figures = [merge.contribution.work.figures[EPSILON] for merge in round_.merged]
    assert figures == [privacy.epsilon()] * 3 and privacy.steps == 1
    of_two = noise_of(privacy, round_of(seeds=(1, 2)))["g/w"]  # the third was ejected
    assert float(2 * of_two.std()) == pytest.approx(privacy.noise * CLIP, rel=0.02)


@pytest.mark.parametrize(
    ("epsilon", "delta", "steps"), [(8, 1e-5, 60), (1, 1e-6, 600), (50, 0.01, 2)]
)
def test_what_is_spent_is_little_more_than_the_exact_bound(
    epsilon: float, delta: float, steps: int
) -> None:
    """Of T steps of which all sites take part, one of noise s / √T (Balle and Wang 2018)."""
    spending = Spending(PrivacyConfig(epsilon, "site", delta), 3, "sites", 1.0, steps)
    spending.steps = steps

    def exact(bound: float) -> float:
        one = spending.noise / math.sqrt(steps)
        parts = norm.cdf([1 / (2 * one) - bound * one, -1 / (2 * one) - bound * one])
        return float(parts[0] - math.exp(bound) * parts[1])

    assert epsilon - 0.011 <= spending.epsilon() <= epsilon
    assert exact(spending.epsilon()) <= delta, "never less than what is true"
    assert exact(0.9 * spending.epsilon()) > delta


def test_noise_comes_again_for_the_same_contributions_to_the_same_version_alone() -> None:
    """Two sums under the same noise would tell their difference."""
    privacy = privacy_of()
    first = noise_of(privacy, round_of())["g/w"]
    assert torch.equal(noise_of(privacy, round_of())["g/w"], first)
    sent_else = round_of()
    key, contribution, staleness, scale = sent_else.merged[1]
    sent_else.merged[1] = Merge(key, contribution._replace(payload_hash="else"), staleness, scale)
    for other in (round_of(5), round_of(seeds=(1, 2, 4)), round_of(seeds=(1, 2)), sent_else):
        assert not torch.equal(noise_of(privacy, other)["g/w"], first)
    other_run = privacy_of()
    assert not torch.equal(noise_of(other_run, round_of())["g/w"], first)
    other_run.resume(privacy.state_dict(), 1, 0)
    assert torch.equal(noise_of(other_run, round_of())["g/w"], first)
    assert other_run.steps == privacy.steps + 2


def test_versions_that_a_damaged_checkpoint_had_are_spent(tmp_path: Path) -> None:
    config = config_of()
    with killed_after(4):
        run_tiny(tmp_path, config)
    path = tmp_path / "checkpoint" / CHECKPOINT
    for times in (1, 2):  # of the second, the older checkpoint is the same
        path.write_bytes(path.read_bytes()[:-1])
        with killed_after(4) if times == 1 else nullcontext():
            again = run_tiny(tmp_path, config, resume=True)
    assert read_tensors_meta(path)["privacy"]["steps"] == again.result.model.version + 2


@pytest.mark.slow
def test_no_site_moves_the_mean_by_more_than_the_clip_whatever_it_sends(tmp_path: Path) -> None:
    def moved(sent: float) -> Tensor:
        def change(_: object, name: str, value: Tensor, __: Role) -> Tensor:
            return sent * value

        def wrap(name: str, link: Any) -> Any:
            return RewritingLink(link, change) if name == "s2" else link

        config = config_of(inner=GAN, steps=2)
        with patch.object(Spending, "add_noise", lambda *_: None):
            ran = run_tiny(tmp_path / str(sent), config, wrap=wrap)
        row = next(row for row in ran.result.records if row.get("event") == "contribution")
        assert row["weight"] <= 1.0
        return torch.cat([value.flatten() for value in ran.state.values()])

    plain, nothing, long = (moved(sent) for sent in (1.0, 0.0, 1e6))
    assert 0 < float((long - nothing).norm()) <= 1.0001 * CLIP / 3
    assert float((long - plain).norm()) <= 1.0001 * 2 * CLIP / 3
    assert float((long - nothing).norm()) > 0.99 * CLIP / 3


def spent_of(ran: Ran) -> list[float]:
    return [row["epsilon"] for row in ran.result.records if row.get("event") == "contribution"]


@pytest.mark.parametrize("at", ["before its checkpoint", "before it is sent out"])
def test_a_coordinator_that_is_killed_repeats_its_bits_and_sends_no_version_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, at: str
) -> None:
    secret = bytes(range(32))
    monkeypatch.setattr(secrets, "token_bytes", lambda num: secret)
    config = config_of()
    undisturbed = run_tiny(tmp_path / "a", config)
    (expected,) = undisturbed.hashes
    spent = spent_of(undisturbed)
    assert sorted(set(spent)) == spent[::3] and len(set(spent)) == 6
    assert spent[-1] == undisturbed.result.totals.epsilon == pytest.approx(8.0, abs=0.011)
    figures = [row["figures"][EPSILON] for row in undisturbed.rounds()]
    assert figures == spent

    save, publish = GlobalModel.save, Federation.publish

    def die(model: GlobalModel, folder: Path, meta: Mapping[str, Any]) -> None:
        if model.version == 4:
            raise Killed
        save(model, folder, dict(meta))

    def perish(hub: Federation, payload: Any, **given: Any) -> None:
        on_disk = read_tensors_meta(tmp_path / "b" / "checkpoint" / CHECKPOINT)
        assert hub.model is not None and on_disk["versions"] == hub.model.versions
        assert on_disk["privacy"]["steps"] == hub.model.version
        if hub.model.version == 4:
            raise Killed
        publish(hub, payload, **given)

    dying = (GlobalModel, "save", die) if "checkpoint" in at else (Federation, "publish", perish)
    with patch.object(*dying), pytest.raises(Killed):
        run_tiny(tmp_path / "b", config)
    monkeypatch.setattr(secrets, "token_bytes", lambda num: bytes(32))
    again = run_tiny(tmp_path / "b", config, resume=True)
    assert again.hashes == {expected}
    assert again.result.totals.epsilon == spent[-1]
    files, held = (p for p in tmp_path.rglob("*") if p.is_file()), secret.hex().encode()
    holders = {path.name for path in files if held in path.read_bytes()}
    assert holders == {"coordinator.safetensors", "coordinator.previous.safetensors"}


def test_each_fragment_s_versions_count_and_all_of_them_keep_the_budget(tmp_path: Path) -> None:
    stream = {"fragments": 2, "tau": 1}
    ran = run_tiny(tmp_path, config_of("streaming_diloco", stream=stream))
    assert len(ran.hashes) == 1
    spent = spent_of(ran)
    assert len(set(spent)) == 12, "two fragments of six versions"
    assert spent[-1] == pytest.approx(8.0, abs=0.011)


def test_a_site_that_is_left_alone_gets_the_noise_too(tmp_path: Path) -> None:
    config = config_of()
    config.sites = 1  # as if the others had been ejected
    ran = run_tiny(tmp_path, config)
    assert len(ran.hashes) == 1
    assert same_bits(state_of(ran.workloads["s1"].networks), ran.state)


@pytest.mark.parametrize(
    ("words", "mend"),
    [
        ("strategy=sync", "strategy=local_sgd"),
        ("strategy=sparse_loco", "strategy=local_sgd"),
        ("strategy=streaming_diloco privacy.unit=sample", "privacy.unit=site"),
        ("workload=pix2pix data.name=photo_edges", "without batch norm"),
        ("codec.up=masked4", "codec.up=int4"),
        ("round.merge=median", "round.merge=mean"),
        ("round.gate=20", "privacy.unit=sample"),
        ("round.quorum=2", "round.quorum=0"),
        ("round.least_steps=2", "round.least_steps=0"),
        ("checkpoint.every=2", "checkpoint.every=1"),
        ("inner.velocity.state=average", "keep or reset"),
        ("sites=1", "sites=2 or more"),
        ("privacy.delta=0.5", "no promise to 3 sites; .*as in privacy.delta=1e-05"),
        ("privacy.epsilon=0", "privacy.epsilon=8"),
        ("privacy.unit=person", "none of sample, site"),
        ("privacy.unit=site:-1", "write it like site:0.5"),
        ("privacy.unit=site:much", "write it like site:0.5"),
    ],
)
def test_what_it_does_not_go_with_is_refused(words: str, mend: str) -> None:
    usual = "workload=flow sites=3 privacy.epsilon=4 privacy.unit=site"
    with pytest.raises(ConfigError, match=mend) as caught:
        load_run(None, [*usual.split(), *words.split()])
    assert "\n" not in str(caught.value)


def test_what_it_asks_of_samples_it_does_not_ask_of_sites() -> None:
    usual = "sites=3 privacy.epsilon=4 privacy.unit=site"
    for words in ("workload=gan model.conditional=true", "workload=flow site.precision=bf16-mixed"):
        assert load_run(None, [*usual.split(), *words.split()]).privacy.is_of("site")


def test_noise_that_drowns_what_is_left_of_contributions_is_warned_of() -> None:
    event, text = privacy_of(epsilon=8.0).tell(LAYOUT)
    assert event == "warning" and "of contributions 0.25 is left at most; more sites" in text
    assert privacy_of(epsilon=900.0).tell({"d/w": spec((1,))})[0] == "privacy"


def test_what_cannot_be_promised_is_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"epsilon = 0.01 at .*; set a larger epsilon") as caught:
        privacy_of(epsilon=0.01)
    assert "\n" not in str(caught.value)
    with pytest.raises(ConfigError, match=r"running_mean|num_batches.* get no noise"):
        run_tiny(tmp_path, config_of(), norm=True)
