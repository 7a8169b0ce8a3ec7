"""Listing a data set of files with Hugging Face `datasets`: its rows, their columns and names."""

from __future__ import annotations

import glob
import json
import os
from collections.abc import Sequence
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
"""Names of columns that are taken for what they say, if none or several are of that kind."""
_WHAT = {
    "parquet": "parquet files",
    "webdataset": "webdataset files",
    "hf": "what save_to_disk wrote, with a split 'train' if any",
}
_FILES = {"parquet": "*.parquet", "webdataset": "*.tar"}
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
    try:
        rows, listed = _load(datasets, name, folder)
    except Exception as error:  # of many kinds: of the file system, pyarrow, tarfile, datasets
        while isinstance(error.__cause__, Exception):  # datasets say less than what they wrap
            error = error.__cause__
        if bad := _bad_line(folder):
            raise ConfigError(f"data.path: {bad} is no JSON; mend it") from None
        what = _WHAT.get(name, "images, with metadata.jsonl if any")
        raise ConfigError(
            f"data.path = {str(folder)!r} cannot be read ({' '.join(str(error).split())}); "
            f"data.name={name} takes a folder of {what}"
        ) from None
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


def _load(datasets: Any, name: str, folder: Path) -> tuple[Any, Sequence[str]]:
    """A `datasets.Dataset` of a folder, and the paths of all files that were looked at for it."""
    if name == "hf":
        loaded = datasets.load_from_disk(str(folder))
        return loaded[_SPLIT] if isinstance(loaded, dict) else loaded, ()
    for below, names, _ in os.walk(folder):
        if links := [link for link in names if os.path.islink(os.path.join(below, link))]:
            raise FileNotFoundError(
                f"{os.path.join(below, links[0])} is a link to a folder, which is not followed: "
                "bind or copy the folder itself there"
            )
    files = _FILES.get(name, "")
    endings = {files[1:]} if files else Image.registered_extensions().keys()
    if all(path.suffix.lower() not in endings for path in folder.rglob("*")):
        raise FileNotFoundError(f"it holds no {files or 'images'}")
    pattern = os.path.join(glob.escape(str(folder)), "**", files).rstrip(os.sep)
    kind, more = (name, {}) if files else ("imagefolder", {"drop_labels": True})
    builder = datasets.load_dataset_builder(kind, data_files={_SPLIT: pattern}, **more)
    builder.download_and_prepare()
    return builder.as_dataset(split=_SPLIT), builder.config.data_files[_SPLIT]


def _bad_line(folder: Path) -> str:
    """The first line of metadata that is no JSON, which those who read it do not name; or ''."""
    for path in sorted(folder.rglob("metadata.jsonl")):
        with path.open(errors="replace") as file:
            for number, line in enumerate(file, 1):
                try:
                    json.loads(line.strip() or "0")
                except ValueError:
                    return f"{path}, line {number},"
    return ""


def _refuse_strays(folder: Path, paths: Sequence[str], listed: Sequence[str]) -> None:
    """Refuse images that no line of metadata names, which `datasets` pass over, and the reverse."""
    formats, known = Image.registered_extensions(), set(paths)
    images = {p for p in listed if formats.get(os.path.splitext(p)[1].lower()) in FORMATS}
    if strays := sorted((images - known) | (known - set(listed))):
        first = os.path.relpath(strays[0], folder) if strays[0] else "without a file_name"
        raise ConfigError(
            f"data.path = {str(folder)!r}: images and lines of metadata do not match, "
            f"{len(strays)} are without the other, the first {first}; give each image one line, or "
            "remove these"
        )


def _find_columns(
    datasets: Any, folder: Path, features: Any, has_classes: bool, are_files: bool, captions: bool
) -> dict[str, str]:
    """Which columns hold `image`, and `label` and `caption` where they are wanted."""

    def found(what: str, kind: Any = ()) -> list[str]:
        of_kind = [name for name, feature in features.items() if isinstance(feature, kind)]
        among = of_kind if len(of_kind) > 1 else features
        named = [name for name in _COLUMNS[what] if name in among][:1]
        return of_kind if len(of_kind) == 1 else named or of_kind

    wanted = {"image": found("image", datasets.Image)}
    labels = found("label", datasets.ClassLabel)
    if has_classes and (labels or not are_files):
        wanted["label"] = labels
    if captions:
        wanted["caption"] = found("caption")
    for what, names in wanted.items():
        if len(names) != 1:
            where = "in a metadata.jsonl, " if are_files else ""
            raise ConfigError(
                f"data.path = {str(folder)!r} holds {len(names)} columns of {what}s where one is "
                f"wanted, among {', '.join(features)}; {where}name one {what!r}"
            )
    return {names[0]: what for what, names in wanted.items()}
