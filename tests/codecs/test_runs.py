"""Whole runs with every codec in both directions: all parties end on the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.codecs import Codec, bf16, float4, fp32, int4, int8, topk2
from fedwan.coordinator.model import GlobalModel
from fedwan.state import hash_state
from tests.coordinator.test_model import CONFIG, LAYOUT, make_model, random_state, strategy_of
from tests.support import GAN, read_all, run_tiny, tiny_config

every_codec = pytest.mark.parametrize(
    "codec", [fp32(), bf16(), int8(), int4(), float4(), topk2()], ids=lambda codec: codec.name
)


@every_codec
@pytest.mark.parametrize(
    ("name", "sites", "more"),
    [
        ("diloco", 3, {"h": 2, "steps": 6}),
        ("sync", 3, {"h": 1, "steps": 6}),
        # Fragments are coded in threads, each with what it owes.
        ("streaming_diloco", 2, {"h": 8, "steps": 32, "stream": {"fragments": 3, "tau": 2}}),
    ],
    ids=["diloco", "sync", "streaming"],
)
def test_every_site_ends_on_the_coordinators_bits_and_twice_on_the_same(
    name: str, sites: int, more: dict[str, Any], codec: Codec, tmp_path: Path
) -> None:
    coded = {"up": codec.name, "down": codec.name}
    config = tiny_config(name, GAN, sites=sites, codec=coded, **more)
    ran = run_tiny(tmp_path / "1", config, norm=True)
    assert all(bool(value.isfinite().all()) for value in ran.state.values())
    again = run_tiny(tmp_path / "2", config, norm=True)
    assert ran.hashes == again.hashes and len(ran.hashes) == 1


@every_codec
def test_a_coordinator_that_resumes_sends_the_same_updates(codec: Codec, tmp_path: Path) -> None:
    """What it owes its sites is in its checkpoint."""
    strategy = strategy_of("diloco", down=codec.name)
    model = make_model(strategy)
    for seed in range(1, 4):
        model.commit(model.fragments[0], random_state(seed), samples=30)
    model.save(tmp_path, {})
    resumed = GlobalModel.load(tmp_path, strategy, CONFIG)
    for seed in range(4, 7):
        payloads = [m.commit(m.fragments[0], random_state(seed), 30) for m in (model, resumed)]
        assert read_all(payloads[0]) == read_all(payloads[1])
    assert hash_state(model.state) == hash_state(resumed.state)


@every_codec
def test_global_weights_are_what_a_site_adds_up(codec: Codec) -> None:
    model = make_model(strategy_of("diloco", down=codec.name))
    site = {name: value.clone() for name, value in model.state.items()}
    for seed in range(1, 6):
        payload = model.commit(model.fragments[0], random_state(seed), samples=30)
        for name, coded in codec.read_each(payload, LAYOUT):
            if LAYOUT[name].role.value == "parameter":
                coded.add_to(site[name])
            else:
                coded.write_to(site[name])
    assert hash_state(site) == hash_state(model.state)


def test_error_feedback_delivers_what_plain_dropping_would_lose() -> None:
    """A constant delta arrives nearly whole in the end, though a 64th travels each time."""
    codec, layout = topk2(), {"w": LAYOUT["generator/w"]._replace(shape=(4096,))}
    value = torch.randn(4096, generator=torch.Generator().manual_seed(0))
    total, owed = torch.zeros(4096), {}
    for _ in range(400):
        payload, owed = codec.encode({"w": value}, owed, layout)
        ((_, coded),) = codec.read_each(payload, layout)
        coded.add_to(total)
    agreement = torch.nn.functional.cosine_similarity(total, value, dim=0)
    once = codec.decode(codec.encode({"w": value}, {}, layout)[0], layout)["w"]
    assert agreement > 0.8
    assert torch.nn.functional.cosine_similarity(once, value, dim=0) < 0.5
