"""What a format knows of the samples that lie at a path: their names, labels and bytes.

A format is one file beside this one: `folder`, `webdataset`, `huggingface`. It lists what there is
without decoding it, and reads any sample in any order, from several threads at once.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fedwan.errors import ConfigError

__all__ = ["LEAST_ITEMS", "Items", "hold_out_by_name", "hold_out_every_tenth", "require_folder"]

LEAST_ITEMS = 24
"""Half of them to train on, half to judge by."""
_LEAST_HELD_OUT = LEAST_ITEMS // 2
_MOST_HELD_OUT = 512
"""They are held in memory and measured at every evaluation: 400 MB at 256 x 256."""
_LEAST_PAIRS_HELD_OUT = 4


class Items(Protocol):
    """Samples that have been listed and not yet read."""

    @property
    def names(self) -> Sequence[str]:
        """Of each sample, unique; the same wherever the same data lie."""
        ...

    @property
    def labels(self) -> Tensor:
        """(N,), int64."""
        ...

    def read(self, index: int) -> bytes:
        """A sample's image file.

        Raises:
            OSError: it cannot be read.
        """
        ...

    def where(self, index: int) -> str:
        """A sample's place on this machine, for whoever must look at it."""
        ...


def require_folder(folder: Path) -> None:
    """Refuse a path that is no folder here.

    Raises:
        ConfigError: it is none.
    """
    if not folder.is_dir():
        raise ConfigError(
            f"data.path = {str(folder)!r} is no folder on this machine; name one that it has, or "
            "set data.path in this site's SITE.yaml"
        )


def hold_out_by_name(names: Sequence[str]) -> Tensor:
    """Which samples are held out: the tenth of them with the smallest hashes of their names.

    At most 512 and at least 12. A sample stays in its part while others come and go, but for a few
    at the border; and sites with the same files hold out the same ones.

    Returns:
        (N,), bool.
    """
    num = min(_MOST_HELD_OUT, max(_LEAST_HELD_OUT, len(names) // 10))
    hashes = [hashlib.sha256(name.encode("utf-8", "surrogateescape")).digest() for name in names]
    chosen = sorted(range(len(names)), key=lambda index: (hashes[index], names[index]))[:num]
    mask = torch.zeros(len(names), dtype=torch.bool)
    mask[chosen] = True
    return mask


def hold_out_every_tenth(num: int) -> Tensor:
    """Which of a folder's pairs are held out: every tenth in name order, more often of few.

    Returns:
        (num,), bool.
    """
    every = min(10, num // _LEAST_PAIRS_HELD_OUT)
    return torch.arange(num) % every == 0
