"""Networks of one kind, of which each site trains one; each sample is made by one of them.

So a mixture of what the sites' data are is sampled exactly, if each expert samples its own: with N_s
training samples at site s, of N,

    p(x) = sum_s N_s / N p_s(x)         draw s, then follow expert s from noise to the data

The same marginals has the flow whose velocity is the mean of the experts' by p(s | x, sigma), which
decentralized diffusion models (McAllister et al. 2025, 2501.05450, section 3) learn a router for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor, nn

from fedwan.rng import derive_seed


class Experts(nn.Module):
    """Copies of a network, one for each site."""

    num_samples: Tensor
    """That each site trains on, (sites,) int64; 0 where that is not known."""

    def __init__(self, network: nn.Module, num: int) -> None:
        super().__init__()
        copies = (copy.deepcopy(network) for _ in range(num - 1))
        self.experts = nn.ModuleList([network, *copies])
        self.register_buffer("num_samples", torch.zeros(num, dtype=torch.int64))
        self._mine: tuple[int, int] | None = None

    @property
    def own(self) -> int:
        """The number of the expert that is trained here."""
        assert self._mine is not None, "expert networks by themselves have no forward pass"
        return self._mine[0]

    def train_own(self, site: int, num_samples: int) -> None:
        """From now on the forward pass is that of a site, by number, with so many samples."""
        self._mine = site, num_samples

    def count(self) -> None:
        """Note how many samples this site has."""
        assert self._mine is not None
        site, num = self._mine
        self.num_samples[site] = num

    def forward(self, *told: Tensor) -> Tensor:
        """Of the expert that is trained here."""
        return self.experts[self.own](*told)  # type: ignore[no-any-return]

    def draw(self, num: int, seed: int) -> Tensor:
        """Which expert makes each of `num` samples, (num,) int64 on the CPU."""
        counts = self.num_samples.cpu().double()
        shares = counts if bool((counts > 0).all()) else torch.ones_like(counts)
        generator = torch.Generator().manual_seed(derive_seed(seed, "experts"))
        return torch.multinomial(shares, num, replacement=True, generator=generator)


def build_experts(network: nn.Module, num: int) -> nn.Module:
    """The network, or as many copies of it if there is more than 0."""
    return Experts(network, num) if num else network


def drawn(network: nn.Module, num: int, seed: int) -> Callable[..., Tensor]:
    """The forward pass for `num` samples, of which each keeps to the expert that was drawn for it.

    A network that is no expert's is its own. What it is told are tensors (num, …).
    """
    if not isinstance(network, Experts):
        return network
    chosen = network.draw(num, seed)
    order = chosen.argsort(stable=True)
    counts, back = chosen.bincount(minlength=len(network.experts)).tolist(), order.argsort()

    def forward(*told: Tensor) -> Tensor:
        parts = zip(*(tensor[order].split(counts) for tensor in told), strict=True)
        made = [
            expert(*part) for expert, part in zip(network.experts, parts, strict=True) if len(part[0])
        ]
        return torch.cat(made)[back]

    return forward
