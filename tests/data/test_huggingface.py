"""Data sets on disk that Hugging Face's `datasets` wrote."""

from __future__ import annotations

import importlib
import io
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from fedwan.config import DataConfig
from fedwan.data import FileShard, files
from fedwan.data.classes import parse_classes
from fedwan.data.huggingface import open_huggingface
from tests.data.files import encoded, kind_of, open_one, refused, stream_of, take

NONE = parse_classes("")


@pytest.fixture(autouse=True)
def forget() -> None:
    """Folders change here under the same name."""
    files._open.cache_clear()


def test_without_the_package_one_line_says_how_to_get_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(
        r"needs the package datasets.*fedwan\[hf\]", lambda: open_huggingface(tmp_path, NONE, 1)
    )


@pytest.fixture(scope="module")
def datasets() -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("HF_HUB_OFFLINE", "1")
        yield importlib.import_module("datasets")


def rows(num: int) -> dict[str, list[Any]]:
    images = [{"bytes": encoded(n, kind_of(n)), "path": None} for n in range(num)]
    return {"image": images, "label": [n % 3 for n in range(num)], "note": ["x"] * num}


def save(datasets: Any, folder: Path, num: int = 30, **features: Any) -> Path:
    """Images, a class label of `cat`, `dog` and `eel`, and another column."""
    kinds = {
        "image": datasets.Image(),
        "label": datasets.ClassLabel(names=["cat", "dog", "eel"]),
        "note": datasets.Value("string"),
    } | features
    table = datasets.Dataset.from_dict(rows(num), features=datasets.Features(kinds))
    table.save_to_disk(str(folder))
    return folder


def test_rows_are_read_in_any_order_as_the_files_that_they_were(
    datasets: Any, tmp_path: Path
) -> None:
    items = open_huggingface(save(datasets, tmp_path), NONE, 1)
    assert len(items.names) == 30
    for number in (29, 0, 14):
        assert items.read(number) == encoded(number, kind_of(number))
    assert items.labels.tolist() == [0] * 30
    assert items.where(14) == f"{tmp_path}: row 14 of 'image'"


def test_labels_follow_the_names_that_the_run_gives_and_not_their_numbers_here(
    datasets: Any, tmp_path: Path
) -> None:
    save(datasets, tmp_path)
    by_name = open_huggingface(tmp_path, parse_classes("ant,eel,dog,cat"), 1)
    assert by_name.labels[:4].tolist() == [3, 2, 1, 3]
    assert open_huggingface(tmp_path, parse_classes("3"), 1).labels[:4].tolist() == [0, 1, 2, 0]


def test_a_column_of_numbers_called_label_will_do(datasets: Any, tmp_path: Path) -> None:
    save(datasets, tmp_path, label=datasets.Value("int64"))
    assert open_huggingface(tmp_path, parse_classes("3"), 1).labels[:4].tolist() == [0, 1, 2, 0]


def test_shards_stream_them_with_threads_and_without(datasets: Any, tmp_path: Path) -> None:
    save(datasets, tmp_path)
    seen = []
    for workers in (0, 3):
        config = DataConfig(
            "hf", path=str(tmp_path), size=24, classes="cat,dog,eel", workers=workers
        )
        one = open_one(config)
        assert isinstance(one, FileShard) and len(one.index) == 18
        stream = stream_of(one)
        seen.append(take(stream, 8))
        stream.close()
    assert seen[0] == seen[1]


def test_of_several_splits_the_one_for_training_is_taken(datasets: Any, tmp_path: Path) -> None:
    save(datasets, tmp_path / "one", 25)
    one = datasets.load_from_disk(str(tmp_path / "one"))
    datasets.DatasetDict(train=one, test=one.select(range(3))).save_to_disk(str(tmp_path / "all"))
    assert len(open_huggingface(tmp_path / "all", NONE, 1).names) == 25
    datasets.DatasetDict(test=one).save_to_disk(str(tmp_path / "test"))
    refused(
        "holds the splits test and no 'train'; name the folder of one.*test/test",
        lambda: open_huggingface(tmp_path / "test", NONE, 1),
    )


def test_rows_that_were_chosen_from_more_are_read_as_such(datasets: Any, tmp_path: Path) -> None:
    save(datasets, tmp_path / "all")
    chosen = datasets.load_from_disk(str(tmp_path / "all")).select([5, 3, 20])
    chosen.save_to_disk(str(tmp_path / "some"))
    items = open_huggingface(tmp_path / "some", NONE, 1)
    assert [items.read(n) for n in range(3)] == [encoded(n, kind_of(n)) for n in (5, 3, 20)]


def test_what_cannot_be_used_is_refused_in_one_line(datasets: Any, tmp_path: Path) -> None:
    folder = save(datasets, tmp_path / "data")
    refused("holds 30 rows; put 31", lambda: open_huggingface(folder, NONE, 31))
    refused(
        "row 1 is of class 'dog', which data.classes does not name",
        lambda: open_huggingface(folder, parse_classes("cat,eel"), 1),
    )
    (tmp_path / "empty").mkdir()
    refused("cannot be read as a data set", lambda: open_huggingface(tmp_path / "empty", NONE, 1))
    plain = datasets.load_from_disk(str(folder)).remove_columns(["label"])
    plain.save_to_disk(str(tmp_path / "plain"))
    refused(
        "holds no labels where one column is wanted",
        lambda: open_huggingface(tmp_path / "plain", parse_classes("3"), 1),
    )
    plain.add_column("mask", rows(30)["image"]).cast_column("mask", datasets.Image()).save_to_disk(
        str(tmp_path / "two")
    )
    refused(
        r"2 columns of images \(image, mask\)", lambda: open_huggingface(tmp_path / "two", NONE, 1)
    )
    plain.remove_columns(["image"]).save_to_disk(str(tmp_path / "none"))
    refused("holds no images where", lambda: open_huggingface(tmp_path / "none", NONE, 1))


def test_a_row_without_an_image_is_an_error_of_that_row(datasets: Any, tmp_path: Path) -> None:
    images: list[Any] = [{"bytes": encoded(n, kind_of(n)), "path": None} for n in range(30)]
    images[7] = None
    features = datasets.Features({"image": datasets.Image()})
    table = datasets.Dataset.from_dict({"image": images}, features=features)
    table.save_to_disk(str(tmp_path))
    config = DataConfig("hf", path=str(tmp_path), size=24)
    refused("row 7 of 'image' cannot be read .the row holds no image", lambda: open_one(config))


def test_images_beside_the_table_are_read_where_it_says(datasets: Any, tmp_path: Path) -> None:
    path = tmp_path / "one.png"
    path.write_bytes(encoded(0, "png"))
    features = datasets.Features({"image": datasets.Image()})
    images = [{"bytes": None, "path": str(path)}]
    table = datasets.Dataset.from_dict({"image": images}, features=features)
    table.save_to_disk(str(tmp_path / "data"))
    read = open_huggingface(tmp_path / "data", NONE, 1).read(0)
    assert Image.open(io.BytesIO(read)).size == (48, 40)
    assert torch.is_tensor(open_huggingface(tmp_path / "data", NONE, 1).labels)
