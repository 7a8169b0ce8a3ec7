"""Samples of contributions, which change no bit of the merge, and how they lie to each other."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.codecs import Codec, fp32, int4, topk2
from fedwan.coordinator.merge import Merger
from fedwan.doctor.sampling import Directions, Sample, Sampler, agreement_of, cosine_of
from fedwan.state import Layout, Role, State
from tests.support import random_state, spec

LAYOUT: Layout = {
    "d/w": spec((30,)),
    "g/a": spec((200, 100)),
    "g/b": spec(()),
    "g/bn.running_mean": spec((5,), Role.MEAN),
    "g/c": spec((0,)),
    "g/d": spec((40_000,)),
}


@pytest.mark.parametrize("codec", [fp32(), int4(), topk2()], ids=lambda codec: codec.name)
def test_a_coded_sample_is_that_of_what_is_decoded_and_changes_no_bit_of_what_is_merged(
    codec: Codec, monkeypatch: pytest.MonkeyPatch
) -> None:
    payload, _ = codec.encode(random_state(0, LAYOUT), {}, LAYOUT)
    expected, found = Sampler(LAYOUT).of(codec.decode(payload, LAYOUT)), Sample()
    assert [name for name, _ in Sampler(LAYOUT).tap(codec.read_each(payload, LAYOUT), found)]
    assert found.keys() == expected.keys() == {"d", "g"}
    assert all(torch.equal(found[network], expected[network]) for network in expected)

    def merged() -> State:
        merger = Merger(LAYOUT)
        for seed in (1, 2, 3):
            payload, _ = codec.encode(random_state(seed, LAYOUT), {}, LAYOUT)
            merger.add(codec.read_each(payload, LAYOUT), 1.0 + seed)
        return merger.take()

    sampled = merged()
    monkeypatch.setattr(Sampler, "tap", lambda self, tensors, into: tensors)
    assert all(torch.equal(value, sampled[name]) for name, value in merged().items())


def vector(*values: float) -> Tensor:
    return torch.tensor(values, dtype=torch.float32)


def test_agreement_is_one_for_the_same_and_one_over_sites_for_the_orthogonal() -> None:
    assert agreement_of(vector(1, 2).expand(3, 2)) == pytest.approx(1.0)
    assert agreement_of(torch.eye(4)) == pytest.approx(1 / 4)
    assert agreement_of(torch.tensor([[1.0, 0], [-1, 0]])) == pytest.approx(0.0)
    assert agreement_of(torch.zeros(2, 2)) == cosine_of(vector(0, 0), vector(1, 0)) == 0.0


def test_deltas_as_large_as_are_taken_have_directions() -> None:
    large = torch.full((2,), 1.2e19)
    samples = {"a": {"g": large}, "b": {"g": 3 * large}, "c": {"g": vector(1, -1)}}
    found = Directions().compare(samples, {"g": vector(0, 0)})
    assert found["a"]["cosines"]["g"] == found["b"]["cosines"]["g"] == pytest.approx(1.0)
    assert found["c"]["agreement"]["g"] == pytest.approx(16 / 9 / (10 / 3))


def test_each_site_is_compared_with_the_mean_of_the_others() -> None:
    samples = {"s1": {"g": vector(1, 0)}, "s2": {"g": vector(1, 0)}, "s3": {"g": vector(-1, 1)}}
    found = Directions().compare(samples, {"g": vector(0, 0)})
    assert found["s1"]["cosines"]["g"] == pytest.approx(0.0)
    assert found["s3"]["cosines"]["g"] == pytest.approx(-(0.5**0.5))
    assert found["s1"]["agreement"] == found["s3"]["agreement"]
    assert found["s1"]["backward"] == {}
    # One site alone is compared with nobody.
    found = Directions().compare({"s1": {"g": vector(1, 0)}}, {"g": vector(0, 0)})
    assert found["s1"] == {"cosines": {}, "agreement": {}, "backward": {}}


def test_who_has_gone_is_compared_with_nobody() -> None:
    directions, present = Directions(), {"g": vector(0, 0)}
    two = {"s1": {"g": vector(1, 0)}, "s2": {"g": vector(1, 0.1)}}
    directions.compare(two | {"s3": {"g": vector(-100, 100)}}, present)
    assert directions.compare(two, present)["s1"]["cosines"]["g"] < 0
    for _ in range(20):
        found, alone = directions.compare(two, present), Directions().compare(two, present)
    for name in ("cosines", "agreement"):
        assert found["s1"][name] == alone["s1"][name]


def test_who_trains_from_old_weights_asks_to_undo_the_moves_since() -> None:
    """Global weights 0, 1, 2, 3 along a line; deltas are global minus local."""
    directions = Directions()
    for position in range(4):
        present = vector(position, 0)
        fresh = present - (present + vector(1, 0.1))
        old = present - (vector(max(0, position - 2), 0) + vector(1, 0.1))
        samples = {"fresh": {"g": fresh}, "old": {"g": old}}
        found = directions.compare(samples, {"g": present})
    assert found["fresh"]["backward"]["g"] < -0.9 and found["old"]["backward"]["g"] > 0.9
