"""What the tests of files share: photographs cut into files, folders, tar shards."""

from __future__ import annotations

import io
import json
import tarfile
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from skimage import data as bundled

from fedwan.config import DataConfig
from fedwan.data import Loader, Shard, open_shard
from fedwan.errors import ConfigError


def crop(number: int, side: int = 40) -> np.ndarray:
    """A piece of a photograph, (side, side + 8, 3); another one for every number."""
    photo = (bundled.astronaut, bundled.coffee, bundled.chelsea)[number % 3]()
    place = number // 3
    top = (place * 37) % (photo.shape[0] - side)
    left = (place * 53) % (photo.shape[1] - side - 8)
    return photo[top : top + side, left : left + side + 8]


def encoded(number: int, kind: str, side: int = 40) -> bytes:
    """The same as a file, `png` or `jpeg`."""
    out = io.BytesIO()
    Image.fromarray(crop(number, side)).save(out, kind)
    return out.getvalue()


def write_folder(
    folder: Path, numbers: Iterable[int], classes: tuple[str, ...] = (), side: int = 40
) -> Path:
    """A file for each number, in its class's folder if there are any; odd ones are JPEG."""
    for number in numbers:
        below = folder / classes[number % len(classes)] if classes else folder
        below.mkdir(parents=True, exist_ok=True)
        kind, suffix = ("jpeg", "jpg") if number % 2 else ("png", "png")
        (below / f"{number:04d}.{suffix}").write_bytes(encoded(number, kind, side))
    return folder


def write_shards(folder: Path, numbers: Iterable[int], classes: tuple[str, ...]) -> Path:
    """Ten samples a shard, with a caption and a label each."""
    folder.mkdir(parents=True, exist_ok=True)
    listed = list(numbers)
    for start in range(0, len(listed), 10):
        files: dict[str, bytes] = {}
        for number in listed[start : start + 10]:
            files[f"{number:04d}.jpg"] = encoded(number, "jpeg")
            files[f"{number:04d}.txt"] = f"crop {number:04d}".encode()
            label = {"label": classes[number % len(classes)], "by": "test"}
            files[f"{number:04d}.json"] = json.dumps(label).encode()
        with tarfile.open(folder / f"shard-{start:04d}.tar", "w") as archive:
            for name, data in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(data)
                archive.addfile(member, io.BytesIO(data))
    return folder


def open_one(config: DataConfig, site: int = 0, sites: int = 1) -> Shard:
    return open_shard(config, site, sites, 0)


def stream_of(shard: Shard, batch: int = 7) -> Loader:
    return shard.loader(batch, torch.Generator().manual_seed(3))


def refused(match: str, call: Callable[[], object]) -> None:
    """It is, in one line."""
    with pytest.raises(ConfigError, match=match) as caught:
        call()
    assert "\n" not in str(caught.value)
