"""The classifier and its cache, random features, and one thread."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from fedwan.data import find_source
from fedwan.metrics import features as module
from fedwan.metrics.features import NUM_FEATURES, Classifier, load_classifier, see_images
from fedwan.state import hash_state, read_tensors, write_tensors


class Cached(NamedTuple):
    """A classifier that was trained and written."""

    model: Classifier
    path: Path
    drew_globally: bool


@pytest.fixture(scope="module")
def cached(tmp_path_factory: pytest.TempPathFactory) -> Cached:
    home = tmp_path_factory.mktemp("home")
    before = torch.random.get_rng_state()
    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:  # as quality is measured
        model = loaded(home, patch)
    (path,) = (home / ".cache" / "fedwan").iterdir()
    return Cached(model, path, not torch.equal(torch.random.get_rng_state(), before))


def loaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> Classifier:
    monkeypatch.setenv("HOME", str(home))
    return load_classifier.__wrapped__("digits")


@pytest.mark.slow
def test_it_knows_held_out_digits(cached: Cached) -> None:
    _, held_out = find_source("digits").load()
    features, logits = cached.model(held_out.x)
    assert features.shape == (400, NUM_FEATURES)
    assert Classifier(3, 32, 9)(torch.zeros(2, 3, 32, 32))[1].shape == (2, 9)
    assert float((logits.argmax(dim=1) == held_out.y).double().mean()) > 0.97


@pytest.mark.parametrize("side", [4, 8, 20, 48, 64])
def test_pictures_of_any_size_are_seen_a_few_at_a_time(
    side: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, images = Classifier(3, side, 9), torch.rand(7, 3, side, side)
    whole, seen = model(images), []
    model.body.register_forward_pre_hook(lambda _, given: seen.append(len(given[0])))
    monkeypatch.setattr(module, "_MOST_PIXELS", 3 * side * side)
    torch.testing.assert_close(model(images), whole)
    assert seen == [3, 3, 1] and whole[0].shape == (7, NUM_FEATURES)


@pytest.mark.slow
def test_it_is_trained_to_the_same_bits_whatever_the_global_generator_and_threads(
    cached: Cached,
) -> None:
    assert not cached.drew_globally
    torch.set_num_threads(2)
    torch.manual_seed(7)
    again = module.train_classifier(find_source("digits").load()[0], 10)
    assert hash_state(again.state_dict()) == hash_state(cached.model.state_dict())


@pytest.mark.slow
def test_it_is_read_from_the_cache(cached: Cached, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "train_classifier", lambda *_: pytest.fail("it was trained"))
    again = loaded(cached.path.parents[2], monkeypatch)
    assert hash_state(again.state_dict()) == hash_state(cached.model.state_dict())


def flip_a_bit(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-5] ^= 1
    path.write_bytes(bytes(content))


def take_another_shape(path: Path) -> None:
    weights, _ = read_tensors(path)
    weights["head.bias"] = torch.zeros(3)
    write_tensors(path, weights, {})


@pytest.mark.parametrize("damage", [flip_a_bit, take_another_shape])
def test_a_damaged_cache_is_trained_and_written_anew_and_one_that_cannot_be_does_no_harm(
    cached: Cached,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    path = tmp_path / ".cache" / "fedwan" / cached.path.name
    path.parent.mkdir(parents=True)
    path.write_bytes(cached.path.read_bytes())
    damage(path)
    monkeypatch.setattr(module, "train_classifier", lambda *_: cached.model)
    expected = hash_state(cached.model.state_dict())
    for home in (tmp_path, path / "no folder"):
        assert hash_state(loaded(home, monkeypatch).state_dict()) == expected
    assert path.read_bytes() == cached.path.read_bytes()


def test_random_features_are_as_many_of_any_size_alive_and_always_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for size in (16, 32, 50):
        images = torch.rand(70, 3, size, size) * 2 - 1
        seen = see_images(images)
        assert seen.shape == (70, 64) and (seen.std(dim=0) > 0).all()
    module._random_layers.cache_clear()
    before = torch.random.get_rng_state()
    assert torch.equal(see_images(images), seen)
    assert torch.equal(torch.random.get_rng_state(), before)
    monkeypatch.setattr(module, "at_once", lambda shape: 2)  # in smaller parts
    torch.testing.assert_close(seen[65:68], see_images(images[65:68]))
