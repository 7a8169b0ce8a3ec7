"""Networks of one kind, of which each site trains one; each sample is made by one of them.

So a mixture of what the sites' data are is sampled exactly, if each expert samples its own: with
N_s training samples at site s, of N,

    p(x) = sum_s N_s / N p_s(x)         draw s, then follow expert s from noise to the data

The flow whose velocity is the mean of the experts' by p(s | x, sigma) has the same marginals; that
is what decentralized diffusion models (McAllister et al. 2025, 2501.05450) learn a router for.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from fedwan.rng import derive_seed


class Experts(nn.Module):
    """Copies of a network, one for each site; by itself, the one that is trained here."""

    num_samples: Tensor
    """That each site trains on, (sites,) int64; 0 where that is not known."""

    def __init__(self, network: nn.Module, num: int) -> None:
        super().__init__()
        each = [network, *(copy.deepcopy(network) for _ in range(num - 1))]
        # No list: its members would count as the blocks that `site.recompute` computes again.
        self.experts = nn.ModuleDict({str(site): expert for site, expert in enumerate(each)})
        self.register_buffer("num_samples", torch.zeros(num, dtype=torch.int64))
        self._own: tuple[int, int] | None = None

    @property
    def own(self) -> tuple[int, int]:
        """The site that trains here, by number, and how many samples it has."""
        assert self._own is not None, "no expert was chosen; see `forward_drawn`"
        return self._own

    def train_own(self, site: int, num_samples: int) -> None:
        """Be the network of one site from now on."""
        self._own = site, num_samples

    def forward(self, *told: Tensor) -> Tensor:
        """Of the expert that is trained here."""
        return self.experts[str(self.own[0])](*told)  # type: ignore[no-any-return]


def train_own(networks: Iterable[nn.Module], site: int, num_samples: int) -> None:
    """Have those that are experts be the networks of one site from now on."""
    for network in networks:
        if isinstance(network, Experts):
            network.train_own(site, num_samples)


def build_experts(network: nn.Module, num: int) -> nn.Module:
    """A network, or as many copies of it, if that is more than 0."""
    return Experts(network, num) if num else network


def draw_experts(network: nn.Module, num: int, seed: int) -> Tensor:
    """Which expert makes each of `num` samples, (num,) int64; 0 where the network is of all."""
    if not isinstance(network, Experts):
        return torch.zeros(num, dtype=torch.int64)
    counts = network.num_samples.cpu().double()
    shares = counts if bool((counts > 0).all()) else torch.ones_like(counts)
    generator = torch.Generator().manual_seed(derive_seed(seed, "experts"))
    return torch.multinomial(shares, num, replacement=True, generator=generator)


def forward_drawn(network: nn.Module, drawn: Tensor, *told: Tensor) -> Tensor:
    """What the expert that was drawn for each sample, (num,), makes of it; `told` are (num, …)."""
    if not isinstance(network, Experts):
        return network(*told)  # type: ignore[no-any-return]
    order = drawn.argsort(stable=True)
    counts: list[int] = drawn.bincount(minlength=len(network.experts)).tolist()
    parts = zip(*(torch.split(tensor[order], counts) for tensor in told), strict=True)
    pairs = zip(network.experts.values(), parts, strict=True)
    made = torch.cat([expert(*part) for expert, part in pairs if len(part[0])])
    return made[order.argsort()]
