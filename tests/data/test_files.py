"""Shards of files: what each site reads, and that no other file is opened."""

from __future__ import annotations

import builtins
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.config import DataConfig, load
from fedwan.data import (
    FileShard,
    check_data,
    data_at_site,
    files,
    find_source,
    held_out_of,
    source_of,
)
from fedwan.data.images import to_unit
from tests.data.files import (
    encoded,
    open_one,
    refused,
    stream_of,
    take,
    tar_sample,
    write_folder,
    write_shards,
    write_tar,
)

CLASSES = ("cat", "dog", "eel", "fox")
Write = Callable[..., Path]
FORMATS = [("folder", write_folder), ("webdataset", write_shards)]


@pytest.fixture(autouse=True)
def forget() -> None:
    """Folders change here under the same name."""
    files._open.cache_clear()


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> Iterator[set[Path]]:
    """Every file that is opened for reading."""
    seen: set[Path] = set()
    real_open = builtins.open

    def watch(file: Any, *args: Any, **settings: Any) -> Any:
        if isinstance(file, str | Path):
            seen.add(Path(file))
        return real_open(file, *args, **settings)

    monkeypatch.setattr(builtins, "open", watch)
    yield seen


def shard(config: DataConfig, site: int = 0, sites: int = 1) -> FileShard:
    opened = open_one(config, site, sites)
    assert isinstance(opened, FileShard)
    return opened


def named(one: FileShard) -> set[str]:
    return {one.files.items.names[index] for index in one.index.tolist()}


@pytest.mark.parametrize(("name", "write"), FORMATS)
def test_sites_share_out_common_files_and_hold_out_the_same(
    tmp_path: Path, name: str, write: Write
) -> None:
    write(tmp_path, range(60), CLASSES)
    config = DataConfig(name, path=str(tmp_path), size=16, classes=",".join(CLASSES))
    for split in ("iid", "by_label", "dirichlet:0.5"):
        config.split = split
        shards = [shard(config, site, 3) for site in range(3)]
        held = shards[0].files.is_held_out.nonzero().flatten().tolist()
        assert len(held) == 12
        everything = sorted(held + [i for one in shards for i in one.index.tolist()])
        assert everything == list(range(60))
        assert all(torch.equal(one.held_out.x, shards[0].held_out.x) for one in shards)
    assert shards[0].num_classes == 4
    assert not shards[0].public


@pytest.mark.parametrize(("name", "write"), FORMATS)
def test_batches_hold_the_images_that_lie_there_with_their_labels(
    tmp_path: Path, name: str, write: Write
) -> None:
    write(tmp_path, range(30), CLASSES)
    config = DataConfig(name, path=str(tmp_path), size=16, classes=",".join(CLASSES))
    one = shard(config)
    decode = one.files.source.decoder.decode
    kinds = ("png", "jpg")
    expected = {
        decode(encoded(number, kinds[number % 2])).numpy().tobytes(): number % 4
        for number in range(30)
    }
    stream = stream_of(one, len(one.index))
    batch = stream.next_batch()
    stream.close()
    assert batch.x.shape == (18, 3, 16, 16)
    for x, y in zip(
        torch.cat([batch.x, one.held_out.x]), torch.cat([batch.y, one.held_out.y]), strict=True
    ):
        pixels = ((x + 1) * 127.5).round().to(torch.uint8)
        assert expected.pop(pixels.numpy().tobytes()) == int(y)
    assert not expected


def test_a_site_opens_its_own_files_and_those_held_out_alone(
    tmp_path: Path, opened: set[Path]
) -> None:
    write_folder(tmp_path, range(60))
    opened.clear()
    config = DataConfig("folder", path=str(tmp_path), size=16)
    one = shard(config, 1, 3)
    take(stream_of(one), 10)
    held_out = {name for name, is_held in zip(*_parts(one), strict=True) if is_held}
    assert {path.name for path in opened if tmp_path in path.parents} == named(one) | held_out
    assert len(named(one)) == 16


def _parts(one: FileShard) -> tuple[list[str], list[bool]]:
    return list(one.files.items.names), one.files.is_held_out.tolist()


@pytest.mark.parametrize(("name", "write"), FORMATS)
def test_a_site_with_data_of_its_own_uses_all_of_them_and_opens_no_others(
    tmp_path: Path, opened: set[Path], name: str, write: Write
) -> None:
    write(tmp_path / "s1", range(30))
    write(tmp_path / "s2", range(30, 80))
    config = DataConfig(name, path=f"{tmp_path}/{{site}}", size=16, split="own")
    sizes = []
    for index, site in enumerate(("s1", "s2")):
        opened.clear()
        one = shard(data_at_site(config, site), index, 2)
        take(stream_of(one), 10)
        own = {path for path in opened if tmp_path in path.parents}
        assert own and all(tmp_path / site in path.parents for path in own)
        sizes.append((len(one.index), len(one.held_out.x)))
    assert sizes == [(18, 12), (38, 12)]


def test_a_sites_own_path_goes_before_the_runs_and_leaves_small_data_alone() -> None:
    config = DataConfig("folder", path="/data/{site}", split="own")
    assert data_at_site(config, "s7").path == "/data/s7"
    assert data_at_site(config, "s7", "/srv/mine").path == "/srv/mine"
    assert data_at_site(DataConfig("digits"), "s7", "/srv/mine") == DataConfig("digits")
    assert config.path == "/data/{site}"


def test_a_path_with_the_sites_name_in_it_can_be_written_as_a_word() -> None:
    words = ["data.name=folder", "data.path=/data/{site}/x", "data.split=own", "data.classes=10"]
    data = load(None, words).data
    assert (data.path, data.classes) == ("/data/{site}/x", "10")
    check_data(data, 2)


@pytest.mark.parametrize("bad", ["0007.jpg", "held out"])
def test_a_damaged_file_is_refused_before_training(tmp_path: Path, bad: str) -> None:
    write_folder(tmp_path, range(60))
    config = DataConfig("folder", path=str(tmp_path), size=16)
    one = shard(config)
    if bad == "held out":
        bad = one.files.items.names[int(one.files.is_held_out.nonzero()[0])]
        (tmp_path / bad).write_bytes((tmp_path / bad).read_bytes()[:300])  # behind its header
    else:
        (tmp_path / bad).write_bytes(b"no image")
    files._open.cache_clear()
    refused(f"data.path: {tmp_path / bad} cannot be read as an image", lambda: shard(config))


def test_a_damaged_sample_of_a_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, range(30))
    write_tar(tmp_path / "bad.tar", tar_sample(40) | {"0041.png": b"no image"})
    config = DataConfig("webdataset", path=str(tmp_path), size=16)
    refused("bad.tar: sample '0041' cannot be read as an image", lambda: shard(config))


def test_images_that_are_too_small_are_refused_before_training(tmp_path: Path) -> None:
    write_folder(tmp_path, range(40))
    config = DataConfig("folder", path=str(tmp_path), size=41)
    refused(r"\.(png|jpg) is 48 x 40 pixels, smaller than data.size = 41", lambda: shard(config))


def test_a_file_that_vanishes_is_an_error_of_that_file(tmp_path: Path) -> None:
    write_folder(tmp_path, range(30))
    one = shard(DataConfig("folder", path=str(tmp_path), size=16))
    place = int(one.index[0])
    name = one.files.items.names[place]
    (tmp_path / name).unlink()
    refused(f"{name} cannot be read .No such file", lambda: one.files.decode(place))


def test_held_out_images_are_decoded_once(tmp_path: Path) -> None:
    config = DataConfig("folder", path=str(write_folder(tmp_path, range(30))), size=16)
    assert held_out_of(config) is shard(config).held_out


@pytest.mark.parametrize(
    ("config", "sites", "text"),
    [
        (DataConfig(split="own"), 2, "'own', but no site has digits of its own; take iid"),
        (DataConfig(classes="a,b"), 2, "data.classes = 'a,b' has no effect on digits"),
        (DataConfig(cache_mb=1), 2, "data.cache_mb = 1 has no effect on digits"),
        (DataConfig(workers=0), 2, "data.workers = 0 has no effect on digits"),
        (DataConfig("folder"), 2, "data.path is ''; name the folder"),
        (DataConfig("folder", path="x", split="own"), 2, "data.path is 'x'; name the folder"),
        (DataConfig("folder", path="/d/{site}"), 2, "another folder at each site.*split=own"),
        (DataConfig("folder", path="/d", direction="a_to_b"), 2, "no effect on folder"),
        (DataConfig("folder", path="/d", classes="a"), 2, "data.classes is 'a', which are no"),
        (
            DataConfig("hf", path="/d", classes="a,b", split="by_label"),
            3,
            "sites is 3, but hf has only 2 labels",
        ),
    ],
)
def test_settings_that_cannot_work_are_refused_without_looking_at_files(
    config: DataConfig, sites: int, text: str
) -> None:
    refused(text, lambda: check_data(config, sites))


def test_a_path_may_be_left_to_each_sites_own_file_which_must_then_name_it() -> None:
    config = DataConfig("folder", split="own")
    check_data(config, 2)
    refused(r"data.path is '' at this site.*SITE.yaml", lambda: open_one(config))


def test_what_networks_must_know_is_known_without_the_files() -> None:
    source = source_of(DataConfig("webdataset", path="/not/here", classes="10", size=32))
    assert (source.shape, source.num_classes, source.inputs) == ((3, 32, 32), 10, 0)
    assert source_of(DataConfig("folder")).shape == (3, 64, 64)
    assert source_of(DataConfig("pairs")).shape == (6, 256, 256)


def test_some_samples_are_read_at_even_distances(tmp_path: Path) -> None:
    write_folder(tmp_path, range(60), CLASSES)
    config = DataConfig("folder", path=str(tmp_path), size=16, classes=",".join(CLASSES))
    one = shard(config)
    assert one.num_samples == 48
    some = one.some(10)
    chosen = one.index[::5].tolist()
    assert len(some.x) == len(chosen) == 10
    assert some.y.tolist() == one.files.items.labels[chosen].tolist()
    assert torch.equal(some.x[3], to_unit(one.files.decode(chosen[3])))
    assert len(one.some(100).x) == 48
    small = open_one(DataConfig("digits"))
    assert torch.equal(small.some(700).x, find_source("digits").load()[0].x[::2])
