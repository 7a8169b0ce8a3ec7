"""The data sets that come with fedwan, what is known of those of files, and splits."""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from fedwan.app import load_run
from fedwan.config import SET_NAMES, Config, DataConfig
from fedwan.data import find_source, num_labels, source_of, toys
from fedwan.data.sources import SOURCES, check_data, parse_classes, parse_split, split_indices
from fedwan.data.toys import GROUPS, _cut, _held_out_blocks, listed_emoji
from fedwan.state import hash_state
from fedwan.workloads.base import Batch
from tests.data.emoji import LIST, fake_drawing, install
from tests.data.files import refused

GOLDEN = {
    "digits": (1397, 400, "241314c099eb049e"),
    "ring8": (8000, 400, "ba22ab1d4bc32578"),
    "photo_edges": (2492, 335, "234de8c502b58c7d"),
}
"""Training samples, held-out ones, and a hash of both: the same in every process. Of photographs it
is of the sums of pixels, since the last bits of a convolution are the processor's."""


def rows(x: Tensor) -> set[bytes]:
    return {row.numpy().tobytes() for row in x}


def brightness(part: Batch) -> Tensor:
    """Of photographs, what each mean of pixels is the sum of."""
    nums = torch.tensor([factor**2 for factor in toys._PHOTOS.values()])[part.y]
    return ((part.x[:, 1:] + 1) / 2 * 255 * nums.view(-1, 1, 1, 1)).round().int()


@pytest.mark.parametrize("name", GOLDEN)
def test_what_is_announced_is_what_is_loaded_to_the_bit(name: str) -> None:
    source = find_source(name)
    assert source.public and source.load() is source.load()
    train, held_out = source.load()
    for part in (train, held_out):
        assert part.x.shape[1:] == source.shape and part.x.dtype == torch.float32
        assert set(part.y.tolist()) == set(range(source.num_classes))
    named = {"a": train.x, "b": train.y, "c": held_out.x, "d": held_out.y}
    if name == "photo_edges":
        edges = [float(part.x[:, 0].mean()) for part in (train, held_out)]
        assert edges == pytest.approx([-0.801508, -0.790752], abs=1e-5)
        named |= {"a": brightness(train), "c": brightness(held_out)}
    else:  # photographs have flat pieces that are equal
        assert not rows(train.x) & rows(held_out.x)
    assert (len(train.x), len(held_out.x), hash_state(named)[:16]) == GOLDEN[name]


def test_no_pixel_is_in_a_training_crop_and_in_a_held_out_one() -> None:
    height, width = 213, 320
    places = torch.arange(height * width, dtype=torch.float32).view(1, height, width)
    crops, share = _cut(places), _cut(_held_out_blocks(places)).mean(dim=(1, 2, 3))
    trained, held_out = (set(crops[mask].flatten().tolist()) for mask in (share == 0, share == 1))
    assert trained and held_out and not trained & held_out


def test_files_are_known_before_they_are_opened() -> None:
    folder = source_of(DataConfig("folder", classes="cat,dog", path="/x"))
    assert (folder.shape, folder.num_classes, folder.public) == ((3, 64, 64), 2, False)
    pairs = source_of(DataConfig("pairs"))
    assert (pairs.shape, pairs.num_classes, pairs.inputs) == ((6, 256, 256), 1, 3)
    assert num_labels(Config(sites=3, data=DataConfig("digits", labels="site"))) == 3


def test_a_name_that_nobody_knows_is_told_alone() -> None:
    assert tuple(SOURCES) == SET_NAMES
    words = ["data.name=foldrs", "data.path=/x", "data.size=32", "data.split=own"]
    says = "'foldrs', which fedwan does not know; did you mean 'folder'"
    refused(says, lambda: load_run(None, words))


@pytest.mark.parametrize("text", ["astronaut", "1", "0", "cat,,dog", "cat,dog,cat"])
def test_what_names_no_classes_is_refused(text: str) -> None:
    refused(f"'{text}'; give two or more different ones", lambda: parse_classes(text))


LABELS = torch.arange(400) % 10


@given(
    split=st.sampled_from(["iid", "by_label", "dirichlet:0.5", "dirichlet:100"]),
    num_sites=st.integers(1, 8),
    seed=st.integers(0, 2**31),
)
@settings(max_examples=40, deadline=None)
def test_shards_are_disjoint_cover_everything_and_are_never_empty(
    split: str, num_sites: int, seed: int
) -> None:
    parts = split_indices(LABELS, split, num_sites, seed)
    assert len(parts) == num_sites
    assert all(len(part) > 0 for part in parts)
    assert torch.equal(torch.cat(parts).sort().values, torch.arange(len(LABELS)))
    again = split_indices(LABELS, split, num_sites, seed)
    assert all(torch.equal(a, b) for a, b in zip(parts, again, strict=True))
    if split == "iid":
        assert len({len(part) for part in parts}) <= 2
    if split == "by_label":
        held = [set(LABELS[part].tolist()) for part in parts]
        assert sum(len(labels) for labels in held) == 10
        assert max(map(len, held)) - min(map(len, held)) <= 1


def test_an_uneven_split_is_drawn_again_until_every_site_has_data() -> None:
    y = torch.arange(60) % 3
    for seed in range(5):
        parts = split_indices(y, "dirichlet:0.2", 6, seed)
        assert all(map(len, parts)) and sum(map(len, parts)) == 60


def test_splits_that_leave_a_site_without_data_are_refused() -> None:
    alike = torch.zeros(100, dtype=torch.int64)
    says = "sites is 5, but there are only 4 samples"
    refused(says, lambda: split_indices(LABELS[:4], "iid", 5, 0))
    says = "'dirichlet:0.001' and sites is 8, .* a larger A"
    refused(says, lambda: split_indices(alike, "dirichlet:0.001", 8, 0))


@pytest.mark.parametrize("kind", ["dirichlet", "IID"])
@pytest.mark.parametrize("number", ["", ":", ":x", ":0", ":-1", ":nan", ":inf"])
def test_what_is_no_split_is_refused_with_the_valid_forms(kind: str, number: str) -> None:
    says = f"'{kind}{number}'; valid: iid, by_label, or diri"
    refused(says, lambda: parse_split(kind + number))


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    install(tmp_path, monkeypatch)
    return tmp_path


@pytest.fixture
def drawn(installed: Path, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    return fake_drawing(monkeypatch)


@pytest.mark.parametrize(
    ("file", "package"),
    [("emoji-test.txt", "unicode-data"), ("font.ttf", "fonts-noto-color-emoji")],
)
def test_emoji_without_their_font_or_list_name_the_package(
    installed: Path, file: str, package: str
) -> None:
    (installed / file).unlink()
    refused(f"not at {installed / file}: install the package {package}$", toys.load_emoji)


def test_emoji_are_drawn_again_for_another_size_font_or_list_alone(
    installed: Path, drawn: list[int]
) -> None:
    first, again, _ = toys.load_emoji(8), toys.load_emoji(8), toys.load_emoji(16)
    assert all(torch.equal(a.x, b.x) for a, b in zip(first, again, strict=True))
    assert drawn == [8, 16]
    (installed / "font.ttf").write_bytes(b"an0ther")
    toys.load_emoji(8)
    (installed / "emoji-test.txt").write_text(LIST.replace("1F373", "1F3A4"))
    toys.load_emoji(8)
    assert drawn == [8, 16, 8, 8]
    for file in (installed / "home" / ".cache" / "fedwan").iterdir():
        file.write_bytes(b"damaged")
    assert torch.equal(toys.load_emoji(8)[0].x, first[0].x) and len(drawn) == 5


@pytest.mark.usefixtures("drawn")
def test_emoji_have_the_size_that_is_asked_for() -> None:
    source = source_of(DataConfig("emoji", size=64))
    train, _ = source.load()
    assert source.shape == train.x.shape[1:] == (3, 64, 64)
    assert source_of(DataConfig("emoji")).shape == find_source("emoji", 32).shape == (3, 32, 32)
    assert find_source("digits", 64) is find_source("digits")
    assert load_run(None, ["data.name=emoji", "data.size=64"]).data.size == 64
    for size in (8, 256):
        says = f"data.size = {size} is out of range for emoji; choose 0, or 16 to 128"
        refused(says, partial(check_data, DataConfig("emoji", size=size)))


def test_emoji_without_raqm_which_would_be_drawn_in_pieces_are_refused(
    installed: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("PIL.features.check", lambda feature: feature != "raqm")
    refused("with raqm, .* install the package libfribidi0", toys.load_emoji)


@pytest.mark.usefixtures("installed")
def test_variants_of_skin_and_gender_are_one_family_and_flags_are_not() -> None:
    found = listed_emoji()
    assert [one.name for one in found][:2] == ["waving hand", "waving hand: light skin tone"]
    assert Counter(one.family for one in found) == {
        "waving hand": 2,
        "cook": 2,
        "flag: France": 1,
        "flag: Germany": 1,
    }
    assert {GROUPS[one.group] for one in found} == {"People & Body", "Flags"}


@pytest.mark.slow
@pytest.mark.skipif(
    not all(Path(paths[0]).exists() for paths in (toys.FONTS, toys.LISTS)),
    reason="the font Noto Color Emoji or Unicode's list is not installed",
)
def test_no_family_is_on_both_sides_and_every_group_is_held_out() -> None:
    train, held_out = find_source("emoji").load()
    assert train.x.shape[1:] == (3, 32, 32) and len(train.x) > 3000
    assert -1 <= float(train.x.min()) < float(train.x.max()) <= 1
    assert set(held_out.y.tolist()) == set(range(len(GROUPS)))
    assert len({one.family for one in listed_emoji() if one.is_held_out}) > 100
