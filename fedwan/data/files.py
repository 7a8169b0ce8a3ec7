"""Data sets of files: samples, labels, and what is held out.

A picture that turns out to be unreadable during a run is named, and the next one stands in for it:
one damaged file in a million should not stop a run of weeks, and the order of all other samples
stays as it is. Where several in a row cannot be read, that is no accident, and refused.
"""

from __future__ import annotations

import hashlib
import logging
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset, default_collate

from fedwan.config import DataConfig
from fedwan.data.decode import BadPicture, Resize
from fedwan.data.listing import listing
from fedwan.data.sources import PAIRS, parse_classes, source_of, split_indices
from fedwan.errors import ConfigError
from fedwan.files import stamp_of
from fedwan.rng import derive_seed
from fedwan.state import tensor_bytes
from fedwan.workloads.base import Batch

_log = logging.getLogger(__name__)

_LEAST = 8
"""Half of them to train on, half to judge by."""
_LEAST_HELD_OUT, MOST_HELD_OUT = 12, 512
"""They are held in memory and measured at every evaluation: 400 MB at 256 x 256."""
_MOST_HELD_BYTES = 512 << 20
"""Of those that are held, in their order; of larger pictures they are fewer."""
_ALL_READ, _NUM_READ = 256, 32
"""Before a run: so many are all read, of more some."""
_OWN_LINES = 3
"""Faults of a kind that are told one by one."""
_MOST_IN_A_ROW = 8
"""Unreadable samples for which the next one stands in."""


@dataclass(frozen=True, eq=False)
class Files:
    """A data set of files that has been listed; workers that read ahead get a copy."""

    folder: Path
    rows: Any
    """A `datasets.Dataset` of `image`, undecoded, and where there are any `label` and `caption`."""
    keys: tuple[str, ...]
    """A name for each row, the same wherever the same data lie."""
    classes: tuple[str, ...]
    transform: Resize
    are_files: bool
    """Whether keys are paths below the folder."""

    @cached_property
    def is_held_out(self) -> Tensor:
        """(N,), bool."""
        return hold_out(self.keys)

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
        numbers: dict[str, int] = {}
        for row, value in enumerate(given):
            if str(value) not in numbers:
                numbers[str(value)] = self._class_number(row, value)
        return torch.tensor([numbers[str(value)] for value in given], dtype=torch.int64)

    def _class_number(self, row: int, value: Any) -> int:
        known = self._names
        is_named = not self._is_numbered or set(known) <= set(self.classes)
        if is_named and isinstance(value, int) and 0 <= value < len(known):
            value = known[value]
        name = str(value).strip()
        if name in self.classes:
            return self.classes.index(name)
        # Where a class is called by a number, a number is a name.
        if name.isdecimal() and not any(each.isdecimal() for each in self.classes):
            if int(name) < len(self.classes):
                return int(name)
        shown = ", ".join(self.classes[:10]) + (", …" if len(self.classes) > 10 else "")
        raise ConfigError(
            f"data.path: {self.name(row)} is of class {name!r}, which data.classes does not name "
            f"({shown}); name it there, at every site alike, or mend it here"
        )

    @property
    def _is_numbered(self) -> bool:
        return self.classes == tuple(map(str, range(len(self.classes))))

    @property
    def _names(self) -> tuple[str, ...]:
        """The table's own classes, where it has any: its labels are numbers of these."""
        return tuple(getattr(self.rows.features.get("label"), "names", ()))

    def name(self, row: int) -> str:
        """A row's place on this machine, for whoever must look at it."""
        key = self.keys[row]
        return str(self.folder / key) if self.are_files else f"{self.folder}: row {key}"

    def sample(self, row: int) -> Any:
        """A `Batch` of x and y, or with captions a dict; a `ConfigError` names a bad one."""
        found = self.rows[row]
        try:
            x, y = self.transform.apply(_bytes(found["image"])), self.labels[row]
            if "caption" in found:
                return {"x": x, "y": y, "caption": found["caption"]}
            return Batch(x, y)
        except OSError as error:
            reason = error.strerror or error
            text = f"cannot be read ({reason}); see that it is there, or remove it"
        except BadPicture as error:
            text = str(error)
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

    def faults(self) -> list[str]:
        """Of all samples, or of many some, evenly spaced; many of a kind are one line."""
        step = 1 if len(self.keys) <= _ALL_READ else -(-len(self.keys) // _NUM_READ)
        rows, kinds = range(0, len(self.keys), step), dict[str, list[str]]()
        for row in rows:
            try:
                self.sample(row)
            except ConfigError as error:
                line = str(error)
                # What is wrong, without names and numbers of its own.
                kind = re.sub(r"\d+|\(.*\)", "", line.replace(self.name(row), ""))
                kinds.setdefault(kind, []).append(line)
        found = list[str]()
        for lines in kinds.values():
            if len(lines) > _OWN_LINES:
                lines = [f"{lines[0]} (and {len(lines) - 1} more, of {len(rows)} that were read)"]
            found += lines
        return found

    def train(
        self, split: str, site_index: int, num_sites: int, seed: int, *, exact: bool = False
    ) -> Pictures:
        """What one site trains on; `exact`: nothing stands in for what cannot be read."""
        index = (~self.is_held_out).nonzero().squeeze(1)
        if split == "own" and self._is_numbered and not set(self._names) <= set(self.classes):
            raise ConfigError(
                f"data.path = {str(self.folder)!r} has classes of its own, "
                f"{', '.join(self._names[:10])}, and another site's may have other numbers; name "
                "the classes of all sites, as in data.classes=cat,dog"
            )
        if split != "own":
            dealt = split_indices(self.labels[index], split, num_sites, seed)
            index = index[dealt[site_index]]
        return Pictures(self, index, exact=exact)


class Pictures(Dataset[Any]):
    """Some rows of files, (n,) int64, decoded when they are asked for."""

    def __init__(self, files: Files, index: Tensor, *, exact: bool) -> None:
        self._files, self._index, self._is_exact = files, index, exact

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
        if self._is_exact:
            return self._files.sample(int(self._index[place]))
        places = (torch.arange(_MOST_IN_A_ROW) + place) % len(self)
        return next(self._files.samples(self._index[places].tolist()))


@lru_cache(maxsize=1)
def read_held_out(files: Files) -> Any:
    """All that is held out of files, in no order, decoded once: a batch on the CPU."""
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
    num = min(MOST_HELD_OUT, max(min(_LEAST_HELD_OUT, len(keys) // 2), len(keys) // 10))
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
    size, pairs = source_of(config).shape[-1], config.name in PAIRS
    transform = Resize(size, pairs, config.name == "pairs_b_to_a")
    folder = Path(config.path)
    if ".." in folder.parts:  # which `datasets` leave out of some names
        folder = folder.resolve()
    return _open(config.name, folder, config.classes, transform, captions)


@lru_cache(maxsize=1)
def _open(name: str, folder: Path, classes: str, transform: Resize, captions: bool) -> Files:
    """Once per process: a workload may ask for held-out inputs again and again."""
    named = parse_classes(classes)
    rows, keys, are_files = listing(name, folder, bool(named), captions)
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
    if blank := [
        row for row, text in enumerate(texts) if not (isinstance(text, str) and text.strip())
    ]:
        raise ConfigError(
            f"data.path = {str(files.folder)!r}: {len(blank)} of {len(texts)} samples have no "
            f"caption, the first {files.name(blank[0])}; give each one a text, or remove it"
        )


def _bytes(image: Any) -> bytes:
    """Of an image as `datasets` gives it undecoded: its bytes, or the path of a file."""
    if image and image["bytes"]:
        return bytes(image["bytes"])
    if not image or not image["path"]:
        raise OSError("there is no image")
    return Path(image["path"]).read_bytes()
