"""Stacked digits."""

from __future__ import annotations

import torch

from fedwan.data import find_source, split_indices
from fedwan.data.stacked_digits import NUM_MODES, stack_digits
from fedwan.state import hash_state
from fedwan.workloads.base import Batch


def parts() -> tuple[Batch, Batch]:
    return find_source("stacked_digits").load()


def scans(x: torch.Tensor) -> set[bytes]:
    """Every channel of images (N, channels, 8, 8)."""
    return {scan.numpy().tobytes() for scan in x.flatten(0, 1)}


def test_there_are_as_many_images_of_each_of_a_thousand_modes() -> None:
    for part, per_mode in zip(parts(), (20, 2), strict=True):
        assert part.x.shape == (per_mode * NUM_MODES, 3, 8, 8)
        assert torch.bincount(part.y).tolist() == [per_mode] * 1000


def test_a_label_reads_as_the_digits_of_the_channels() -> None:
    digits, _ = find_source("digits").load()
    label_of = {
        scan.numpy().tobytes(): int(y) for scan, y in zip(digits.x[:, 0], digits.y, strict=True)
    }
    train, _ = parts()
    for image, y in zip(train.x[::97], train.y[::97], strict=True):
        a, b, c = (label_of[channel.numpy().tobytes()] for channel in image)
        assert int(y) == 100 * a + 10 * b + c


def test_no_scan_is_in_both_parts_and_each_is_in_its_own() -> None:
    train, held_out = (scans(part.x) for part in parts())
    assert not train & held_out
    digits = find_source("digits").load()
    assert (train, held_out) == tuple(scans(part.x) for part in digits)


def test_hardly_an_image_repeats_another() -> None:
    for part in parts():
        assert len({image.numpy().tobytes() for image in part.x}) == len(part.x)


def test_every_process_stacks_the_same_images() -> None:
    digits = find_source("digits").load()
    again = stack_digits(*digits)
    for part, other in zip(parts(), again, strict=True):
        assert hash_state({"x": part.x, "y": part.y}) == hash_state({"x": other.x, "y": other.y})


def test_labels_are_dealt_out_evenly() -> None:
    train, _ = parts()
    held = [set(train.y[part].tolist()) for part in split_indices(train.y, "by_label", 3, seed=0)]
    assert sorted(len(labels) for labels in held) == [333, 333, 334]
    assert len(set.union(*held)) == NUM_MODES
