"""How training data is dealt to sites: `iid`, `by_label`, or `dirichlet:A` (Hsu et al. 2019).

Each site computes the split alone and keeps its own part; parts are disjoint and cover everything.
`own` deals nothing: each site has files of its own.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from fedwan.config import DataConfig
from fedwan.errors import ConfigError
from fedwan.rng import derive_seed

_FORMS = (
    "iid, by_label, or dirichlet:A with A > 0 (as in dirichlet:0.5); own where each site has files "
    "of its own"
)
_MAX_DRAWS = 100  # of a Dirichlet split that leaves some site empty-handed


class Split(NamedTuple):
    """A parsed `data.split`, with Dirichlet's A: small is uneven; infinite for other kinds."""

    kind: str
    concentration: float = math.inf


def parse_split(text: str) -> Split:
    """Read `data.split`.

    >>> parse_split("dirichlet:0.5")
    Split(kind='dirichlet', concentration=0.5)
    """
    if text in ("iid", "by_label", "own"):
        return Split(text)
    kind, _, number = text.partition(":")
    try:
        concentration = float(number)
    except ValueError:
        concentration = math.nan
    if kind != "dirichlet" or not 0 < concentration < math.inf:
        raise ConfigError(f"data.split is {text!r}; valid: {_FORMS}")
    return Split(kind, concentration)


def has_own_data(config: DataConfig) -> bool:
    """Whether each site has files of its own, and holds out others than the next site."""
    return parse_split(config.split).kind == "own"


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
