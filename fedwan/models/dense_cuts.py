"""How dense layers may be shared out among processes that compute them together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal, Protocol, runtime_checkable

__all__ = ["DenseCut", "DenseParallel"]

DenseCut = Literal["columns", "rows", "gathered"]
"""Of one layer: see `DenseParallel`."""


@runtime_checkable
class DenseParallel(Protocol):
    """A network that processes may compute together: see `fedwan.site.parallel`."""

    @property
    def dense_cuts(self) -> Mapping[str, DenseCut]:
        """How dense layers are cut, by path, `*` for any child; other layers are whole everywhere.

        `columns` leaves a process its part of the layer's outputs, `rows` takes such parts for its
        inputs, and what lies between needs none that another process has. After `gathered`, cut by
        outputs too, all have all of them. What is drawn within from torch's generators is the same
        at all processes, and so alike for all parts of a tensor that is cut.
        """
        ...
