"""Edges and photographs."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.data import find_source
from fedwan.data.photo_edges import (
    NUM_INPUTS,
    PHOTOS,
    SHAPE,
    SIZE,
    _cut,
    _held_out_blocks,
    load_photo_edges,
)


def test_what_is_announced_is_what_is_loaded() -> None:
    source = find_source("photo_edges")
    assert (source.shape, source.inputs, source.num_classes) == (SHAPE, NUM_INPUTS, len(PHOTOS))
    for part in source.load():
        assert part.x.shape[1:] == SHAPE
        assert part.x.dtype == torch.float32
        assert set(part.y.tolist()) == set(range(len(PHOTOS)))


def test_there_is_enough_to_train_on_and_to_judge_by() -> None:
    train, held_out = find_source("photo_edges").load()
    assert len(train.x) >= 1500
    assert len(held_out.x) >= 200


def test_no_pixel_is_in_a_training_crop_and_in_a_held_out_one() -> None:
    height, width = 213, 320
    places = torch.arange(height * width, dtype=torch.float32).view(1, height, width)
    crops, share = _cut(places), _cut(_held_out_blocks(places)).mean(dim=(1, 2, 3))

    def pixels(mask: Tensor) -> set[float]:
        return set(crops[mask].flatten().tolist())

    trained, held_out = pixels(share == 0), pixels(share == 1)
    assert trained and held_out
    assert not trained & held_out


def test_no_photographed_crop_is_in_both_parts() -> None:
    train, held_out = find_source("photo_edges").load()
    seen = {x[NUM_INPUTS:].numpy().tobytes() for x in train.x if float(x[NUM_INPUTS:].std()) > 0.05}
    assert not seen & {x[NUM_INPUTS:].numpy().tobytes() for x in held_out.x}


def test_edges_are_where_the_photograph_changes() -> None:
    train, _ = find_source("photo_edges").load()
    edges, photo = train.x[:, 0], train.x[:, 1:].mean(dim=1)
    assert (float(edges.min()), float(edges.max())) == (-1, 1)
    steps = (photo[:, :, 2:] - photo[:, :, :-2]).abs()[:, 1:-1]
    inner = edges[:, 1:-1, 1:-1]
    assert float(torch.corrcoef(torch.stack([inner.flatten(), steps.flatten()]))[0, 1]) > 0.5


def test_pixels_fill_the_range_from_minus_one_to_one() -> None:
    train, _ = find_source("photo_edges").load()
    assert -1 <= float(train.x.min()) < -0.95
    assert 0.95 < float(train.x.max()) <= 1


def test_loading_twice_gives_the_same() -> None:
    assert all(
        torch.equal(a, b)
        for first, again in zip(load_photo_edges(), load_photo_edges(), strict=True)
        for a, b in zip(first, again, strict=True)
    )


def test_the_first_held_out_pairs_are_of_all_photographs() -> None:
    _, held_out = find_source("photo_edges").load()
    assert len(set(held_out.y[:32].tolist())) == len(PHOTOS)
    assert held_out.x.shape[-1] == SIZE
