"""Folders of images."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from fedwan.config import DataConfig
from fedwan.data.classes import parse_classes
from fedwan.data.folder import open_folder
from tests.data.files import open_one, refused, stream_of, take, write_folder

CLASSES = ("cat", "dog")


def test_files_are_listed_in_name_order_with_those_below(tmp_path: Path) -> None:
    write_folder(tmp_path, [2, 0])
    write_folder(tmp_path / "b", [1])
    (tmp_path / "readme.txt").write_text("no image")
    (tmp_path / "b-").mkdir()
    (tmp_path / "b-" / "UPPER.JPG").write_bytes(b"")
    items = open_folder(tmp_path, parse_classes(""), 1)
    assert items.names == ("0000.png", "0002.png", "b/0001.jpg", "b-/UPPER.JPG")
    assert items.labels.tolist() == [0, 0, 0, 0]
    assert items.read(2) == (tmp_path / "b" / "0001.jpg").read_bytes()
    assert items.where(2) == str(tmp_path / "b" / "0001.jpg")


def test_labels_are_the_runs_and_not_those_that_this_site_happens_to_have(tmp_path: Path) -> None:
    write_folder(tmp_path / "dog", range(3))
    write_folder(tmp_path / "cat" / "deeper", range(3, 5))
    items = open_folder(tmp_path, parse_classes("ant,cat,dog"), 1)
    assert items.labels.tolist() == [1, 1, 2, 2, 2]


def test_what_cannot_be_used_is_refused_in_one_line(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "data", range(6), CLASSES)
    cat_dog = parse_classes("cat,dog")
    refused("nowhere' is no folder", lambda: open_folder(tmp_path / "nowhere", cat_dog, 1))
    refused("holds 6 PNG or JPEG files; put 8", lambda: open_folder(folder, cat_dog, 8))
    refused(
        r"data/dog is of class 'dog', which data.classes does not name \(ant, cat\)",
        lambda: open_folder(folder, parse_classes("ant,cat"), 1),
    )
    write_folder(folder, [9])
    refused(
        r"0009.jpg lies in no folder of a class.*leave data.classes out",
        lambda: open_folder(folder, cat_dog, 1),
    )
    (tmp_path / "empty").mkdir()
    refused("holds 0 PNG or JPEG", lambda: open_folder(tmp_path / "empty", cat_dog, 24))


def test_links_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    write_folder(tmp_path / "others", range(3))
    mine = write_folder(tmp_path / "mine", range(2))
    (mine / "link").symlink_to(tmp_path / "others")
    assert len(open_folder(mine, parse_classes(""), 1).names) == 2


@pytest.mark.skipif(os.geteuid() == 0, reason="root may list any folder")
def test_a_folder_that_may_not_be_listed_is_not_taken_for_empty(tmp_path: Path) -> None:
    write_folder(tmp_path / "closed", range(3)).chmod(0)
    refused("closed cannot be listed", lambda: open_folder(tmp_path, parse_classes(""), 0))


def test_networks_may_be_told_the_site_that_holds_a_file(tmp_path: Path) -> None:
    write_folder(tmp_path, range(40), CLASSES)
    asked = DataConfig("folder", path=str(tmp_path), classes="cat,dog", size=16)
    plain, told = (
        open_one(replace(asked, labels=labels), site=1, sites=2) for labels in ("class", "site")
    )
    batches = [take(stream_of(shard), 4) for shard in (plain, told)]
    assert [x for x, _ in batches[0]] == [x for x, _ in batches[1]]
    assert {label for _, y in batches[0] for label in y} == {0, 1}
    assert {label for _, y in batches[1] for label in y} == {1}
    assert torch.equal(plain.some(9).y, told.some(9).y)
