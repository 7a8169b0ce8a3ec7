"""Listing a data set of files with Hugging Face `datasets`: its rows, their columns and names.

Whatever `datasets` would pass over or tell in its own words is looked at here: images without a
line of metadata, lines without an image, columns that nobody can choose between.
"""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from PIL import Image

from fedwan.data.decode import FORMATS
from fedwan.data.sources import PAIRS
from fedwan.errors import ConfigError
from fedwan.extras import require

_COLUMNS = {
    "image": ("image", "jpg", "png"),
    "label": ("label", "labels", "cls", "json"),
    "caption": ("caption", "text", "txt"),
}
"""Names of columns that are taken for what they say, if none is of that kind."""
_METADATA = ("metadata.jsonl", "metadata.csv", "metadata.parquet")
_LINE = '{"file_name": "001.png", "text": "…"}'
_SPLIT = "train"


def listing(
    name: str, folder: Path, has_classes: bool, captions: bool
) -> tuple[Any, list[str], bool]:
    """The rows of a data set, a name for each, and whether names are paths below the folder.

    Rows are a `datasets.Dataset` of `image`, undecoded, and where they are wanted `label` and
    `caption`.
    """
    datasets = require("datasets", "data")
    datasets.disable_progress_bars()
    rows, listed = _load(datasets, name, folder)
    are_files = name in ("folder", *PAIRS)
    columns = _find_columns(datasets, folder, rows.features, has_classes, are_files, captions)
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
    return rows, keys, are_files


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
        known = {end for end in formats if formats[end] in FORMATS} if not files else {files[1:]}
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
    images = {p for p in listed if formats.get(os.path.splitext(p)[1].lower()) in FORMATS}
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
