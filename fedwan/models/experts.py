"""Networks of one kind, of which each site trains one; each sample is made by one of them.

So a mixture of what the sites' data are is sampled exactly, if each expert samples its own: with
N_s training samples at site s, of N,

    p(x) = sum_s N_s / N p_s(x)         draw s, then follow expert s from noise to the data

Of networks that are told the class, N_s is how many of the asked class site s has. The flow whose
velocity is the mean of the experts' by p(s | x, sigma) has the same marginals; that is what
decentralized diffusion models (McAllister et al. 2025, 2501.05450) learn a router for.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from fedwan.errors import ConfigError
from fedwan.rng import derive_seed


class Experts(nn.Module):
    """Copies of a network, one for each site; by itself, the one that is trained here."""

    num_samples: Tensor
    """That each site trains on of each class, (sites, classes) int64; 0 where that is not known.

    Of networks that are told nothing, all are of one class."""

    def __init__(self, network: nn.Module, num: int, num_classes: int = 0) -> None:
        super().__init__()
        each = [network, *(copy.deepcopy(network) for _ in range(num - 1))]
        # No list: its members would count as the blocks that `site.recompute` computes again.
        self.experts = nn.ModuleDict({str(site): expert for site, expert in enumerate(each)})
        self.register_buffer("num_samples", torch.zeros(num, num_classes or 1, dtype=torch.int64))
        self.trained_here: tuple[int, Tensor] | None = None

    @property
    def own(self) -> tuple[int, Tensor]:
        """The site that trains here, by number, and how many samples of each class it has."""
        assert self.trained_here is not None, "no expert was chosen; see `forward_drawn`"
        return self.trained_here

    def forward(self, *told: Tensor) -> Tensor:
        """Of the expert that is trained here."""
        return self.experts[str(self.own[0])](*told)  # type: ignore[no-any-return]


def train_own(
    networks: Iterable[nn.Module], site: int, num_samples: Callable[[int], Tensor]
) -> None:
    """Have those that are experts be the networks of one site from now on.

    `num_samples` of a number of classes: how many samples of each the site has.
    """
    for network in networks:
        if not isinstance(network, Experts):
            continue
        counts = num_samples(network.num_samples.shape[1])
        if len(counts) > 1 and not counts.any():
            raise ConfigError(
                "strategy 'experts' asks those sites for a class that have it, and how many "
                "samples of each class are in this data set is not known; give the data set "
                "labels, (N,) int64, or take networks that are not told the class"
            )
        network.trained_here = site, counts


def build_experts(network: nn.Module, num: int, num_classes: int = 0) -> nn.Module:
    """A network, or as many copies of it, if that is more than 0.

    `num_classes`: that it is told, 0 for none.
    """
    return Experts(network, num, num_classes) if num else network


def draw_experts(network: nn.Module, labels: Tensor, seed: int) -> Tensor:
    """Which expert makes each sample of these classes, (num,) int64; 0 of a network of all."""
    if not isinstance(network, Experts):
        return torch.zeros(len(labels), dtype=torch.int64)
    counts = network.num_samples.cpu().double()
    is_known = bool(counts.any(dim=1).all())
    # A class that nobody has is anybody's.
    shares = torch.where(counts.any(dim=0), counts, 1.0) if is_known else torch.ones_like(counts)
    column = labels.cpu() if shares.shape[1] > 1 else torch.zeros(len(labels), dtype=torch.int64)
    generator = torch.Generator().manual_seed(derive_seed(seed, "experts"))
    return torch.multinomial(shares.T[column], 1, generator=generator).squeeze(1)


def forward_drawn(network: nn.Module, drawn: Tensor, *told: Tensor) -> Tensor:
    """What the expert that was drawn for each sample, (num,), makes of it.

    `told` are (num, …), or once more as many for each question that samples are asked.
    """
    if not isinstance(network, Experts):
        return network(*told)  # type: ignore[no-any-return]
    drawn = drawn.repeat(len(told[0]) // len(drawn))
    order = drawn.argsort(stable=True)
    counts: list[int] = drawn.bincount(minlength=len(network.experts)).tolist()
    parts = zip(*(torch.split(tensor[order], counts) for tensor in told), strict=True)
    pairs = zip(network.experts.values(), parts, strict=True)
    made = torch.cat([expert(*part) for expert, part in pairs if len(part[0])])
    return made[order.argsort()]
