"""The classifier and its cache, random features, and one thread."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedwan.data import find_source
from fedwan.metrics import features as module
from fedwan.metrics.features import (
    NUM_FEATURES,
    Classifier,
    load_classifier,
    see_images,
)
from fedwan.state import hash_state, read_tensors, write_tensors


class Cached(NamedTuple):
    """A classifier that was trained and written."""

    model: Classifier
    path: Path
    drew_globally: bool


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Cached:
    folder = tmp_path_factory.mktemp("cache")
    before = torch.random.get_rng_state()
    with torch.no_grad():  # as quality is measured
        model = load_classifier("digits", folder)
    (path,) = folder.iterdir()
    return Cached(model, path, not torch.equal(torch.random.get_rng_state(), before))


def never(*_: object) -> Classifier:
    raise AssertionError("trained although cached")


def test_it_knows_held_out_digits(cached: Cached) -> None:
    _, held_out = find_source("digits").load()
    features, logits = cached.model(held_out.x)
    assert features.shape == (400, NUM_FEATURES)
    assert float((logits.argmax(dim=1) == held_out.y).double().mean()) > 0.97


@pytest.mark.slow
def test_a_second_process_trains_to_the_same_bits(cached: Cached) -> None:
    code = (
        "import torch; torch.set_num_threads(2); torch.manual_seed(7)\n"
        "from fedwan.data import find_source\n"
        "from fedwan.metrics.features import train_classifier\n"
        "from fedwan.state import hash_state\n"
        "model = train_classifier(find_source('digits').load()[0], 10)\n"
        "print(hash_state(model.state_dict()))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == hash_state(cached.model.state_dict())


def test_it_is_read_from_the_cache(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not cached.drew_globally
    model, path = cached.model, cached.path
    monkeypatch.setattr(module, "train_classifier", never)
    load_classifier.cache_clear()
    again = load_classifier("digits", path.parent)
    assert hash_state(again.state_dict()) == hash_state(model.state_dict())


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def take_another_shape(path: Path) -> None:
    weights, _ = read_tensors(path)
    weights["head.bias"] = torch.zeros(3)
    write_tensors(path, weights, {})


@pytest.mark.parametrize("damage", [flip_a_bit, take_another_shape])
def test_a_damaged_cache_is_trained_and_written_anew(
    cached: Cached,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    model, source = cached.model, cached.path
    path = tmp_path / source.name
    path.write_bytes(source.read_bytes())
    damage(path)
    monkeypatch.setattr(module, "train_classifier", lambda *_: model)
    again = load_classifier("digits", tmp_path)
    assert hash_state(again.state_dict()) == hash_state(model.state_dict())
    assert path.read_bytes() == source.read_bytes()


def test_a_cache_that_cannot_be_written_does_no_harm(
    cached: Cached, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("not a folder")
    monkeypatch.setattr(module, "train_classifier", lambda *_: cached.model)
    again = load_classifier("digits", blocked / "cache")
    assert hash_state(again.state_dict()) == hash_state(cached.model.state_dict())


def test_images_of_any_size_have_as_many_random_features_and_none_is_dead() -> None:
    for size in (16, 32, 50):
        seen = see_images(torch.rand(70, 3, size, size) * 2 - 1)
        assert seen.shape == (70, 64) and (seen.std(dim=0) > 0).all()


def test_random_features_are_always_the_same_and_leave_the_global_generator_alone() -> None:
    images = torch.rand(70, 3, 16, 16)
    seen = see_images(images)
    module._random_layers.cache_clear()
    before = torch.random.get_rng_state()
    assert torch.equal(see_images(images), seen)
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.testing.assert_close(seen[65:66], see_images(images[65:66]))
