"""Named generators."""

from __future__ import annotations

import torch

from fedwan.rng import NamedGenerators, derive_seed


def draw(rng: NamedGenerators, name: str, num: int = 4) -> list[float]:
    return torch.rand(num, generator=rng[name]).tolist()


def test_a_seed_is_the_same_for_ever() -> None:
    # int.from_bytes(hashlib.sha256(b"0\x1fs1").digest()[:8], "little") >> 1
    assert derive_seed(0, "s1") == 4124658246007544137


def test_seed_owner_and_name_each_make_a_stream_that_others_draws_never_shift() -> None:
    origins = ((0, "s1", "a"), (1, "s1", "a"), (0, "s2", "a"), (0, "s1", "b"))
    streams = [draw(NamedGenerators(seed, owner), name) for seed, owner, name in origins]
    assert len({tuple(stream) for stream in streams}) == 4
    busy = NamedGenerators(0, "s1")
    draw(busy, "b", 1000)
    assert draw(busy, "a") == streams[0]


def test_a_restored_state_draws_on_bit_for_bit() -> None:
    rng = NamedGenerators(0, "s1")
    draw(rng, "a", 7)
    kept = rng.state_dict()
    expected = draw(rng, "a"), draw(rng, "b")
    fresh = NamedGenerators(0, "s1")
    fresh.load_state_dict(kept)
    assert (draw(fresh, "a"), draw(fresh, "b")) == expected
    held = rng["a"], rng["b"]
    rng.load_state_dict(kept)  # whoever holds a generator goes on with the restored one
    assert tuple(torch.rand(4, generator=one).tolist() for one in held) == expected
