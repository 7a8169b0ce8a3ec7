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


_ON = "@"
"""Between the name of a generator and the kind of its device."""
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
    """Generators by name, made on first use; two owners share no stream.

    `rng["latent"]` is on the CPU. `rng.on("noise", device)` is on a device, where large draws spare
    a GPU the way from the host; on the CPU it is the same as `rng["noise"]`.
    """

    def __init__(self, seed: int, owner: str) -> None:
        self._origin = (seed, owner)
        self._generators: dict[str, torch.Generator] = {}

    def __getitem__(self, name: str) -> torch.Generator:
        return self._named(name, torch.device("cpu"))

    def on(self, name: str, device: torch.device) -> torch.Generator:
        """The generator of a name on a device."""
        return self._named(name if device.type == "cpu" else f"{name}{_ON}{device.type}", device)

    def _named(self, name: str, device: torch.device) -> torch.Generator:
        if name not in self._generators:
            seed = derive_seed(*self._origin, name)
            self._generators[name] = torch.Generator(device).manual_seed(seed)
        return self._generators[name]

    def state_dict(self) -> dict[str, Tensor]:
        """The state of each generator used so far, as uint8 tensors."""
        return {name: g.get_state() for name, g in sorted(self._generators.items())}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Restore generators from `state_dict()`; those it does not name start afresh.

        A GPU's are left out where there is none.
        """
        # In place: whoever holds a generator goes on drawing from it.
        for name in self._generators.keys() - state.keys():
            self._generators[name].manual_seed(derive_seed(*self._origin, name))
        for name, value in state.items():
            _, _, kind = name.partition(_ON)
            if not kind or (kind == "cuda" and torch.cuda.is_available()):
                self._named(name, torch.device(kind or "cpu")).set_state(value)
