"""What is known of a data set from the configuration alone, and how it is dealt to sites.

A data set that comes with fedwan is one entry of `SOURCES`, and the function that loads it.
Splits are `iid`, `by_label`, or `dirichlet:A` (Hsu et al. 2019): each site computes the split alone
and keeps its own part; parts are disjoint and cover everything. `own` deals nothing: each site has
files of its own.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from fedwan.config import FILE_NAMES, SITE, Config, DataConfig
from fedwan.data import toys
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.rng import derive_seed
from fedwan.workloads.base import Batch

PAIRS = ("pairs", "pairs_b_to_a")
_CLASSES = "names like cat,dog, or how many there are, like 10, which numbers them 0 to 9"
_SPLITS = (
    "iid, by_label, or dirichlet:A with A > 0 (as in dirichlet:0.5); own where each site has files "
    "of its own"
)
_MAX_DRAWS = 100  # of a Dirichlet split that leaves some site empty-handed


@dataclass(frozen=True)
class DataSource:
    """A data set: one that comes with fedwan and is held in memory, or one of files."""

    name: str
    """As in `data.name`."""
    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    num_classes: int
    """Labels are 0 … num_classes - 1."""
    read: Callable[..., tuple[Batch, Batch]] | None = None
    """Makes the (training, held-out) data of a set in memory."""
    mixture: Callable[[], toys.Mixture] | None = None
    """The distribution that the points come from, where it is known: modes are counted on it."""
    sizes: range = range(0)
    """Pixels a side that may be asked for, where not any may, or none."""
    captions: Callable[[], tuple[list[str], list[str]]] | None = None
    """Of what `read` gives, where it has any."""
    inputs: int = 0
    """Channels at the front of a sample that are given; a workload learns to make the others."""

    @property
    def public(self) -> bool:
        """Whether samples may be shown, in pictures that leave the site."""
        return self.read is not None

    def load(self) -> tuple[Batch, Batch]:
        """(Training, held-out) data of a set in memory, the same objects whoever asks."""
        assert self.read is not None
        return self.read()

    def load_captioned(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """The same as dicts of `x`, `y` and `caption`, a list of text, if it has any."""
        if self.captions is None:
            raise ConfigError(
                f"data.name = {self.name!r} has no captions; set data.name=folder and data.path, "
                "or data.name=emoji"
            )
        (train, held_out), (names, others) = self.load(), self.captions()
        return {**train._asdict(), "caption": names}, {**held_out._asdict(), "caption": others}


SOURCES = {
    source.name: source
    for source in (
        DataSource("digits", (1, 8, 8), 10, cache(toys.load_digits)),
        DataSource("ring8", (2,), 8, cache(toys.draw_ring8), toys.ring8),
        DataSource(
            *("emoji", (3, 32, 32), len(toys.GROUPS), cache(toys.load_emoji)),
            sizes=range(16, 129),
            captions=toys.emoji_names,
        ),
        DataSource("photo_edges", (4, 32, 32), 5, cache(toys.load_photo_edges), inputs=1),
    )
}


def find_source(name: str, size: int = 0) -> DataSource:
    """The data set called `name` that comes with fedwan; a `ConfigError` if there is none.

    With pictures of `size` pixels a side, where it has several sizes.
    """
    if name not in SOURCES:
        valid = [*SOURCES, *FILE_NAMES]
        raise ConfigError(
            f"data.name is {name!r}, which fedwan does not know{nearest(name, valid)}; "
            f"valid: {', '.join(valid)}"
        )
    source = SOURCES[name]
    if size not in source.sizes or size == source.shape[-1]:
        return source
    assert source.read is not None
    shape, read = (*source.shape[:-2], size, size), partial(source.read, size)
    return dataclasses.replace(source, shape=shape, read=read)


def source_of(config: DataConfig) -> DataSource:
    """What is known of the data set that a configuration names, without reading it."""
    if config.name not in FILE_NAMES:
        return find_source(config.name, config.size)
    pairs, num_classes = config.name in PAIRS, max(1, len(parse_classes(config.classes)))
    size, inputs = config.size or (256 if pairs else 64), 3 if pairs else 0
    sizes = range(32, 1025) if pairs else range(0)
    return DataSource(
        config.name, (3 + inputs, size, size), num_classes, sizes=sizes, inputs=inputs
    )


def parse_classes(text: str) -> tuple[str, ...]:
    """Read `data.classes`, which names them since no site sees another's: names by number.

    >>> parse_classes("cat, dog"), parse_classes("3"), parse_classes("")
    (('cat', 'dog'), ('0', '1', '2'), ())
    """
    if not text:
        return ()
    if text.strip().isdecimal():
        names = tuple(str(number) for number in range(int(text)))
    else:
        names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2 or not all(names) or len(set(names)) < len(names):
        raise ConfigError(f"data.classes is {text!r}; give two or more different ones, {_CLASSES}")
    return names


def num_labels(config: Config) -> int:
    """Labels that networks are told are 0 … num_labels - 1: those of classes, or of sites."""
    return config.num_sites if config.data.labels == "site" else source_of(config.data).num_classes


def data_at_site(config: DataConfig, site: str, own_path: str = "") -> DataConfig:
    """A run's data as one site has them: `own_path`, of the site's own file, goes first."""
    return dataclasses.replace(config, path=own_path or config.path.replace(SITE, site))


def check_data(config: DataConfig) -> None:
    """Refuse, with a `ConfigError` and without reading any data, settings that cannot work."""
    if faults := list(_faults(config)):
        raise ConfigError("\n".join(faults))


def _faults(config: DataConfig) -> Iterator[str]:
    sizes = source_of(config).sizes  # refuses names that nobody knows
    kind = parse_split(config.split)[0]
    if config.size and sizes and config.size not in sizes:
        yield (
            f"data.size = {config.size} is out of range for {config.name}; choose 0, or "
            f"{sizes[0]} to {sizes[-1]}"
        )
    if config.name not in FILE_NAMES:
        return
    is_own = kind == "own"
    if kind == "by_label" and not config.classes:
        yield f"data.split is 'by_label', and no class is named; set data.classes to {_CLASSES}"
    if not is_own and SITE in config.path:
        yield (
            f"data.path is {config.path!r}, another folder at each site, of which nothing can be "
            f"dealt by data.split = {config.split!r}; set data.split=own"
        )
    if not Path(config.path).is_absolute() and not (is_own and not config.path):
        is_there = config.path and Path(config.path).is_dir()
        path = Path(config.path).absolute() if is_there else "/data/facades"
        yield (
            f"data.path is {config.path!r}; name the folder of images from the root, as in "
            f"data.path={path}: sites run in folders of their own"
        )


# Splits ------------------------------------------------------------------------------------------


def parse_split(text: str) -> tuple[str, float]:
    """The kind of a `data.split`, and Dirichlet's A: small is uneven; infinite for other kinds.

    >>> parse_split("dirichlet:0.5")
    ('dirichlet', 0.5)
    """
    if text in ("iid", "by_label", "own"):
        return text, math.inf
    kind, _, number = text.partition(":")
    try:
        concentration = float(number)
    except ValueError:
        concentration = math.nan
    if kind != "dirichlet" or not 0 < concentration < math.inf:
        raise ConfigError(f"data.split is {text!r}; valid: {_SPLITS}")
    return kind, concentration


def split_indices(y: Tensor, split: str, num_sites: int, seed: int) -> list[Tensor]:
    """Each site's places in labels y (N,), ascending int64, by a split other than `own`."""
    kind, concentration = parse_split(split)
    assert kind != "own", "nothing to deal"
    if num_sites > len(y):
        raise ConfigError(f"sites is {num_sites}, but there are only {len(y)} samples to share out")
    generator = np.random.default_rng(derive_seed(seed, "split", split, num_sites))
    if kind == "iid":
        owner = generator.permutation(np.arange(len(y)) % num_sites)
    elif kind == "by_label":
        labels, inverse = np.unique(y.numpy(), return_inverse=True)
        owner = generator.permutation(np.arange(len(labels)) % num_sites)[inverse]
    else:
        owner = _deal_dirichlet(y.numpy(), num_sites, concentration, generator)
    parts = [torch.from_numpy(np.flatnonzero(owner == site)) for site in range(num_sites)]
    if not all(len(part) for part in parts):
        raise ConfigError(
            f"data.split is {split!r} and sites is {num_sites}, by which some site is left without "
            "data; take fewer sites, or dirichlet:A with a larger A"
        )
    return parts


def _deal_dirichlet(
    y: np.ndarray, num_sites: int, concentration: float, generator: np.random.Generator
) -> np.ndarray:
    for _ in range(_MAX_DRAWS):
        owner = np.empty(len(y), dtype=np.int64)
        for label in np.unique(y):
            members = generator.permutation(np.flatnonzero(y == label))
            shares = generator.dirichlet(np.full(num_sites, concentration))
            cuts = np.rint(np.cumsum(shares)[:-1] * len(members)).astype(np.int64)
            for site, part in enumerate(np.split(members, cuts)):
                owner[part] = site
        if len(np.unique(owner)) == num_sites:
            break
    return owner
