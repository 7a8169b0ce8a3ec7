"""Experts: each site trains a network of its own on its own shard, and they generate together.

Decentralized diffusion models (McAllister et al. 2025, 2501.05450; Paris, 2510.03434): nothing is
merged, so that it costs nothing that shards differ, and no site's weights depend on another's.
There a router chooses experts at every step by the noised input. Here each sample keeps to one,
drawn by how many training samples its site has: see `fedwan.models.experts`.

The global weights are all experts side by side, θ = (θ_1 … θ_N). Site s steps θ_s alone, and sends
nothing else; the coordinator takes θ_s from no other site:

    θ_s <- θ_s - Δ_s

H says how often sites send, for the moving average, evaluations and checkpoints. They wait for each
other there, as in any round, and get the others' weights, to evaluate all together.
"""

from __future__ import annotations

import torch

from fedwan.app import load_workload
from fedwan.config import COMMAND, Config
from fedwan.errors import ConfigError
from fedwan.models.experts import Experts
from fedwan.recipes import AVERAGING, GATE, deltas_in_rounds
from fedwan.site.replica import Replica
from fedwan.state import Layout
from fedwan.strategy import SiteHook, Strategy

USES = ("h", GATE, "inner.*.name=own")
DEFAULTS = {"h": 100}
EXPERTS = True


def check(config: Config) -> None:
    """Refuse workloads whose samples cannot be drawn from the networks of one site."""
    page = None if config.workload == COMMAND else load_workload(config.workload)
    if not getattr(page, "HAS_EXPERTS", False):
        raise ConfigError(
            "strategy 'experts' has each sample made by one site's networks, which workload "
            f"{config.workload!r} does not bear; set workload=flow, or gan, or strategy=diloco"
        )


def build(config: Config) -> Strategy:
    """The recipe."""
    return deltas_in_rounds(config, AVERAGING, hook=OwnExpert, share=own_expert)


def own_expert(layout: Layout, site: int) -> Layout:
    """What is not another site's expert."""
    own = f"experts.{site}."
    return {
        name: spec for name, spec in layout.items() if "/experts." not in name or f"/{own}" in name
    }


class OwnExpert(SiteHook):
    """Says how many samples this site has, and keeps the others' experts once, not twice.

    Memory: the weights of the others' experts, for evaluations; they have no gradients and moments.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        named = replica.trained.items()
        self._experts = {name: net for name, net in named if isinstance(net, Experts)}
        for network, experts in self._experts.items():
            everyone, own = f"{network}/experts.", f"{network}/experts.{experts.own[0]}."
            for name, live in replica.live.items():
                if name.startswith(everyone) and not name.startswith(own):
                    replica.base[name] = live

    @torch.no_grad()
    def after_step(self) -> None:
        """The largest of each number is merged."""
        for experts in self._experts.values():
            site, num_samples = experts.own
            experts.num_samples[site] = num_samples
