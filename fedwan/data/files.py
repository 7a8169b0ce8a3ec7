"""Data sets of files, by Hugging Face `datasets`: tables of pictures, labels and captions.

A picture that turns out to be unreadable during a run is named, and the next one stands in for it:
one damaged file in a million should not stop a run of weeks, and the order of all other samples
stays as it is. Where several in a row cannot be read, that is no accident, and refused.
"""

from __future__ import annotations

import glob
import hashlib
import io
import json
import logging
import os
import struct
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageOps, UnidentifiedImageError
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fedwan.config import DataConfig
from fedwan.data.sources import PAIRS, parse_classes, parse_split, size_of, split_indices
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.files import stamp_of
from fedwan.rng import derive_seed
from fedwan.state import tensor_bytes
from fedwan.workloads.base import Batch

_log = logging.getLogger(__name__)

_LEAST = 8
"""Half of them to train on, half to judge by."""
_LEAST_HELD_OUT, _MOST_HELD_OUT = 12, 512
"""They are held in memory and measured at every evaluation: 400 MB at 256 x 256."""
_MOST_HELD_BYTES = 512 << 20
"""Of those that are held, in their order; of larger pictures they are fewer."""
_ALL_READ, _NUM_READ = 256, 32
"""Before a run: so many are all read, of more some."""
_OWN_LINES = 3
"""Faults of a kind that are told one by one."""
_MOST_IN_A_ROW = 8
"""Unreadable samples for which the next one stands in."""
_COLUMNS = {
    "image": ("image", "jpg", "png"),
    "label": ("label", "labels", "cls", "json"),
    "caption": ("caption", "text", "txt"),
}
"""Names of columns that are taken for what they say, if none is of that kind."""
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_LINE = '{"file_name": "001.png", "text": "…"}'
_SPLIT = "train"
_FORMATS = ("PNG", "JPEG", "WEBP", "BMP", "GIF", "TIFF")
_BOMB = Image.DecompressionBombError
_UNREADABLE = (OSError, SyntaxError, ValueError, EOFError, struct.error, _BOMB)
"""All that Pillow raises for files that are cut short, damaged, or no images."""


class BadPicture(Exception):
    """What is wrong with an image, as the end of a line that begins with its name."""


class Transform(NamedTuple):
    """What is made of an image: the square in its middle, or of pairs both halves, resized."""

    size: int
    """Pixels a side."""
    pairs: bool = False
    """Two images lie side by side in one; each becomes a square, whatever its shape."""
    swapped: bool = False
    """Of pairs: the left half is made from the right one, not the right from the left."""

    @property
    def num_bytes(self) -> int:
        """Of what is made of an image."""
        return 4 * 3 * (1 + self.pairs) * self.size**2

    def apply(self, data: bytes) -> Tensor:
        """RGB, (3, size, size) float32 in [-1, 1]; of pairs 6 channels, the input's first.

        A `BadPicture` if it cannot be read, or is of a size that cannot be used.
        """
        try:
            image = Image.open(io.BytesIO(data), formats=_FORMATS)
            self._check(*image.size)
            parts = self._parts(image)
        except _UNREADABLE as error:
            # Pillow's text on what is no image would name an object in memory.
            is_known = not isinstance(error, UnidentifiedImageError)
            reason = f" ({' '.join(str(error).split())})" if is_known else ""
            raise BadPicture(f"cannot be read as an image{reason}; remove it") from None
        small = [part.resize((self.size, self.size), Image.Resampling.BICUBIC) for part in parts]
        pixels = np.concatenate([np.asarray(part) for part in small], axis=2)
        # numpy copies in the thread that asks; torch would start threads of its own for it.
        return torch.from_numpy(pixels.transpose(2, 0, 1).astype(np.float32) * (2 / 255) - 1)

    def _check(self, width: int, height: int) -> None:
        if self.pairs and width % 2:
            raise BadPicture(
                f"is {width} pixels wide, which two images side by side cannot be; "
                "make the width even"
            )
        if not self.pairs and min(width, height) < self.size:
            raise BadPicture(
                f"is {width} x {height} pixels, smaller than data.size = {self.size}; "
                "remove it, or lower data.size"
            )

    def _parts(self, image: Image.Image) -> list[Image.Image]:
        if not self.pairs:
            image = _rgb(ImageOps.exif_transpose(image))
            side = min(image.size)
            left, top = (image.width - side) // 2, (image.height - side) // 2
            return [image.crop((left, top, left + side, top + side))]
        # Cut before resizing: `resize(box=…)` would look across the middle.
        image, half, height = _rgb(image), image.width // 2, image.height
        boxes = [(0, 0, half, height), (half, 0, 2 * half, height)]
        return [image.crop(box) for box in (boxes[::-1] if self.swapped else boxes)]


def _rgb(image: Image.Image) -> Image.Image:
    """8 bits a channel, transparent pixels on white; a `BadPicture` of values without a range."""
    if image.mode.startswith("I;16"):
        image = Image.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    if image.mode[0] in "IF":
        raise BadPicture(
            f"is of Pillow's mode {image.mode!r}, numbers whose black and white are not known; "
            "save it with 8 or 16 bits a channel, or remove it"
        )
    if image.has_transparency_data:
        image = image.convert("RGBA")
        image = Image.alpha_composite(Image.new("RGBA", image.size, "white"), image)
    return image.convert("RGB")


@dataclass(frozen=True, eq=False)
class Files:
    """A data set of files that has been listed; workers that read ahead get a copy."""

    folder: Path
    rows: Any
    """A `datasets.Dataset` of `image`, undecoded, and where there are any `label` and `caption`."""
    keys: tuple[str, ...]
    """A name for each row, the same wherever the same data lie."""
    classes: tuple[str, ...]
    transform: Transform
    are_files: bool
    """Whether keys are paths below the folder."""

    @cached_property
    def is_held_out(self) -> Tensor:
        """(N,), bool."""
        return hold_out(self.keys)

    @property
    def held_out(self) -> Any:
        """All that is held out, in no order, decoded once: a batch on the CPU."""
        return _held_out(self)

    @cached_property
    def labels(self) -> Tensor:
        """(N,), int64."""
        if not self.classes:
            return torch.zeros(len(self.keys), dtype=torch.int64)
        if "label" in self.rows.column_names:
            # A `.json` of a tar file holds it as `label`.
            given = [v.get("label") if isinstance(v, dict) else v for v in self.rows["label"]]
        else:
            given = [key.partition(os.sep)[0] if os.sep in key else None for key in self.keys]
        numbers: dict[Any, int] = {}
        for row, value in enumerate(given):
            if isinstance(value, list | dict):
                raise ConfigError(
                    f"data.path: {self.name(row)} has the label {value!r}, where one name or "
                    "number is wanted; mend that, or leave data.classes out"
                )
            if value not in numbers:
                numbers[value] = self._class_number(row, value)
        return torch.tensor([numbers[value] for value in given], dtype=torch.int64)

    def _class_number(self, row: int, value: Any) -> int:
        is_numbered = self.classes == tuple(map(str, range(len(self.classes))))
        # The table's own classes, where it has any: its labels are numbers of these.
        known = getattr(self.rows.features.get("label"), "names", ())
        is_named = not is_numbered or set(known) <= set(self.classes)
        if is_named and isinstance(value, int) and 0 <= value < len(known):
            value = known[value]
        if value is None:
            has_labels = "label" in self.rows.features
            what = "has no label" if has_labels else "lies in no folder of a class"
            raise ConfigError(
                f"data.path: {self.name(row)} {what}, which data.classes asks for; mend that, or "
                "leave data.classes out"
            )
        name = str(value).strip()
        if name in self.classes:
            return self.classes.index(name)
        if name.isdecimal() and int(name) < len(self.classes):
            return int(name)
        shown = ", ".join(self.classes[:10]) + (", …" if len(self.classes) > 10 else "")
        raise ConfigError(
            f"data.path: {self.name(row)} is of class {name!r}, which data.classes does not name "
            f"({shown}); name it there, at every site alike, or remove it here"
        )

    def name(self, row: int) -> str:
        """A row's place on this machine, for whoever must look at it."""
        key = self.keys[row]
        return str(self.folder / key) if self.are_files else f"{self.folder}: row {key}"

    def sample(self, row: int) -> Any:
        """A `Batch` of x and y, or with captions a dict; a `ConfigError` names a bad one."""
        found = self.rows[row]
        try:
            x, y = self.transform.apply(_bytes(found["image"])), self.labels[row]
        except OSError as error:
            reason = error.strerror or error
            text = f"cannot be read ({reason}); see that it is there, or remove it"
        except BadPicture as error:
            text = str(error)
        else:
            caption = found.get("caption", ...)
            return Batch(x, y) if caption is ... else {"x": x, "y": y, "caption": caption}
        raise ConfigError(f"data.path: {self.name(row)} {text}")

    def samples(self, rows: Iterable[int]) -> Iterator[Any]:
        """Samples; those that cannot be read are named and left out, but for many in a row."""
        num_bad = 0
        for row in rows:
            try:
                sample = self.sample(row)
            except ConfigError as error:
                num_bad += 1
                if num_bad == _MOST_IN_A_ROW:
                    raise ConfigError(f"{error} (nor can the {num_bad - 1} before it)") from None
                _log.warning("%s; until then the next sample stands in for it", error)
            else:
                num_bad = 0
                yield sample

    def faults(self) -> Iterator[str]:
        """Of all samples, or of many some, evenly spaced; those with one mend in few lines."""
        step = 1 if len(self.keys) <= _ALL_READ else -(-len(self.keys) // _NUM_READ)
        rows, by_mend = range(0, len(self.keys), step), dict[str, list[str]]()
        for row in rows:
            try:
                self.sample(row)
            except ConfigError as error:
                by_mend.setdefault(str(error).rpartition("; ")[2], []).append(str(error))
        for lines in by_mend.values():
            more = f" (and {len(lines) - 1} more like it, of {len(rows)} that were read)"
            yield from lines if len(lines) <= _OWN_LINES else [lines[0] + more]

    def train(self, split: str, site_index: int, num_sites: int, seed: int) -> Pictures:
        """What one site trains on."""
        index = (~self.is_held_out).nonzero().squeeze(1)
        if parse_split(split).kind != "own":
            dealt = split_indices(self.labels[index], split, num_sites, seed)
            index = index[dealt[site_index]]
        return Pictures(self, index)


class Pictures(Dataset[Any]):
    """Some rows of files, (n,) int64, decoded when they are asked for."""

    def __init__(self, files: Files, index: Tensor) -> None:
        self._files, self._index = files, index

    @property
    def labels(self) -> Tensor:
        """(n,), int64."""
        return self._files.labels[self._index]

    def stamp(self) -> str:
        """Another one where other samples are meant, or a file of the data set has changed."""
        index = hashlib.sha256(tensor_bytes(self._index)).hexdigest()
        return f"{stamp_of(self._files.folder)} {index}"

    def __len__(self) -> int:
        return len(self._index)

    def __getitem__(self, place: int) -> Any:
        places = (torch.arange(_MOST_IN_A_ROW) + place) % len(self)
        return next(self._files.samples(self._index[places].tolist()))


@lru_cache(maxsize=1)
def _held_out(files: Files) -> Any:
    chosen = files.is_held_out.nonzero().squeeze(1)
    # In no order, so that the first few are of all folders.
    generator = torch.Generator().manual_seed(derive_seed("files", "held out"))
    chosen = chosen[torch.randperm(len(chosen), generator=generator)]
    chosen = chosen[: max(_LEAST_HELD_OUT, _MOST_HELD_BYTES // files.transform.num_bytes)]
    samples = list(files.samples(chosen.tolist()))
    if len(samples) < 2:
        raise ConfigError(
            f"data.path = {str(files.folder)!r}: {len(chosen)} samples are held out, of which "
            f"{len(samples)} can be read; mend or remove the others"
        )
    return default_collate(samples)


def hold_out(keys: Sequence[str]) -> Tensor:
    """Which samples are held out, (N,) bool: the tenth with the smallest hashes of their names.

    At most 512, and at least 12 or half of them. Few change their part while others come and go,
    and sites with the same files hold out the same ones.
    """
    num = min(_MOST_HELD_OUT, max(min(_LEAST_HELD_OUT, len(keys) // 2), len(keys) // 10))
    hashes = [hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest() for key in keys]
    chosen = sorted(range(len(keys)), key=lambda number: (hashes[number], keys[number]))[:num]
    mask = torch.zeros(len(keys), dtype=torch.bool)
    mask[chosen] = True
    return mask


def open_files(config: DataConfig, captions: bool = False) -> Files:
    """List the files of a configuration, at the path that they have at this site."""
    if not config.path:
        raise ConfigError(
            "data.path is '' where each site has data of its own; name their folder, as in "
            "data.path=/data/{site} (docs/data.md)"
        )
    if not Path(config.path).is_dir():
        raise ConfigError(
            f"data.path = {config.path!r} is no folder on this machine; name one that it has; a "
            "site may name its own (docs/data.md)"
        )
    transform = Transform(size_of(config), config.name in PAIRS, config.name == "pairs_b_to_a")
    return _open(config.name, Path(config.path), config.classes, transform, captions)


@lru_cache(maxsize=1)
def _open(name: str, folder: Path, classes: str, transform: Transform, captions: bool) -> Files:
    """Once per process: a workload may ask for held-out inputs again and again."""
    datasets = require("datasets", "data")
    datasets.disable_progress_bars()
    rows, listed = _load(datasets, name, folder)
    named, are_files = parse_classes(classes), name in ("folder", *PAIRS)
    columns = _find_columns(datasets, folder, rows.features, bool(named), are_files, captions)
    keys = [str(number) for number in range(len(rows))]
    if name == "webdataset":
        tars = (os.path.relpath(tar, folder) for tar in rows["__url__"])
        keys = [f"{tar}:{key}" for tar, key in zip(tars, rows["__key__"], strict=True)]
    rows = rows.select_columns(list(columns)).rename_columns(columns)
    rows = rows.cast_column("image", datasets.Image(decode=False)).with_format(None)
    if are_files:
        paths = [(image or {}).get("path") or "" for image in rows["image"]]
        _refuse_strays(folder, paths, listed)
        keys = [os.path.relpath(path, folder) for path in paths]
        # By parts: a character that sorts before a slash must not part a folder's files.
        order = sorted(range(len(keys)), key=lambda row: keys[row].split(os.sep))
        rows, keys = rows.select(order), [keys[row] for row in order]
    if len(rows) < _LEAST:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds {len(rows)} samples; put {_LEAST} or more there"
        )
    files = Files(folder, rows, tuple(keys), named, transform, are_files)
    if captions:
        _refuse_blank_captions(files)
    return files


def _refuse_blank_captions(files: Files) -> None:
    """A model trained on them would be told nothing of these pictures, and nobody would see it."""
    texts = files.rows["caption"]
    if blank := [row for row, text in enumerate(texts) if not (text or "").strip()]:
        raise ConfigError(
            f"data.path = {str(files.folder)!r}: {len(blank)} of {len(texts)} samples have no "
            f"caption, the first {files.name(blank[0])}; give each one a text, or remove it"
        )


def _load(datasets: Any, name: str, folder: Path) -> tuple[Any, list[str]]:
    """A `datasets.Dataset` of a folder, and the paths of all files that were looked at for it."""
    kind, files, more, what = {
        "parquet": (name, "*.parquet", {}, "parquet files"),
        "webdataset": (name, "*.tar", {}, "webdataset files"),
        "hf": ("", "", {}, "what save_to_disk wrote, with a split 'train' if any"),
    }.get(name, ("imagefolder", "", {"drop_labels": True}, "images, with metadata.jsonl if any"))
    try:
        if not kind:
            loaded = datasets.load_from_disk(str(folder))
            return loaded[_SPLIT] if isinstance(loaded, dict) else loaded, []
        pattern = os.path.join(glob.escape(str(folder)), "**", files).rstrip(os.sep)
        builder = datasets.load_dataset_builder(kind, data_files={_SPLIT: pattern}, **more)
        builder.download_and_prepare()
        return builder.as_dataset(split=_SPLIT), list(builder.config.data_files[_SPLIT])
    except Exception as error:  # of many kinds: of the file system, pyarrow, tarfile, datasets
        while isinstance(error.__cause__, Exception):  # datasets say less than what they wrap
            error = error.__cause__
        if kind == "imagefolder":
            with suppress(OSError):  # told below
                _refuse_broken_lines(folder)
        formats = Image.registered_extensions()
        known = {end for end in formats if formats[end] in _FORMATS} if not files else {files[1:]}
        if kind and all(path.suffix.lower() not in known for path in folder.rglob("*")):
            held = files or "images"
            raise ConfigError(
                f"data.path = {str(folder)!r} holds no {held}; data.name={name} takes a folder of "
                f"{what}"
            ) from None
        raise ConfigError(
            f"data.path = {str(folder)!r} cannot be read ({' '.join(str(error).split())}); "
            f"data.name={name} takes a folder of {what}"
        ) from None


def _refuse_broken_lines(folder: Path) -> None:
    """Refuse lines of metadata that are no JSON, which `datasets` numbers without their file."""
    for path in sorted(folder.rglob("metadata.jsonl")):
        for number, line in enumerate(path.read_bytes().splitlines(), start=1):
            try:
                json.loads(line.strip() or "{}")
            except ValueError as error:
                reason = getattr(error, "msg", error)
                raise ConfigError(
                    f"data.path: line {number} of {path} is no JSON ({reason}); mend it, as in "
                    f"{_LINE}"
                ) from None


def _refuse_strays(folder: Path, paths: Sequence[str], listed: Sequence[str]) -> None:
    """Refuse images that no line of metadata names, and lines that name none."""
    formats, known = Image.registered_extensions(), set(paths)
    images = {p for p in listed if formats.get(os.path.splitext(p)[1].lower()) in _FORMATS}
    named = (os.path.basename(path) for path in listed)
    metadata = next((name for name in named if name in _METADATA), "the metadata")
    if strays := sorted(images - known):
        raise ConfigError(
            f"data.path = {str(folder)!r}: {metadata} has no line for {len(strays)} of "
            f"{len(images)} images, the first {os.path.relpath(strays[0], folder)}; add what is "
            "missing, or move these away"
        )
    if gone := [path for path in paths if path not in images and not os.path.exists(path)]:
        first = os.path.relpath(gone[0], folder) if gone[0] else "without a file_name"
        raise ConfigError(
            f"data.path = {str(folder)!r}: {metadata} names no image that is there in {len(gone)} "
            f"of {len(paths)} lines, the first {first}; remove these, or bring the images back"
        )


def _find_columns(
    datasets: Any, folder: Path, features: Any, has_classes: bool, are_files: bool, captions: bool
) -> dict[str, str]:
    """Which columns hold `image`, and `label` and `caption` where they are wanted."""

    def found(what: str, kind: Any = ()) -> list[str]:
        of_kind = [name for name, feature in features.items() if isinstance(feature, kind)]
        return of_kind or [name for name in _COLUMNS[what] if name in features][:1]

    wanted = {"image": found("image", datasets.Image)}
    labels = found("label", datasets.ClassLabel)
    if has_classes and (labels or not are_files):
        wanted["label"] = labels
    if captions:
        wanted["caption"] = found("caption")
    if are_files and captions and list(features) == wanted["image"]:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds images without captions; put a metadata.jsonl "
            f"beside them, with a line {_LINE} for each"
        )
    for what, names in wanted.items():
        if len(names) != 1:
            held = f"{len(names)} columns of {what}s" if names else f"no column of {what}s"
            raise ConfigError(
                f"data.path = {str(folder)!r} holds {held} where one is wanted, among "
                f"{', '.join(features)}; name one {what!r}"
            )
    for name in wanted.get("caption", ()):
        if "string" not in getattr(features[name], "dtype", ""):
            raise ConfigError(
                f"data.path = {str(folder)!r}: captions, in column {name!r}, are no text but "
                f"{features[name]}; make each one a text"
            )
    return {names[0]: what for what, names in wanted.items()}


def _bytes(image: Any) -> bytes:
    """Of an image as `datasets` gives it undecoded: its bytes, or the path of a file."""
    if image and image["bytes"]:
        return bytes(image["bytes"])
    if not image or not image["path"]:
        raise OSError("there is no image")
    return Path(image["path"]).read_bytes()
