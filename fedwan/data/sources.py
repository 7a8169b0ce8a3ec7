"""The data sets that fedwan knows: what is known before reading them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from fedwan.config import DataConfig, nearest
from fedwan.data import grid25, ring8, stacked_digits
from fedwan.data.mixture import Mixture
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["PAIRS", "Source", "find_source", "pair_names", "source_of"]

PAIRS = "pairs"
"""The name of a folder of the user's."""
PAIRS_SIZE = 256
"""Pixels a side of a folder's images, where the user names no other."""


@dataclass(frozen=True)
class Source:
    """One data set."""

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


@cache
def _load_pairs(path: str, size: int, direction: str) -> tuple[Batch, Batch]:
    from fedwan.data.pairs import load_pairs

    return load_pairs(Path(path), size, direction)


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
    """The data set called `name`.

    Raises:
        ConfigError: there is none.
    """
    for source in _SOURCES:
        if source.name == name:
            return source
    valid = [*(source.name for source in _SOURCES), PAIRS]
    raise ConfigError(
        f"data.name is {name!r}, which fedwan does not know{nearest(name, valid)}; "
        f"valid: {', '.join(valid)}"
    )


def source_of(config: DataConfig) -> Source:
    """The data set that a configuration names, which may be a folder.

    Raises:
        ConfigError: there is none.
    """
    if config.name != PAIRS:
        return find_source(config.name)
    size, direction = config.size or PAIRS_SIZE, config.direction
    # Nobody said that a user's images may be shown.
    return Source(
        PAIRS,
        (6, size, size),
        1,
        public=False,
        load=lambda: _load_pairs(config.path, size, direction),
        inputs=3,
    )


def pair_names() -> list[str]:
    """The data sets whose samples are pairs of an input and its target."""
    return [*(source.name for source in _SOURCES if source.inputs), PAIRS]
