"""The data sets that fedwan knows: what is known before reading them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fedwan.config import Config, DataConfig, nearest
from fedwan.data import grid25, ring8, stacked_digits
from fedwan.data.file_source import FILE_NAMES, PAIRS, FileSource, file_source
from fedwan.data.files import open_files
from fedwan.data.mixture import Mixture
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["Source", "find_source", "held_out_of", "num_labels", "pair_names", "source_of"]


@dataclass(frozen=True)
class Source:
    """One data set that is small enough to be held in memory; see `FileSource` for others."""

    name: str
    """As in `data.name`."""
    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    num_classes: int
    """Labels are 0 … num_classes - 1."""
    public: bool
    """Samples may be shown, in pictures that leave the site."""
    load: Callable[[], tuple[Batch, Batch]]
    """Reads (training, held-out) data; once per process, so never write into what it returns."""
    mixture: Callable[[], Mixture] | None = None
    """The distribution that the points come from, where it is known: modes are counted on it."""
    stack_of: str = ""
    """The data set whose images are the channels, and whose labels are the digits of a label."""
    inputs: int = 0
    """Channels at the front of a sample that are given; a workload learns to make the others."""


@cache
def _load_digits() -> tuple[Batch, Batch]:
    # Here and not above: scikit-learn takes a second to import, and ring8 does without.
    from fedwan.data.digits import load_digits

    return load_digits()


@cache
def _load_ring8() -> tuple[Batch, Batch]:
    return ring8.load_ring8()


@cache
def _load_grid25() -> tuple[Batch, Batch]:
    return grid25.load_grid25()


@cache
def _load_stacked_digits() -> tuple[Batch, Batch]:
    return stacked_digits.stack_digits(*_load_digits())


@cache
def _load_photo_edges() -> tuple[Batch, Batch]:
    # Here and not above, like scikit-learn: scikit-image takes a while to import.
    from fedwan.data.photo_edges import load_photo_edges

    return load_photo_edges()


_SOURCES = (
    Source("digits", (1, 8, 8), 10, public=True, load=_load_digits),
    Source(
        "ring8",
        ring8.SHAPE,
        ring8.NUM_MODES,
        public=True,
        load=_load_ring8,
        mixture=ring8.ring8_mixture,
    ),
    Source(
        "grid25",
        grid25.SHAPE,
        grid25.NUM_MODES,
        public=True,
        load=_load_grid25,
        mixture=grid25.grid25_mixture,
    ),
    Source(
        "stacked_digits",
        stacked_digits.SHAPE,
        stacked_digits.NUM_MODES,
        public=True,
        load=_load_stacked_digits,
        stack_of="digits",
    ),
    Source("photo_edges", (4, 32, 32), 5, public=True, load=_load_photo_edges, inputs=1),
)


def find_source(name: str) -> Source:
    """The small data set called `name`.

    Raises:
        ConfigError: there is none.
    """
    for source in _SOURCES:
        if source.name == name:
            return source
    valid = [*(source.name for source in _SOURCES), *FILE_NAMES]
    raise ConfigError(
        f"data.name is {name!r}, which fedwan does not know{nearest(name, valid)}; "
        f"valid: {', '.join(valid)}"
    )


def source_of(config: DataConfig) -> Source | FileSource:
    """What is known of the data set that a configuration names, without reading it.

    Raises:
        ConfigError: there is none such, or its classes are none.
    """
    return file_source(config) if config.name in FILE_NAMES else find_source(config.name)


def num_labels(config: Config) -> int:
    """Labels that networks are told are 0 … num_labels - 1: those of classes, or of sites."""
    if config.data.labels == "site":
        return config.sites
    return source_of(config.data).num_classes


def held_out_of(config: DataConfig) -> Batch:
    """The held-out data of a configuration, with the path that files have at this site.

    Raises:
        ConfigError: see `open_files`.
    """
    if config.name in FILE_NAMES:
        held_out: Batch = open_files(config).held_out
        return held_out
    return find_source(config.name).load()[1]


def pair_names() -> list[str]:
    """The data sets whose samples are pairs of an input and its target."""
    return [*(source.name for source in _SOURCES if source.inputs), PAIRS]
