"""A site's vitals: a few figures of its data, rates and networks, for `fedwan doctor`.

    shard/samples      how many the shard has
    shard/distinct     share of them that are not the same as another one
    x/low x/high       least and largest value of a batch as the workload gets it
    x/mean x/std       of its values
    x/smooth           correlation of neighbouring values of images: 0 for noise, whatever its range
    lr/NETWORK         the learning rate in use
    gradient/NETWORK   norm of the gradient that the optimiser stepped on last
    memory/NETWORK …   what the workload's `examine` tells

They are taken right before a contribution leaves, once in H steps or in 16, whichever is more, and
where batches are smaller than what is examined as many times less often: 2 % of the time of a GAN's
steps on digits at H = 20. Nothing is drawn from the generators that training
draws from, no buffer moves, and nothing is waited for on a GPU until the contribution is made: the
run's bits are the same with and without.

Where only n of N samples are looked at, most copies are not seen beside what they copy. What was
seen once (f1) and twice (f2) tells how many were not seen at all: at least f0 = f1^2 /
(2 f2 n / (n - 1) + f1 n / (N - n)), the lower bound of Chao and Lin (2012, "Nonparametric lower
bounds for species richness and shared species richness under sampling without replacement",
Biometrics 68), which is met where all samples have as many copies. A few equal pairs, which chance
may bring, count for nothing.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import xxhash
from torch import Tensor
from torch.utils._pytree import tree_leaves

from fedwan.data import Shard, first_leaf
from fedwan.rng import derive_seed, lent_generators
from fedwan.site.replica import evaluating
from fedwan.workloads.base import Batch
from fedwan.workloads.optim import full_norm

if TYPE_CHECKING:
    from fedwan.workloads.descent import Descent

log = logging.getLogger(__name__)

EVERY = 16
"""Steps between two looks, at least, where a batch has as many samples as are examined."""
FEWEST_EXAMINED, MOST_EXAMINED = 16, 64
"""Samples of each kind that `examine` is given: as many as a batch has, within these."""
FEWEST_HELD_OUT = 24
"""Held-out samples, for `memory/`: the same ones are compared each time, and few may be easy."""
MOST_COMPARED = 4096
"""Samples of a shard that are kept, compared with each other and examined, at most."""
MOST_BYTES = 64 << 20
"""Of those that are kept; of images of 256 x 256 pixels they are some dozens."""
LEAST_COMPARED, MOST_READ = 512, 1 << 30
"""Samples that are compared though fewer are kept, and the most bytes of these: images of
1024 x 1024 pixels take 50 ms each, and a step waits for them."""
COMPARED_AT_ONCE = 64
DEVIATIONS = 2.0
"""By which the number of pairs seen may be too high, as a Poisson number is."""


class Vitals:
    """Looks at a site now and then."""

    def __init__(
        self, workload: Descent, shard: Shard, h: int, batch: int, seed: int, site: str
    ) -> None:
        self._workload = workload
        self._shard = shard
        self._num = min(max(batch, FEWEST_EXAMINED), MOST_EXAMINED)
        self._every = h * -(-EVERY * -(-self._num // batch) // h)
        self._seed = (seed, site)
        self._some: Any = None
        self._shard_figures: Mapping[str, Tensor] = {}
        self._has_failed = False

    def after_step(self, batch: Any, step: int) -> dict[str, Tensor]:
        """Scalars by name, if it is time for a look at the batch of a step; else none.

        All sites look after the same ones, whenever their processes began: figures are compared.
        """
        if step % self._every or self._has_failed:
            return {}
        try:
            with torch.no_grad():
                look = self._look(batch, step)
                return {name: value.reshape(()) for name, value in look.items()}
        except Exception:
            # A figure that cannot be had, as of a workload's own `examine`, must not end a run.
            self._has_failed = True
            log.warning("no figures for the doctor from now on; training goes on", exc_info=True)
            return {}

    def _look(self, batch: Any, step: int) -> dict[str, Tensor]:
        if self._some is None:
            self._draw()
        x = first_leaf(batch)
        own = self._examine(self._some, x.device, step)
        return {**self._shard_figures, **data_figures(x), **self._optimizers(), **own}

    def _draw(self) -> None:
        """Keep some samples, and count copies among these and some more."""
        shard, seed = self._shard, derive_seed(*self._seed, "shard")
        leaves = tree_leaves(shard.drawn(1, seed))
        bytes_each = sum(leaf.nbytes for leaf in leaves if isinstance(leaf, Tensor))
        num = max(FEWEST_EXAMINED, min(MOST_COMPARED, MOST_BYTES // bytes_each))
        self._some = shard.drawn(num, seed)
        keys = [sample_keys(first_leaf(self._some))]
        compared = min(LEAST_COMPARED, MOST_READ // bytes_each, shard.num_samples)
        for start in range(num, compared, COMPARED_AT_ONCE):
            more = shard.drawn(min(COMPARED_AT_ONCE, compared - start), seed, start)
            keys.append(sample_keys(first_leaf(more)))
        if shard.num_samples:
            share = distinct_share(torch.cat(keys), shard.num_samples)
            figures = {"shard/samples": shard.num_samples, "shard/distinct": share}
            self._shard_figures = {k: torch.tensor(float(v)) for k, v in figures.items()}

    def _optimizers(self) -> dict[str, Tensor]:
        figures: dict[str, Tensor] = {}
        for network, optimizer in self._workload.optimizers.items():
            groups = optimizer.param_groups
            figures[f"lr/{network}"] = torch.as_tensor(float(groups[0]["lr"]))
            gradients = [p.grad for group in groups for p in group["params"] if p.grad is not None]
            if gradients:
                norms = torch.stack([full_norm(gradient) for gradient in gradients])
                figures[f"gradient/{network}"] = torch.linalg.vector_norm(norms)
        return figures

    def _examine(self, some: Any, device: torch.device, step: int) -> dict[str, Tensor]:
        examine, held_out = getattr(self._workload, "examine", None), self._shard.held_out
        is_known = isinstance(held_out, Batch) and len(held_out.y) > 0
        if examine is None or not is_known:
            return {}
        seed = derive_seed(*self._seed, "examine", step)
        alike = _alike(some, held_out, self._num, torch.Generator().manual_seed(seed))
        told = [self._shard.tell(part) for part in alike]
        parts = [Batch(part.x.to(device), part.y.to(device)) for part in told]
        gpus = [device] if device.type == "cuda" else []
        with evaluating(self._workload.networks.values()), lent_generators(gpus):
            figures: dict[str, Tensor] = examine(parts[0], parts[1], seed)
        is_few = len(held_out.y) < FEWEST_HELD_OUT
        return {n: v for n, v in figures.items() if not (is_few and n.startswith("memory/"))}


def data_figures(x: Tensor) -> dict[str, Tensor]:
    """Range and moments of a batch (n, …), and how smooth images are: (n, channels, h, w)."""
    x = x.detach().float()
    std, mean = torch.std_mean(x, correction=0)
    figures = {"x/low": x.amin(), "x/high": x.amax(), "x/mean": mean, "x/std": std}
    if x.dim() > 3 and min(x.shape[-2:]) > 1:
        x = x - mean
        across = (x[..., 1:] * x[..., :-1]).mean()
        down = (x[..., 1:, :] * x[..., :-1, :]).mean()
        figures["x/smooth"] = (across + down) / (2 * std.square().clamp(min=1e-12))
    return figures


def sample_keys(x: Tensor) -> Tensor:
    """A number for each sample of (n, …), the same for equal ones, (n,) int64."""
    rows = x.detach().flatten(1).float().cpu().contiguous().numpy()
    return torch.tensor([xxhash.xxh3_64_intdigest(row) >> 1 for row in rows])


def distinct_share(keys: Tensor, num_samples: int) -> float:
    """Share of `num_samples` that are no copies: exact if all were looked at, else estimated.

    `keys`, (n,), are of samples drawn without replacement, the same for equal ones.

    >>> distinct_share(torch.tensor([1, 2, 2, 3]), 4)
    0.75
    >>> distinct_share(torch.tensor([1, 2, 3]), 1000)
    1.0
    """
    num = len(keys)
    times = torch.unique(keys, return_counts=True)[1]
    found = float(len(times))
    if found == num:
        return 1.0
    once, twice = int((times == 1).sum()), int((times == 2).sum())
    if once and num < num_samples:
        sure = max(0.0, twice - DEVIATIONS * math.sqrt(twice))
        found += once**2 / (2 * sure * num / (num - 1) + once * num / (num_samples - num))
    return min(1.0, found / max(num, num_samples))


def _alike(
    train: Batch, held_out: Batch, num: int, generator: torch.Generator
) -> tuple[Batch, Batch]:
    """Training samples, and held-out ones of the same classes, as far as there are any."""
    mine = torch.randint(len(train.y), (num,), generator=generator)
    labels, pool = train.y[mine], held_out.y
    index = torch.randint(len(pool), (num,), generator=generator)
    for label in sorted(set(labels.tolist())):
        members = (pool == label).nonzero().flatten()
        wanted = labels == label
        if len(members):
            drawn = torch.randint(len(members), (int(wanted.sum()),), generator=generator)
            index[wanted] = members[drawn]
    return Batch(train.x[mine], labels), Batch(held_out.x[index], held_out.y[index])
