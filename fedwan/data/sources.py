"""The data sets that fedwan knows: what is known before reading them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from importlib import import_module

from fedwan.config import Config, DataConfig
from fedwan.data import grid25, ring8, stacked_digits
from fedwan.data.file_source import FILE_NAMES, PAIRS, FileSource, file_source
from fedwan.data.files import open_files
from fedwan.data.mixture import Mixture
from fedwan.errors import ConfigError
from fedwan.names import nearest
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


def _loaded(module: str, function: str) -> Callable[[], tuple[Batch, Batch]]:
    """Imported when it is called: scikit-learn takes a second, and ring8 does without."""

    @cache
    def load() -> tuple[Batch, Batch]:
        made: tuple[Batch, Batch] = getattr(import_module(f"fedwan.data.{module}"), function)()
        return made

    return load


_digits = _loaded("digits", "load_digits")
_SOURCES = (
    Source("digits", (1, 8, 8), 10, True, _digits),
    Source(
        "ring8", ring8.SHAPE, ring8.NUM_MODES, True, cache(ring8.load_ring8), ring8.ring8_mixture
    ),
    Source(
        "grid25",
        grid25.SHAPE,
        grid25.NUM_MODES,
        public=True,
        load=cache(grid25.load_grid25),
        mixture=grid25.grid25_mixture,
    ),
    Source(
        "stacked_digits",
        stacked_digits.SHAPE,
        stacked_digits.NUM_MODES,
        public=True,
        load=cache(lambda: stacked_digits.stack_digits(*_digits())),
        stack_of="digits",
    ),
    Source(
        "photo_edges", (4, 32, 32), 5, True, _loaded("photo_edges", "load_photo_edges"), inputs=1
    ),
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
    return [*(source.name for source in _SOURCES if source.inputs), *PAIRS]
