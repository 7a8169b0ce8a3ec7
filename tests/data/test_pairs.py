"""Folders of images side by side."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from fedwan.config import Config, DataConfig, load
from fedwan.data import FileShard, check_data, files, open_shard
from fedwan.data.files import LEAST_PAIRS
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

RED, BLUE = (255, 0, 0), (0, 0, 255)


def write(file: Path, width: int = 96, height: int = 48) -> None:
    """Red beside blue."""
    image = np.zeros((height, width, 3), np.uint8)
    image[:, : width // 2], image[:, width // 2 :] = RED, BLUE
    file.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(file, subsampling=0)  # red and blue do not run into each other


def load_pairs(folder: Path, size: int, direction: str) -> tuple[Batch, Batch]:
    """All pairs for training and all that are held out, as one site has them."""
    config = DataConfig("pairs", path=str(folder), size=size, direction=direction)
    shard = open_shard(config, 0, 1, seed=0)
    assert isinstance(shard, FileShard)
    stream = shard.batches(len(shard.index), torch.Generator().manual_seed(0))
    try:
        return stream.next_batch(), shard.held_out
    finally:
        stream.close()


@pytest.fixture(autouse=True)
def forget() -> None:
    """Folders change here under the same name."""
    files._open.cache_clear()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for index in range(12):
        write(tmp_path / "images" / f"{index:02d}.{'jpg' if index % 2 else 'png'}")
    write(tmp_path / "images" / "more" / "last.PNG")
    (tmp_path / "images" / "readme.txt").write_text("no image")
    return tmp_path / "images"


@pytest.mark.parametrize("direction", ["a_to_b", "b_to_a", ""])
def test_the_input_comes_before_the_target(folder: Path, direction: str) -> None:
    train, held_out = load_pairs(folder, 32, direction)
    assert len(train.x) + len(held_out.x) == 13
    red, blue = torch.tensor([1.0, -1.0, -1.0]), torch.tensor([-1.0, -1.0, 1.0])
    halves = [blue, red] if direction == "b_to_a" else [red, blue]
    for part in (train, held_out):
        assert part.x.shape[1:] == (6, 32, 32)
        assert part.x.dtype == torch.float32
        expected = torch.cat(halves).view(1, 6, 1, 1).expand_as(part.x)
        torch.testing.assert_close(part.x, expected, rtol=0, atol=0.03)


def test_half_of_the_fewest_files_are_held_out_and_a_tenth_of_many(tmp_path: Path) -> None:
    for index in range(60):
        write(tmp_path / f"{index:02d}.png", 8, 4)
        if index == LEAST_PAIRS - 1:
            assert [len(part.x) for part in load_pairs(tmp_path, 32, "")] == [4, 4]
            files._open.cache_clear()
    assert [len(part.x) for part in load_pairs(tmp_path, 32, "")] == [54, 6]


def test_sites_share_out_the_folder_and_hold_out_the_same(folder: Path) -> None:
    config = DataConfig("pairs", path=str(folder), size=32)
    shards = [open_shard(config, site, 2, seed=0) for site in range(2)]
    assert all(isinstance(shard, FileShard) for shard in shards)
    assert torch.equal(shards[0].held_out.x, shards[1].held_out.x)
    assert sum(len(shard.index) for shard in shards) + len(shards[0].held_out.x) == 13  # type: ignore[attr-defined]
    assert not any(shard.public for shard in shards)


def test_a_folder_that_cannot_be_used_is_refused_in_one_line(folder: Path) -> None:
    def refused(match: str, path: Path = folder) -> None:
        files._open.cache_clear()
        with pytest.raises(ConfigError, match=match) as caught:
            load_pairs(path, 32, "a_to_b")
        assert "\n" not in str(caught.value)

    refused("data.path = '.*nowhere' is no folder", folder / "nowhere")
    refused("holds 1 PNG or JPEG files; put 8 or more there", folder / "more")
    write(folder / "odd.png", width=81)
    refused("odd.png is 81 pixels wide.*make the width even")
    (folder / "odd.png").write_text("no image")
    refused("odd.png cannot be read as an image")


@pytest.mark.parametrize(
    ("config", "text"),
    [
        (DataConfig("pairs"), "data.path is ''; name the folder of images from the root"),
        (DataConfig("pairs", path="facades"), "data.path is 'facades'; name the folder"),
        (
            DataConfig("pairs", path="/facades", size=16),
            "data.size = 16 .*; choose 0, or 32 to 1024",
        ),
        (DataConfig(path="/facades"), "data.path = '/facades' has no effect on digits; leave it"),
        (DataConfig(size=64), "data.size = 64 has no effect on digits; .* data.name=.*pairs"),
        (DataConfig(direction="a_to_b"), "data.direction = 'a_to_b' has no effect on digits"),
    ],
)
def test_settings_of_a_folder_are_refused_where_there_is_none(
    config: DataConfig, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        check_data(config, 2)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("word", "text"),
    [
        ("data.size=4", "data.size = 4 is out of range; choose 0, or 8 to 1024"),
        ("data.direction=a_to_a", "data.direction = 'a_to_a' is none of a_to_b, b_to_a; did you"),
    ],
)
def test_values_that_no_folder_can_have_are_refused(word: str, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        load(None, [word])
    assert Config().data.size == 0
