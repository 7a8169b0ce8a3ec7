"""The data sets that fedwan knows: what is known before reading them, and how to read them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fedwan.config import nearest
from fedwan.data import ring8
from fedwan.errors import ConfigError
from fedwan.workloads.base import Batch

__all__ = ["Source", "find_source"]


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


@cache
def _load_digits() -> tuple[Batch, Batch]:
    # Here and not above: scikit-learn takes a second to import, and ring8 does without.
    from fedwan.data.digits import load_digits

    return load_digits()


@cache
def _load_ring8() -> tuple[Batch, Batch]:
    return ring8.load_ring8()


_SOURCES = (
    Source("digits", (1, 8, 8), 10, public=True, load=_load_digits),
    Source("ring8", ring8.SHAPE, ring8.NUM_MODES, public=True, load=_load_ring8),
)


def find_source(name: str) -> Source:
    """The data set called `name`.

    Raises:
        ConfigError: there is none.
    """
    for source in _SOURCES:
        if source.name == name:
            return source
    valid = [source.name for source in _SOURCES]
    raise ConfigError(
        f"data.name is {name!r}, which fedwan does not know{nearest(name, valid)}; "
        f"valid: {', '.join(valid)}"
    )
