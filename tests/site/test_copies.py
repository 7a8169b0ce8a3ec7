"""How many samples of a shard are copies, told from some of them."""

from __future__ import annotations

import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor

from fedwan.config import DataConfig
from fedwan.data import InMemory, Shard, open_shard
from fedwan.doctor.rules import LEAST_DISTINCT
from fedwan.site import vitals
from fedwan.site.vitals import Vitals, distinct_share, pixel_keys
from fedwan.workloads.base import Batch
from tests.support import ADAM, TinyWorkload

SIDE = 256


def write_pair(path: Path, number: int) -> None:
    """A small file of a large image, another one for each number."""
    pixels = np.full((SIDE, 2 * SIDE, 3), number % 256, np.uint8)
    pixels[:, : number // 256 + 1, 0] += 1
    Image.fromarray(pixels).save(path, compress_level=1)


def pairs(folder: Path, images: list[int]) -> Shard:
    """A shard of pairs at full size, one file for each number; equal numbers are copies."""
    first: dict[int, Path] = {}
    for place, image in enumerate(images):
        path = folder / f"{place:04d}.png"
        if image in first:
            shutil.copyfile(first[image], path)
        else:
            write_pair(path, image)
            first[image] = path
    return open_shard(DataConfig("pairs", path=str(folder)), 0, 1, 0)


def told(shard: Shard, seed: int = 0) -> float:
    """What the site tells of its shard."""
    workload = TinyWorkload({"net": ADAM})
    some = shard.some(2)
    look = Vitals(workload, shard, 1, seed, "s1")
    (figures,) = [found for _ in range(16) if (found := look.after_step(some))]
    assert float(figures["shard/samples"]) == shard.num_samples
    return float(figures["shard/distinct"])


def shuffled(keys: Tensor, seed: int) -> Tensor:
    return keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("stride", [1, 10, "random"])
def test_ten_copies_of_each_large_image_are_told_in_any_order(
    tmp_path: Path, stride: int | str
) -> None:
    keys = torch.arange(400)
    orders = {1: keys % 40, 10: keys // 10, "random": shuffled(keys % 40, 0)}
    shard = pairs(tmp_path, orders[stride].tolist())
    # A tenth of the pairs is held out: 360 files, of 40 images, or of 36 if one in ten is left out.
    assert told(shard) == pytest.approx(0.105, abs=0.01)


def test_large_images_that_all_differ_are_no_copies(tmp_path: Path) -> None:
    assert told(pairs(tmp_path, list(range(400)))) == 1.0


def test_the_same_image_in_files_that_differ_is_a_copy(tmp_path: Path) -> None:
    for number in range(60):
        Image.new("RGB", (16, 16), (number % 6, 0, 0)).save(
            tmp_path / f"{number:02d}.png", dpi=(72 + number, 72)
        )
    shard = open_shard(DataConfig("folder", path=str(tmp_path), size=16), 0, 1, 0)
    assert told(shard) == pytest.approx(6 / 48)


@pytest.mark.parametrize("copied", [True, False])
@pytest.mark.parametrize("order", ["in turn", "side by side", "random"])
def test_a_shard_in_memory_is_told_from_some_dozens_of_its_images(
    monkeypatch: pytest.MonkeyPatch, copied: bool, order: str
) -> None:
    keys = torch.arange(400)
    if copied:
        keys = {"in turn": keys % 40, "side by side": keys // 10}.get(order, shuffled(keys % 40, 1))
    images = torch.rand(400, 1, 8, 8, generator=torch.Generator().manual_seed(0))[keys]
    monkeypatch.setattr(vitals, "MOST_BYTES", 42 * 4 * images[0].numel())
    shard = Shard(
        InMemory(Batch(images, keys)), Batch(images[:8], keys[:8]), num_classes=1, public=False
    )
    seeds = range(20)
    shares = [told(shard, seed) for seed in seeds]
    assert shares == [told(shard, seed) for seed in seeds]
    if copied:
        assert sum(share < LEAST_DISTINCT for share in shares) >= 19
    else:
        assert shares == [1.0] * 20


def test_samples_are_drawn_once_each_and_a_few_are_all_there_are() -> None:
    shard = open_shard(DataConfig("digits"), 0, 4, 0)
    everything = shard.some(10_000)
    assert torch.equal(shard.drawn(10_000, 3).x, everything.x)
    drawn = shard.drawn(60, 3)
    assert torch.equal(drawn.x, shard.drawn(60, 3).x)
    assert not torch.equal(drawn.x, shard.drawn(60, 4).x)
    keys = pixel_keys(drawn.x)
    assert len(keys.unique()) == 60 and set(keys.tolist()) <= set(pixel_keys(everything.x).tolist())


HEALTHY = {
    "none": torch.arange(20_000),
    "one pair": torch.cat([torch.arange(19_999), torch.zeros(1, dtype=torch.int64)]),
    "every tenth twice": torch.arange(20_000) - (torch.arange(20_000) % 20 == 1).long(),
    "a fifth is blank": torch.arange(20_000).clamp(min=4000),
}


@pytest.mark.parametrize("num", [42, 300, 4096])
@pytest.mark.parametrize("name", HEALTHY)
def test_a_few_copies_or_one_image_many_times_are_no_shard_of_copies(name: str, num: int) -> None:
    keys = HEALTHY[name]
    shares = [distinct_share(shuffled(keys, seed)[:num], len(keys)) for seed in range(50)]
    assert min(shares) > LEAST_DISTINCT + 0.05
    if num == 4096:
        assert sum(shares) / 50 == pytest.approx(len(keys.unique()) / len(keys), abs=0.05)


@pytest.mark.parametrize(("num_distinct", "num"), [(500, 300), (2000, 300), (2000, 4096)])
def test_ten_copies_of_each_are_found_by_a_small_part_of_them(num_distinct: int, num: int) -> None:
    keys = torch.arange(10 * num_distinct) % num_distinct
    shares = [distinct_share(shuffled(keys, seed)[:num], len(keys)) for seed in range(50)]
    assert sum(shares) / 50 == pytest.approx(0.1, abs=0.1)
    assert sum(share < LEAST_DISTINCT for share in shares) >= 49


def test_a_shard_that_was_looked_at_as_a_whole_is_counted() -> None:
    assert distinct_share(torch.tensor([5, 5, 5, 1]), 4) == 0.5
    assert distinct_share(torch.tensor([5]), 1) == 1.0
    assert distinct_share(torch.tensor([5, 5, 5]), 1000) == 1 / 1000
