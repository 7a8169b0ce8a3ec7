"""Named random generators: every draw of a site comes from a generator with a name.

A name gives a stream of its own, derived from (seed, site, name), so that adding a draw in one
place never shifts the numbers of another, and a checkpoint restores each stream exactly.
"""

from __future__ import annotations

import hashlib
import random
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor


def derive_seed(*parts: object) -> int:
    """A 63-bit seed from any printable parts, the same on every machine and Python.

    >>> derive_seed(0, "s1", "latent") == derive_seed(0, "s1", "latent")
    True
    >>> derive_seed(0, "s1", "latent") == derive_seed(0, "s2", "latent")
    False
    """
    text = "\x1f".join(str(part) for part in parts)
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8], "little") >> 1


lending = threading.RLock()
"""Held by whoever has torch's global generators, or sets them."""


@contextmanager
def lent_generators(gpus: Sequence[torch.device] = ()) -> Iterator[None]:
    """Global generators of Python, NumPy, the CPU and of some GPUs, to be left as they were.

    One thread at a time has them: sites that are threads of one process (`fedwan.simulate`) would
    else put them back in the middle of another one's draws.
    """
    with lending, torch.random.fork_rng(list(gpus)):
        kept, numpy_kept = random.getstate(), np.random.get_state()  # noqa: NPY002 - the global one
        try:
            yield
        finally:
            random.setstate(kept)
            np.random.set_state(numpy_kept)  # noqa: NPY002


@contextmanager
def seeded_init(seed: int) -> Iterator[None]:
    """Run module constructors under a seed, and leave torch's global generator as it was."""
    with lent_generators():
        torch.manual_seed(derive_seed(seed, "init"))
        yield


def seed_all(seed: int) -> None:
    """Seed the global generators of torch, Python and NumPy, when nobody has them."""
    with lending:
        torch.manual_seed(seed)
        random.seed(seed)
        np.random.seed(seed % (1 << 32))  # noqa: NPY002 - the global one


class NamedGenerators:
    """CPU generators by name, made on first use: `rng["latent"]`; two owners share no stream."""

    def __init__(self, seed: int, owner: str) -> None:
        self._origin = (seed, owner)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        if name not in self._generators:
            seed = derive_seed(*self._origin, name)
            self._generators[name] = torch.Generator().manual_seed(seed)
        return self._generators[name]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of each generator used so far, as uint8 tensors."""
        return {name: g.get_state() for name, g in sorted(self._generators.items())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore generators from `state_dict()`; those it does not name start afresh."""
        # In place: whoever holds a generator goes on drawing from it.
        for name in self._generators.keys() - state.keys():
            self._generators[name].manual_seed(derive_seed(*self._origin, name))
        for name, value in state.items():
            self[name].set_state(value)
