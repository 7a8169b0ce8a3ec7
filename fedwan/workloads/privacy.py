"""Differential privacy of single samples: DP-SGD (Abadi et al. 2016, 1607.00133, algorithm 1).

    g = 1 / B (sum of g_i min(1, C / |g_i|) + normal noise of deviation s C)

over a Poisson sample of the shard, into which each of its N samples comes with probability B / N.
C is the norm in `privacy.unit`; s is the accountant's (`fedwan.privacy`), for two shards of which
one has a sample more. Gradients of single samples are `torch.func`'s, exact for any network whose
outputs are each of one sample alone: no batch norm.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from fedwan.config import Config, hash_config
from fedwan.errors import CheckpointError, ConfigError
from fedwan.files import replace_bytes
from fedwan.privacy import EPSILON, Spending
from fedwan.workloads.base import Batch


class Privacy(Spending):
    """One site's noise, and what it has spent of its budget: a file in its folder of the run.

    All draws follow from the secret, which stays at the site, and from where the run stands:
    whoever repeats steps from the same weights repeats their bits, which tell nothing new, and from
    other weights, with other settings or on a shard of another number of samples nobody sees the
    same noise again. Such steps count once more, also where the site's checkpoint and the
    coordinator have gone back to before them. The budget is the one that the folder began with.
    """

    def __init__(self, config: Config, num_samples: int, folder: Path) -> None:
        if not num_samples:
            raise ConfigError(
                f"privacy.epsilon = {config.privacy.epsilon} needs samples by number, and this "
                "site's data are a stream; give data that can be drawn from, or set "
                "privacy.epsilon=0"
            )
        batch = config.data.batch
        if batch > num_samples:
            raise ConfigError(
                f"data.batch = {batch} is more than this site's {num_samples} samples, each of "
                f"which comes into a private batch once at most; set data.batch={num_samples} or "
                "less"
            )
        self._rate, self._batch, self._num_samples = batch / num_samples, batch, num_samples
        super().__init__(config.privacy, num_samples, "samples", self._rate, config.steps)
        self._path = folder / "privacy.json"
        self._start, self._h, self._num_steps = "", 0, config.steps
        self._settings = hash_config(config).hex()
        kept = config.privacy
        self._terms = [kept.epsilon, kept.delta, kept.unit, config.steps, batch]
        self._rounds: dict[str, list[str]] = {}
        """By the first step of a round, the weights and places in the data that it began at."""
        self._read()
        self._write()

    def _read(self) -> None:
        if not self._path.exists():
            return
        try:
            kept = json.loads(self._path.read_bytes())
            self.secret, self._rounds = bytes.fromhex(kept["secret"]), dict(kept["rounds"])
            began = kept.get("budget", self._terms)  # a file from before it was kept says nothing
        except (ValueError, KeyError, TypeError):
            raise CheckpointError(
                f"{self._path} is damaged; move {self._path.parent} away: all steps so far count "
                "as spent"
            ) from None
        if began != self._terms:
            raise ConfigError(
                f"this run's budget is {self._terms} (epsilon, delta, unit, steps, batch) where "
                f"it began with {began}, see {self._path}; set them as they were, or begin a new "
                "run, which spends a budget of its own"
            )

    def _write(self) -> None:
        kept = {"secret": self.secret.hex(), "rounds": self._rounds, "budget": self._terms}
        replace_bytes(self._path, json.dumps(kept).encode(), mode=0o600)

    def seed(self) -> int:
        """Of what a loss draws: by place in the batch, which one sample more would shift.

        Who knew these draws would see more change than one sample's gradient.
        """
        return int(self.generator("seed").integers(1 << 62))

    def begin_round(self, step: int, h: int, weights: str, taken: int) -> None:
        """H steps begin from global weights, told by their hash, after so many batches of data.

        Other data are told by the number of samples: one more or less has other noise.

        A site that has nothing to show of a run's earlier steps has lost its folder: it made noise
        for them, and maybe for one more round, which must count.
        """
        self._start = f"{weights} {taken} {self._num_samples} {self._settings}"
        self._h, self.steps = h, step
        self._read()  # another process of this site may have written there since
        if step and not self._rounds:
            self._rounds = {str(begun): ["lost"] for begun in range(0, step + 1, h)}
        starts = self._rounds.setdefault(str(step), [])
        if self._start not in starts:
            starts.append(self._start)
            self._write()

    def taken(self) -> Mapping[int, int]:
        """Of all rounds that have begun, to their end."""
        steps = Counter[int]()
        for begun, starts in self._rounds.items():
            steps[len(starts)] += min(self._h, self._num_steps - int(begun))
        return steps

    def places(self, number: int) -> Tensor:
        """The samples of the n-th batch, (any number,) int64: secret, or they would not count."""
        draws = self.generator("places", number).random(self._num_samples)
        return torch.from_numpy(np.flatnonzero(draws < self._rate))

    def gradients(
        self, network: nn.Module, loss: Callable[[Batch], Tensor], batch: Batch
    ) -> list[Tensor]:
        """The private mean gradient, `g` above, of a loss of single samples, of what is `trained`.

        `loss` gets batches of one sample. Memory: the network's weights for each of the batch.
        """
        self.steps += 1
        sums = [torch.zeros_like(param) for param in trained(network)]
        if len(batch.x):
            each = sample_gradients(network, loss, batch)
            norms = torch.stack([g.reshape(len(g), -1).norm(dim=1) for g in each]).norm(dim=0)
            scale = self.budget.clip / norms.clamp(min=self.budget.clip)
            sums = [torch.tensordot(scale, g, dims=1) for g in each]
        self.add_noise(sums, 1.0, self.steps, self._start)
        return [total / self._batch for total in sums]

    def after_step(self, _: Any, __: int) -> dict[str, Tensor]:
        """What the next contribution says of it, in place of `fedwan.site.vitals`."""
        return {EPSILON: torch.tensor(self.epsilon(), dtype=torch.float64)}


def trained(network: nn.Module) -> list[nn.Parameter]:
    """Its parameters that are not frozen."""
    return [param for param in network.parameters() if param.requires_grad]


class _WithLoss(nn.Module):
    """A network and a loss that calls it, so that parameters can be handed to both."""

    def __init__(self, network: nn.Module, loss: Callable[[Batch], Tensor]) -> None:
        super().__init__()
        self.network, self.loss = network, loss

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return self.loss(Batch(x[None], y[None]))


def sample_gradients(
    network: nn.Module, loss: Callable[[Batch], Tensor], batch: Batch
) -> list[Tensor]:
    """Each sample's gradient, (batch, *shape) of what is `trained`; not finite becomes 0."""
    both = _WithLoss(network, loss)
    named = both.named_parameters()
    params = {name: param.detach() for name, param in named if param.requires_grad}

    def of_one(params: dict[str, Tensor], x: Tensor, y: Tensor) -> Tensor:
        return functional_call(both, params, (x, y))  # type: ignore[no-any-return]

    with sdpa_kernel(SDPBackend.MATH):  # the other ways to attend take sample by sample
        made = vmap(grad(of_one), (None, 0, 0), randomness="different")(params, batch.x, batch.y)
    return [value.nan_to_num(0.0, 0.0, 0.0) for value in made.values()]
