"""Tar shards."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from fedwan.data.classes import parse_classes
from fedwan.data.webdataset import open_webdataset
from tests.data.files import encoded, kind_of, refused, tar_sample, write_shards, write_tar

NONE = parse_classes("")
CAT_DOG = parse_classes("cat,dog")


def test_any_sample_is_read_from_the_middle_of_its_shard(tmp_path: Path) -> None:
    items = open_webdataset(write_shards(tmp_path, range(25)), NONE, 1)
    assert len(items.names) == 25
    assert items.names[13] == "shard-0010.tar:0013"
    for number in (24, 0, 13, 7):
        assert items.read(number) == encoded(number, kind_of(number))
    assert items.where(13) == f"{tmp_path / 'shard-0010.tar'}: sample '0013'"
    assert items.labels.tolist() == [0] * 25


def test_labels_are_read_from_cls_and_from_json_by_name_and_by_number(tmp_path: Path) -> None:
    items = open_webdataset(write_shards(tmp_path, range(10), ("cat", "dog", "0")), CAT_DOG, 1)
    assert items.labels.tolist() == [0, 1, 0, 0, 1, 0, 0, 1, 0, 0]


def test_files_of_a_sample_need_not_lie_together_and_folders_are_part_of_its_name(
    tmp_path: Path,
) -> None:
    image = encoded(0, "png")
    files = {"a.b/1.png": image, "c/1.jpg": encoded(1, "jpg"), "a.b/1.cls": b"dog\n"}
    write_tar(tmp_path / "one.tar", files | {"c/1.cls": b" cat", "c/1.txt": b"a cat"})
    items = open_webdataset(tmp_path, CAT_DOG, 1)
    assert items.names == ("one.tar:a.b/1", "one.tar:c/1")
    assert items.labels.tolist() == [1, 0]
    assert items.read(0) == image


def test_cls_wins_over_json(tmp_path: Path) -> None:
    files = {"1.cls": b"dog", "1.png": encoded(0, "png"), "1.json": b'{"label": "cat"}'}
    write_tar(tmp_path / "one.tar", files)
    assert open_webdataset(tmp_path, CAT_DOG, 1).labels.tolist() == [1]


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    def listing(files: dict[str, bytes]) -> Path:
        return write_tar(tmp_path / "data" / "one.tar", files).parent

    image = encoded(0, "png")
    refused("no .tar files; put shards", lambda: open_webdataset(tmp_path, NONE, 1))
    folder = listing(tar_sample(0))
    refused("holds 1 samples in 1 .tar files; put 24", lambda: open_webdataset(folder, NONE, 24))
    refused(
        "sample '0000' has neither .cls nor .json, while data.classes asks",
        lambda: open_webdataset(folder, CAT_DOG, 1),
    )
    for files, says in (
        ({"1.png": image, "1.cls": b"bird"}, "sample '1' is of class 'bird', which data.classes"),
        ({"1.png": image, "1.cls": b"2"}, "sample '1' is of class '2'"),
        ({"1.png": image, "1.json": b'{"lable": 3}'}, "1.json holds no label"),
        ({"1.png": image, "1.json": b"[1"}, "1.json holds no label"),
        ({"1.png": image, "1.cls": b"\xff"}, "1.cls holds no label"),
        ({"1.txt": b"a cat", "1.left.png": image}, "'1' has no .png or .jpg"),
    ):
        listing(files)
        refused(says, lambda: open_webdataset(folder, CAT_DOG, 1))


@pytest.mark.parametrize("damage", ["cut", "cut in a header", "no end", "packed", "text"])
def test_a_damaged_shard_is_named(tmp_path: Path, damage: str) -> None:
    path = write_shards(tmp_path, range(10)) / "shard-0000.tar"
    whole = path.read_bytes()
    header = whole.index(b"0005.jpg")
    data = {
        "cut": whole[: header + 1000],
        "cut in a header": whole[: header + 100],
        "no end": whole[:header],
        "packed": gzip.compress(whole),
        "text": b"no shard" * 200,
    }
    path.write_bytes(data[damage])
    refused("shard-0000.tar cannot be read as a tar", lambda: open_webdataset(tmp_path, NONE, 1))


def test_compressed_shards_are_told_from_none(tmp_path: Path) -> None:
    (tmp_path / "one.tar.gz").write_bytes(b"")
    refused("one.tar.gz is compressed", lambda: open_webdataset(tmp_path, NONE, 1))


def test_a_shard_that_has_become_shorter_since_is_an_error_of_its_sample(tmp_path: Path) -> None:
    path = write_shards(tmp_path, range(10)) / "shard-0000.tar"
    items = open_webdataset(tmp_path, NONE, 1)
    path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(OSError, match="become shorter"):
        items.read(9)
