"""Samples of contributions: the same places for all, and no bit of the merge changed."""

from __future__ import annotations

import pytest
import torch

from fedwan.codecs import Codec, fp32, int4, topk2
from fedwan.coordinator.merge import Merger
from fedwan.doctor.sampling import NUM_PLACES, Sample, Sampler
from fedwan.state import Layout, Role, State
from tests.support import spec

LAYOUT: Layout = {
    "d/w": spec((30,)),
    "g/a": spec((200, 100)),
    "g/b": spec(()),
    "g/bn.running_mean": spec((5,), Role.MEAN),
    "g/c": spec((0,)),
    "g/d": spec((40_000,)),
}


def state(seed: int = 0) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {n: torch.randn(s.shape, generator=generator) for n, s in LAYOUT.items()}


def sample_of(value: State, codec: Codec) -> Sample:
    payload, _ = codec.encode(value, {}, LAYOUT)
    into: Sample = {}
    assert [name for name, _ in Sampler(LAYOUT).tap(codec.read_each(payload, LAYOUT), into)]
    return into


@pytest.mark.parametrize("codec", [fp32(), int4(), topk2()], ids=lambda codec: codec.name)
def test_a_coded_sample_is_the_plain_sample_of_what_is_decoded(codec: Codec) -> None:
    payload, _ = codec.encode(state(), {}, LAYOUT)
    expected = Sampler(LAYOUT).of(codec.decode(payload, LAYOUT))
    found = sample_of(state(), codec)
    assert found.keys() == expected.keys() == {"d", "g"}
    assert all(torch.equal(found[network], expected[network]) for network in expected)


def test_small_networks_are_kept_whole_and_large_ones_bounded() -> None:
    sample = Sampler(LAYOUT).of(state())
    assert torch.equal(sample["d"], state()["d/w"])
    assert 0.9 * NUM_PLACES < len(sample["g"]) <= NUM_PLACES


def test_a_cosine_of_samples_is_near_that_of_the_whole() -> None:
    one, other = state(1), state(2)
    mixed = {name: one[name] + 0.5 * other[name] for name in LAYOUT}
    sampler = Sampler(LAYOUT)
    a, b = sampler.of(one)["g"], sampler.of(mixed)["g"]
    assert float(torch.cosine_similarity(a, b, dim=0)) == pytest.approx(1 / 1.25**0.5, abs=0.05)


def test_places_depend_on_the_layout_alone() -> None:
    assert torch.equal(Sampler(LAYOUT).of(state())["g"], Sampler(LAYOUT).of(state())["g"])


@pytest.mark.parametrize("codec", [fp32(), int4(), topk2()], ids=lambda codec: codec.name)
def test_sampling_changes_no_bit_of_what_is_merged(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    def merged() -> State:
        merger = Merger(LAYOUT)
        for seed in (1, 2, 3):
            payload, _ = codec.encode(state(seed), {}, LAYOUT)
            merger.add(codec.read_each(payload, LAYOUT), 1.0 + seed)
        return merger.take()

    sampled = merged()
    monkeypatch.setattr(Sampler, "tap", lambda self, tensors, into: tensors)
    assert all(torch.equal(value, sampled[name]) for name, value in merged().items())
