"""The data sets that come with fedwan, and what is known of those of files."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.config import Config, DataConfig
from fedwan.data import find_source, num_labels, source_of
from fedwan.data.sources import parse_classes
from fedwan.data.splits import split_indices
from fedwan.data.toys import _cut, _held_out_blocks
from fedwan.errors import ConfigError
from fedwan.state import hash_state
from tests.data.files import refused

GOLDEN = {
    "digits": (1397, 400, "241314c099eb049e"),
    "ring8": (8000, 400, "ba22ab1d4bc32578"),
    "grid25": (10_000, 500, "82571c60aaf5f264"),
    "stacked_digits": (20_000, 2000, "0ce88346b3c28dbf"),
    "photo_edges": (2492, 335, "6d55087743c571a0"),
}
"""Training samples, held-out ones, and a hash of both: the same in every process."""


def rows(x: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_announced_is_what_is_loaded_to_the_bit(name: str) -> None:
    source = find_source(name)
    assert source.public and source.load() is source.load()
    train, held_out = source.load()
    for part in (train, held_out):
        assert part.x.shape[1:] == source.shape and part.x.dtype == torch.float32
        assert set(part.y.tolist()) == set(range(source.num_classes))
    named = {"a": train.x, "b": train.y, "c": held_out.x, "d": held_out.y}
    assert (len(train.x), len(held_out.x), hash_state(named)[:16]) == GOLDEN[name]
    if name != "photo_edges":  # flat pieces of which are equal
        assert not rows(train.x) & rows(held_out.x)


def scans(x: Tensor) -> set[bytes]:
    """Every channel of images (N, channels, 8, 8)."""
    return rows(x.flatten(0, 1))


def test_a_stack_s_label_reads_as_the_digits_of_its_channels_and_no_scan_is_in_both_parts() -> None:
    digits, parts = find_source("digits").load(), find_source("stacked_digits").load()
    assert tuple(scans(part.x) for part in parts) == tuple(scans(part.x) for part in digits)
    label_of = {scan.numpy().tobytes(): int(y) for scan, y in zip(*digits[0], strict=True)}
    for image, y in zip(parts[0].x[::97], parts[0].y[::97], strict=True):
        a, b, c = (label_of[channel.numpy().tobytes()] for channel in image)
        assert int(y) == 100 * a + 10 * b + c
    for part, per_mode in zip(parts, (20, 2), strict=True):
        assert torch.bincount(part.y).tolist() == [per_mode] * 1000
        assert len(rows(part.x)) == len(part.x)
    held = [set(parts[0].y[i].tolist()) for i in split_indices(parts[0].y, "by_label", 3, seed=0)]
    assert sorted(len(labels) for labels in held) == [333, 333, 334]


def test_no_pixel_is_in_a_training_crop_and_in_a_held_out_one() -> None:
    height, width = 213, 320
    places = torch.arange(height * width, dtype=torch.float32).view(1, height, width)
    crops, share = _cut(places), _cut(_held_out_blocks(places)).mean(dim=(1, 2, 3))
    trained, held_out = (set(crops[mask].flatten().tolist()) for mask in (share == 0, share == 1))
    assert trained and held_out and not trained & held_out


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'ring9'.*did you mean 'ring8'.*valid: digits, ring8"):
        find_source("ring9")


def test_files_are_known_before_they_are_opened() -> None:
    folder = source_of(DataConfig("folder", classes="cat,dog", path="/x"))
    assert (folder.shape, folder.num_classes, folder.public) == ((3, 64, 64), 2, False)
    pairs = source_of(DataConfig("pairs"))
    assert (pairs.shape, pairs.num_classes, pairs.inputs) == ((6, 256, 256), 1, 3)
    assert num_labels(Config(sites=3, data=DataConfig("digits", labels="site"))) == 3


@pytest.mark.parametrize(
    ("text", "says"),
    [("astronaut", "a single class; give two or more"), ("1", "1 classes"), ("0", "0 classes")]
    + [("cat,,dog", "a name is empty"), ("cat,dog,cat", "holds 'cat' twice")],
)
def test_what_names_no_classes_is_refused(text: str, says: str) -> None:
    refused(says, lambda: parse_classes(text))
    assert len(parse_classes("12")) == 12 and parse_classes("") == ()
