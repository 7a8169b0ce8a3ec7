"""Data sets of files in every format."""

from __future__ import annotations

import io
import json
import re
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from PIL import Image

from fedwan.config import DataConfig
from fedwan.data import files, open_shard
from fedwan.data.decode import BadPicture, Resize
from fedwan.data.files import hold_out, open_files
from fedwan.errors import ConfigError
from fedwan.metrics import measure_quality, num_generated
from tests.data.files import crop, encoded, open_one, refused, stream_of, write_folder, write_shards

CLASSES = ("cat", "dog")
NUM = 30


def folder(path: Path) -> None:
    write_folder(path, range(NUM), CLASSES)


def table() -> datasets.Dataset:
    images = [Image.fromarray(crop(number)) for number in range(NUM)]
    labels = [number % 2 for number in range(NUM)]
    features = datasets.Features(
        {"image": datasets.Image(), "label": datasets.ClassLabel(names=["dog", "cat"])}
    )
    data = {"image": images, "label": [1 - label for label in labels]}
    return datasets.Dataset.from_dict(data, features=features)


def parquet(path: Path) -> None:
    path.mkdir(parents=True)
    table().to_parquet(path / "part.parquet")


def hf(path: Path) -> None:
    datasets.DatasetDict(train=table(), test=table().select([0])).save_to_disk(path)


def webdataset(path: Path) -> None:
    write_shards(path, range(NUM), CLASSES)


FORMATS: dict[str, Callable[[Path], None]] = {
    "folder": folder,
    "webdataset": webdataset,
    "parquet": parquet,
    "hf": hf,
}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")


def config(path: Path, name: str = "folder", **others: Any) -> DataConfig:
    return DataConfig(name, path=str(path), **{"size": 16, **others})


def bits(x: torch.Tensor) -> set[bytes]:
    return {sample.numpy().tobytes() for sample in x}


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_its_pictures_with_the_run_s_classes_and_resumes_to_the_bit(
    tmp_path: Path, name: str
) -> None:
    FORMATS[name](tmp_path / "data")
    asked = config(tmp_path / "data", name, classes="cat,dog", split="own", flip=True)
    shard = open_one(asked)
    assert shard.num_samples == 18 and shard.held_out.x.shape == (12, 3, 16, 16)
    assert not shard.public
    seen = shard.drawn(18, 0)
    assert seen.x.abs().max() <= 1 and seen.x.dtype == torch.float32
    assert not bits(seen.x) & bits(shard.held_out.x)
    # A crop's class is its number's parity in every format.
    means = torch.stack([Resize(16).apply(encoded(n, "png")).mean() for n in range(NUM)])
    for x, y in zip(seen.x, seen.y, strict=True):
        assert int((means - x.mean()).abs().argmin()) % 2 == int(y)
    first, again = stream_of(shard), stream_of(shard)
    next(first)
    next(again), next(again)
    again.load_state_dict(first.state_dict())
    for _ in range(4):
        one, other = next(first), next(again)
        assert torch.equal(one.x, other.x) and torch.equal(one.y, other.y)


@pytest.mark.parametrize(
    ("names", "classes", "numbers"),
    [(["1", "2"], "3", [0, 8, 10]), (["2", "0"], "3", [10, 0, 8])],
)
def test_a_table_s_names_are_the_run_s_numbers(
    names: list[str], classes: str, numbers: list[int], tmp_path: Path
) -> None:
    kind = datasets.ClassLabel(names=names)
    table().cast_column("label", datasets.Value("int64")).cast_column("label", kind).save_to_disk(
        tmp_path / "data"
    )
    shard = open_one(config(tmp_path / "data", "hf", classes=classes, split="own"))
    assert shard.count(len(numbers)).tolist() == numbers


def test_a_path_may_go_up_again_beyond_a_link(tmp_path: Path) -> None:
    folder(tmp_path / "there" / "animals")
    (tmp_path / "there" / "below").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "there" / "below")
    up = open_files(config(tmp_path / "link" / ".." / "animals"))
    assert up.keys == open_files(config(tmp_path / "there" / "animals")).keys
    assert up.faults() == []


def test_half_of_the_pictures_are_mirrored_where_asked(tmp_path: Path) -> None:
    folder(tmp_path)
    plain, flipped = (
        next(stream_of(open_one(config(tmp_path, flip=flip)), batch=18)).x for flip in (False, True)
    )
    mirrored = [torch.equal(a, b.flip(-1)) for a, b in zip(flipped, plain, strict=True)]
    same = [torch.equal(a, b) for a, b in zip(flipped, plain, strict=True)]
    assert all(a or b for a, b in zip(mirrored, same, strict=True))
    assert 3 < sum(mirrored) < 15


def test_sites_share_out_the_files_and_hold_out_the_same_ones_of_all_folders(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_folder(tmp_path, range(240), CLASSES)
    asked = config(tmp_path, classes="cat,dog", split="by_label")
    shards = [open_one(asked, site, 2) for site in range(2)]
    drawn = [shard.drawn(240, 0) for shard in shards]
    assert [len(set(batch.y.tolist())) for batch in drawn] == [1, 1]
    assert sum(shard.num_samples for shard in shards) == 240 - 24
    seen, held = [bits(batch.x) for batch in drawn], shards[0].held_out
    assert torch.equal(held.x, shards[1].held_out.x)
    assert not seen[0] & seen[1] and not bits(held.x) & (seen[0] | seen[1])
    assert all(2 < int(half.sum()) < 10 for half in held.y.chunk(2)), "in no order"
    monkeypatch.setattr(files, "_MOST_HELD_BYTES", 14 * 3 * 4 * 16 * 16)
    files._open.cache_clear()
    assert torch.equal(open_one(asked, 0, 2).held_out.x, held.x[:14])


def captioned(path: Path) -> None:
    write_folder(path, range(NUM))
    rows = [{"file_name": file.name, "text": f"crop {file.stem}"} for file in path.iterdir()]
    (path / "metadata.jsonl").write_text("\n".join(map(json.dumps, rows)))


@pytest.mark.parametrize(("name", "write"), [("folder", captioned), ("webdataset", webdataset)])
def test_captions_are_a_list_of_text_beside_their_pictures(
    tmp_path: Path, name: str, write: Callable[[Path], None]
) -> None:
    write(tmp_path / "data")
    asked = config(tmp_path / "data", name, size=40)
    batch = next(stream_of(open_shard(asked, 0, 1, 0, captions=True)))
    assert set(batch) == {"x", "y", "caption"} and len(batch["caption"]) == 7
    for x, caption in zip(batch["x"], batch["caption"], strict=True):
        number = int(caption[5:])
        if name == "folder" and number % 2 == 0:  # JPEG files are not what they were made of
            pixels = torch.from_numpy(crop(number)[:, 4:44].copy())
            assert torch.equal(x, pixels.permute(2, 0, 1).float() * (2 / 255) - 1)
    assert next(stream_of(open_one(asked))).x.shape == (7, 3, 40, 40)


def lines_of(path: Path) -> list[str]:
    captioned(path)
    return sorted((path / "metadata.jsonl").read_text().splitlines())


@pytest.mark.parametrize(
    ("edit", "text"),
    [
        (lambda lines: lines[:2], "do not match, 28 are without the other, the first 0002.png;"),
        (lambda lines: [*lines, '{"file_name": "gone.png", "text": "a"}'], "the first gone.png;"),
        (lambda lines: [*lines, '{"text": "a"}'], "the first without a file_name; give each"),
        (lambda lines: [*lines[:2], lines[2].replace(",", "")], r"jsonl, line 3, is no JSON"),
    ],
)
def test_metadata_and_pictures_that_do_not_match_are_refused(
    tmp_path: Path, edit: Callable[[list[str]], list[str]], text: str
) -> None:
    lines = edit(lines_of(tmp_path))
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    refused(text, lambda: open_one(config(tmp_path)))


def test_where_captions_are_wanted_each_picture_has_a_text(tmp_path: Path) -> None:
    lines = lines_of(tmp_path)
    lines[3:5] = [line.replace('"crop 000', 'null, "was": "') for line in lines[3:5]]
    (tmp_path / "metadata.jsonl").write_text("\n".join(lines))
    says = "2 of 30 samples have no caption, the first .*/0003.jpg; give each one a text, or rem"
    refused(says, lambda: open_shard(config(tmp_path), 0, 1, 0, captions=True))
    assert open_files(config(tmp_path)).faults() == []
    (tmp_path / "metadata.jsonl").unlink()
    says = "holds 0 columns of captions where one is wanted, .*in a metadata.jsonl, name one 'capt"
    files._open.cache_clear()
    refused(says, lambda: open_shard(config(tmp_path), 0, 1, 0, captions=True))


def test_pairs_are_read_in_both_directions_and_cut_before_they_are_resized(tmp_path: Path) -> None:
    pixels = np.zeros((40, 64, 3), np.uint8)
    pixels[:, 32:] = 255
    x = Resize(32, pairs=True).apply(saved(Image.fromarray(pixels)))
    assert (x[:3] == -1).all() and (x[3:] == 1).all()
    write_folder(tmp_path, range(10), side=60)
    there, back = (
        open_one(config(tmp_path, name, size=32)).held_out.x for name in ("pairs", "pairs_b_to_a")
    )
    assert there.shape == (5, 6, 32, 32)
    assert torch.equal(there, torch.cat([back[:, 3:], back[:, :3]], dim=1))


def test_what_is_held_out_stays_when_others_come() -> None:
    few = [f"{number}.png" for number in range(1000)]
    held = {few[number] for number in hold_out(few).nonzero().flatten().tolist()}
    more = few + [f"new-{number}.png" for number in range(100)]
    still = {more[number] for number in hold_out(more).nonzero().flatten().tolist()}
    assert len(held) == 100 and len(still) == 110 and len(held & still) > 90
    nums = [int(hold_out([str(n) for n in range(num)]).sum()) for num in (8, 30, 9000)]
    assert nums == [4, 12, 512]


@pytest.mark.parametrize(
    ("others", "text"),
    [
        ({"classes": "cat,fox"}, "dog/.* is of class 'dog', which data.classes does not name"),
        ({"name": "webdataset"}, "holds no \\*.tar.; data.name=webdataset takes a folder of webd"),
        ({"name": "hf"}, "cannot be read .*data.name=hf takes a folder of what save_to_disk"),
        ({"name": "parquet"}, "holds no \\*.parquet.; data.name=parquet takes a folder of parq"),
        ({"path": "/no/such"}, "data.path = '/no/such' is no folder on this machine"),
        ({"path": "", "split": "own"}, "data.path is '' where each site has data of its own"),
        ({"batch": 19}, "data.batch = 19 is more than the 18 samples that a site trains on"),
    ],
)
def test_files_that_cannot_be_used_are_refused_in_one_line(
    tmp_path: Path, others: dict[str, Any], text: str
) -> None:
    folder(tmp_path)
    refused(text, lambda: open_one(config(**{"path": tmp_path, **others})))


def test_classes_that_are_called_by_numbers_are_not_taken_for_places_in_the_list(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, range(NUM), ("1", "2", "3"))
    by_number = {number: number % 3 for number in range(NUM)}
    for classes in ("1,2,3", "3,1,2"):
        files = open_files(config(tmp_path, classes=classes))
        told = {
            int(Path(key).stem): int(y) for key, y in zip(files.keys, files.labels, strict=True)
        }
        order = [classes.split(",").index(name) for name in ("1", "2", "3")]
        assert told == {number: order[found] for number, found in by_number.items()}
    says = "is of class '3', which data.classes does not name"
    refused(says, lambda: open_one(config(tmp_path, classes="1,2,4,5")))


def test_sites_with_data_of_their_own_name_the_classes_that_their_tables_name(
    tmp_path: Path,
) -> None:
    table().save_to_disk(tmp_path)
    own = config(tmp_path, "hf", classes="2", split="own")
    says = "has classes of its own, dog, cat, .* name the classes of all sites, as in data.classes="
    refused(says, lambda: open_one(own))
    assert open_one(config(tmp_path, "hf", classes="cat,dog", split="own")).count(2).min() > 0
    shared = open_files(config(tmp_path, "hf", classes="2"))  # the same table at every site
    assert shared.labels.tolist() == table()["label"]


def test_a_folder_without_pictures_is_told_so(tmp_path: Path) -> None:
    (tmp_path / "notes.txt").touch()
    refused("it holds no images.; data.name=folder takes", lambda: open_one(config(tmp_path)))


def test_a_link_to_a_folder_of_pictures_is_refused_and_not_passed_over(tmp_path: Path) -> None:
    data, elsewhere = tmp_path / "data", tmp_path / "cat"
    folder(data)
    elsewhere.mkdir()
    (data / "cat" / "more").symlink_to(elsewhere)
    refused("cat/more is a link to a folder, which is not foll", lambda: open_one(config(data)))


def test_of_several_columns_of_a_kind_the_one_of_its_name_is_taken(tmp_path: Path) -> None:
    rows = table()
    other = rows.rename_columns({"image": "conditioning_image", "label": "coarse_label"})
    other = other.map(lambda _: {"coarse_label": 0})
    datasets.concatenate_datasets([other, rows], axis=1).save_to_disk(tmp_path / "hf")
    shard = open_one(config(tmp_path / "hf", "hf", classes="dog,cat"))
    assert shard.held_out.y.sum() > 0, "the other one's labels are all 0"


def test_too_few_damaged_or_unlabelled_files_or_a_missing_extra_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, flat, tars, wrong = (tmp_path / name for name in ("few", "flat", "tars", "wrong"))
    write_folder(few, range(7))
    refused("holds 7 samples; put 8 or more", lambda: open_one(config(few)))
    write_folder(flat, range(20))
    says = "is of class 'None', which data.classes does not name"
    refused(says, lambda: open_one(config(flat, classes="cat,dog")))
    tars.mkdir()
    (tars / "a.tar").write_bytes(b"x" * 2000)
    refused("cannot be read .invalid header", lambda: open_one(config(tars, "webdataset")))
    rows = table().remove_columns("label").add_column("label", [[0, 1]] * NUM)
    rows.save_to_disk(wrong)
    says = r"row 0 is of class '\[0, 1\]', which data.classes"
    refused(says, lambda: open_one(config(wrong, "hf", classes="2")))
    rows.remove_columns("image").save_to_disk(tmp_path / "none")
    none = config(tmp_path / "none", "hf")
    refused("holds 0 columns of images .*among label", lambda: open_one(none))
    monkeypatch.setitem(sys.modules, "datasets", None)
    refused(r"needs datasets.*pip install 'fedwan\[data\]'", lambda: open_one(config(flat, size=8)))


def test_the_next_picture_stands_in_for_one_that_cannot_be_read_until_there_are_many(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_folder(tmp_path, range(30))
    files = open_files(config(tmp_path))
    bad = [tmp_path / files.keys[row] for row in range(9)]
    bad[0].write_bytes(b"no image")
    bad[2].unlink()
    assert len(list(files.samples(range(4)))) == 2
    assert f"{bad[0]} cannot be read as an image; remove it; until then" in caplog.text
    assert f"{bad[2]} cannot be read (No such file" in caplog.text
    row = int((~files.is_held_out).nonzero()[0])
    (tmp_path / files.keys[row]).write_bytes(b"no image")
    files.train("own", 0, 1, 0)[0]
    with pytest.raises(ConfigError, match="cannot be read as an image; remove it$"):
        files.train("own", 0, 1, 0, exact=True)[0]  # a neighbour would be in the batch twice
    for path in bad:
        path.write_bytes(b"no image")
    with pytest.raises(ConfigError, match=r"\(nor can the 7 before it\)"):
        list(files.samples(range(30)))
    between = (row for number in range(9) for row in (number, number + 10))
    assert len(list(files.samples(between))) == 9, "none of these come in a row"


def test_a_stamp_tells_of_other_samples_and_of_files_that_have_changed(tmp_path: Path) -> None:
    write_folder(tmp_path, range(20))
    one, again, other = (
        open_files(config(tmp_path)).train("iid", site, 2, 0).stamp() for site in (0, 0, 1)
    )
    (tmp_path / "0003.jpg").touch()
    assert one == again != other
    assert one != open_files(config(tmp_path)).train("iid", 0, 2, 0).stamp()


def test_a_few_faults_are_told_one_by_one_and_the_others_counted(tmp_path: Path) -> None:
    write_folder(tmp_path, range(60))
    for number in (3, 5):
        (tmp_path / f"{number:04d}.jpg").write_bytes(b"no image")
    small, *damaged = open_files(config(tmp_path, size=512)).faults()
    assert re.search(r"0000.png is 48 x 40 pixels, .* \(and 57 more, of 60 that were re", small)
    assert len(damaged) == 2 and damaged[1].endswith(
        "0005.jpg cannot be read as an image; remove it"
    )


def test_a_damaged_picture_that_is_held_out_is_done_without_until_one_is_left(
    tmp_path: Path,
) -> None:
    write_folder(tmp_path, range(8))
    files = open_files(config(tmp_path))
    bad = [tmp_path / files.keys[row] for row in files.is_held_out.nonzero().flatten().tolist()]
    bad[0].write_bytes(b"no image")
    real = open_one(config(tmp_path)).held_out
    made = torch.zeros(num_generated("folder", 3), 3, 16, 16)
    assert len(real.x) == 3 and measure_quality("folder", real, made)["fd"] > 0
    for path in bad[:3]:
        path.write_bytes(b"bad")
    again = config(tmp_path, size=8)  # what was read is kept
    refused("4 samples are held out, of which 1 can be read", lambda: open_one(again))


def saved(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    out = io.BytesIO()
    image.save(out, kind, **options)
    return out.getvalue()


def test_the_middle_square_is_turned_and_resized_to_values_between_minus_one_and_one() -> None:
    pixels = np.zeros((16, 32, 3), np.uint8)
    pixels[:, 8:24] = (255, 0, 51)
    x = Resize(8).apply(saved(Image.fromarray(pixels)))
    assert x.shape == (3, 8, 8) and x.dtype == torch.float32
    assert torch.allclose(x[:, 4, 4], torch.tensor([1.0, -1.0, -0.6]))
    assert torch.equal(x.amin((1, 2)), x.amax((1, 2))), "nothing but the square"
    pixels[:8], pixels[8:] = 255, 0
    exif = Image.Exif()
    exif[0x0112] = 3  # upside down
    x = Resize(8).apply(saved(Image.fromarray(pixels), exif=exif))
    assert float(x[0, 0, 0]) == -1 and float(x[0, 7, 0]) == 1


GREYS = np.linspace(0, 255, 64).round().reshape(8, 8).astype(np.uint8)


@pytest.mark.parametrize("values", [GREYS.astype(np.uint16) * 257, GREYS.astype(">u2") * 257])
def test_greys_of_16_bits_are_those_of_8(values: np.ndarray) -> None:
    expected = Resize(4).apply(saved(Image.fromarray(GREYS)))
    assert torch.equal(Resize(4).apply(saved(Image.fromarray(values), "TIFF")), expected)


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P", "RGB"])
def test_transparent_pixels_are_white(mode: str) -> None:
    pixels = np.zeros((8, 8, 4), np.uint8)
    pixels[:4, :, 3] = 255
    image = Image.fromarray(pixels)
    if mode == "RGB":  # one colour stands for them
        pixels[4:] = 7
        data = saved(Image.fromarray(pixels[..., :3].copy()), transparency=(7, 7, 7))
    else:
        data = saved(image.quantize() if mode == "P" else image.convert(mode))
    x = Resize(8).apply(data)
    assert (x[:, :4] == -1).all() and (x[:, 4:] == 1).all()


def with_odd_exif() -> bytes:
    """A good picture, which is to be turned, and whose resolution is text."""
    exif = Image.Exif()
    exif[0x0112], exif[0x011A] = 6, 72.0
    data = saved(Image.new("RGB", (40, 50)), "JPEG", exif=exif)
    for order in "<>":
        data = data.replace(
            struct.pack(f"{order}HH", 0x011A, 5), struct.pack(f"{order}HH", 0x011A, 2)
        )
    return data


@pytest.mark.parametrize(
    ("data", "transform", "text"),
    [
        (b"no image", Resize(8), "cannot be read as an image; remove it"),
        (encoded(0, "png")[:300], Resize(8), r"cannot be read as an image \(.*; remove it"),
        (encoded(0, "jpeg"), Resize(64), "is 48 x 40 pixels, smaller than data.size = 64"),
        (saved(Image.new("RGB", (7, 4))), Resize(8, pairs=True), "is 7 pixels wide, which two"),
        (
            saved(Image.new("RGB", (32, 32))),
            Resize(32, pairs=True),
            "is 32 x 32 pixels, of which each half must have data.size = 32; make it two pictures",
        ),
        (saved(Image.new("F", (8, 8), 0.5), "TIFF"), Resize(8), "mode 'F', numbers whose black"),
        (with_odd_exif(), Resize(8), "cannot be read as an image .*; remove it"),
    ],
)
def test_what_is_no_such_picture_is_told(data: bytes, transform: Resize, text: str) -> None:
    with pytest.raises(BadPicture, match=text):
        transform.apply(data)
