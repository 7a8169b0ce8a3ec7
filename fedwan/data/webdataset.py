"""WebDataset shards: tar files of images, with labels beside them.

Files of one sample share a name up to its first dot: `0001.jpg` and `0001.cls`, or `0001.json` with
a `label` in it. The webdataset library reads shards from end to end and shuffles what a buffer
holds; to resume it, a reader must go through all that was read before. Here the shards are listed
once, header by header, and every sample is then read where it lies: any order costs the same, and
where a stream stands is one number. That takes tar files which are not compressed.
"""

from __future__ import annotations

import json
import tarfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fedwan.data.classes import Classes
from fedwan.data.items import require_folder
from fedwan.errors import ConfigError

__all__ = ["TarItems", "open_webdataset"]

_IMAGES = ("png", "jpg", "jpeg")
_LABELS = ("cls", "json")
_PACKED = (".tar.gz", ".tgz", ".tar.zst", ".tar.bz2", ".tar.xz")


@dataclass(frozen=True)
class TarItems:
    """See `fedwan.data.items.Items`."""

    folder: Path
    shards: tuple[str, ...]
    """Paths of the tar files below the folder."""
    names: tuple[str, ...]
    """`SHARD:SAMPLE`"""
    labels: Tensor
    places: Tensor
    """(N, 3), int64: which shard, where in it the image begins, and its bytes."""

    def read(self, index: int) -> bytes:
        """See `Items`."""
        shard, offset, size = self.places[index].tolist()
        with open(self.folder / self.shards[shard], "rb") as file:
            file.seek(offset)
            data = file.read(size)
        if len(data) < size:
            raise OSError("the shard has become shorter")
        return data

    def where(self, index: int) -> str:
        """See `Items`."""
        shard = self.shards[int(self.places[index, 0])]
        return f"{self.folder / shard}: sample {self.names[index][len(shard) + 1 :]!r}"


@dataclass
class _Sample:
    image: tuple[int, int] | None = None
    """Where it begins, and its bytes."""
    label: bytes | None = None
    label_kind: str = ""
    kinds: list[str] = field(default_factory=list)


def open_webdataset(folder: Path, classes: Classes, least: int) -> TarItems:
    """List the samples of all `.tar` files in a folder and below.

    Args:
        folder: which.
        classes: that samples have, in `.cls` or `.json` files; or none, and all labels are 0.
        least: samples that there must be.

    Raises:
        ConfigError: no such folder, no shards or too few samples in them, a shard that is damaged
            or compressed, a sample without an image, or without a label where there are classes.
    """
    require_folder(folder)
    shards = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.tar"))
    if not shards:
        raise ConfigError(f"data.path = {str(folder)!r} holds no .tar files; {_why_none(folder)}")
    names: list[str] = []
    labels: list[int] = []
    places: list[tuple[int, int, int]] = []
    for number, shard in enumerate(shards):
        for key, sample in _list(folder / shard, bool(classes.names)).items():
            if sample.image is None:
                held = ", ".join(f".{kind}" for kind in sample.kinds)
                raise ConfigError(
                    f"data.path: {folder / shard}: sample {key!r} has no .png or .jpg (only {held})"
                    "; remove it"
                )
            names.append(f"{shard}:{key}")
            places.append((number, *sample.image))
            labels.append(_label(folder / shard, key, sample, classes) if classes.names else 0)
    if len(names) < least:
        raise ConfigError(
            f"data.path = {str(folder)!r} holds {len(names)} samples in {len(shards)} .tar files; "
            f"put {least} or more there"
        )
    return TarItems(folder, tuple(shards), tuple(names), torch.tensor(labels), torch.tensor(places))


def _why_none(folder: Path) -> str:
    packed = sorted(path for path in folder.rglob("*") if path.name.endswith(_PACKED))
    if packed:
        return (
            f"{packed[0].name} is compressed, which no sample can be read from: unpack it to .tar"
        )
    return "put shards there, or set data.name=folder for images"


def _list(path: Path, with_labels: bool) -> dict[str, _Sample]:
    """A shard's samples by key, in the order of their first files."""
    samples: dict[str, _Sample] = {}
    try:
        with tarfile.open(path, "r:") as archive:
            for member, key, kind in _files(archive):
                sample = samples.setdefault(key, _Sample())
                sample.kinds.append(kind)
                if kind in _IMAGES:
                    sample.image = member.offset_data, member.size
                elif with_labels and kind in _LABELS and sample.label_kind != "cls":
                    file = archive.extractfile(member)
                    sample.label, sample.label_kind = file.read() if file else b"", kind
            _require_end(archive)
    except (tarfile.TarError, OSError, EOFError) as error:
        raise ConfigError(
            f"data.path: {path} cannot be read as a tar file ({error}); copy it anew, and see that "
            "it is not compressed"
        ) from None
    return samples


def _files(archive: tarfile.TarFile) -> Iterator[tuple[tarfile.TarInfo, str, str]]:
    """Each file, with its sample's key and its ending."""
    for member in archive:
        folder, slash, name = member.name.rpartition("/")
        key, dot, kind = name.partition(".")
        if member.isreg() and not member.issparse() and key and dot:
            yield member, folder + slash + key, kind.lower()
        archive.members = []  # type: ignore[attr-defined]  # it would keep a kilobyte of each


def _require_end(archive: tarfile.TarFile) -> None:
    """`tarfile` takes a header that is cut short or damaged for the end, unless it is the first."""
    assert archive.fileobj is not None
    archive.fileobj.seek(archive.offset)
    if archive.fileobj.read(tarfile.BLOCKSIZE) != bytes(tarfile.BLOCKSIZE):
        raise tarfile.ReadError("it ends or is damaged in the middle")


def _label(path: Path, key: str, sample: _Sample, classes: Classes) -> int:
    if sample.label is None:
        raise ConfigError(
            f"data.path: {path}: sample {key!r} has neither .cls nor .json, while data.classes "
            "asks for labels; add one, or leave data.classes out"
        )
    try:
        text = sample.label.decode().strip()
        if sample.label_kind == "json":
            text = str(json.loads(text)["label"])
    except (ValueError, KeyError, TypeError):
        raise ConfigError(
            f"data.path: {path}: {key}.{sample.label_kind} holds no label; write the class into a "
            '.cls file, or {"label": …} into a .json file'
        ) from None
    try:
        return classes.find(text)
    except ValueError as error:
        raise ConfigError(f"data.path: {path}: sample {key!r} {error}") from None
