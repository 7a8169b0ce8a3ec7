"""Experts: each site trains a network of its own on its own shard, and they generate together.

Decentralized diffusion models (McAllister et al. 2025, 2501.05450; Jiang et al. 2025, 2510.03434,
Paris): nothing is merged, so that it costs nothing that shards differ, and no site's weights depend
on another's. There a router chooses experts at every step by the noised input. Here each sample
keeps to one, drawn by how many training samples its site has: see `fedwan.models.experts`.

The global weights are all experts side by side, θ = (θ_1 … θ_S). Site s steps θ_s alone, so that the
sum of the deltas sets every expert to what its site has made of it:

    θ <- θ - sum_s Δ_s          Δ_s is 0 but for expert s

H says how often sites send, for the moving average, evaluations and checkpoints. They wait for each
other there, as in any round, and get the others' weights, to evaluate all together.
"""

from __future__ import annotations

import torch

from fedwan import outer
from fedwan.app import load_workload
from fedwan.config import COMMAND, Config
from fedwan.coordinator.server_step import step_outer
from fedwan.errors import ConfigError
from fedwan.models.experts import Experts
from fedwan.recipes import barrier_policy, codec, cut
from fedwan.site.replica import Replica
from fedwan.strategy import SiteHook, Strategy

USES = ("h",)
DEFAULTS = {"h": 100}
APART = True


def check(config: Config) -> None:
    """Refuse workloads whose samples cannot be drawn from one site's networks."""
    is_known = config.workload != COMMAND
    page = load_workload(config.workload) if is_known else None
    if not getattr(page, "has_experts", lambda _: False)(config):
        raise ConfigError(
            f"strategy 'experts' draws each sample from one site's networks, which workload "
            f"{config.workload!r} as it is set does not; set workload=flow model.network=mlp, or "
            "strategy=diloco"
        )


def build(config: Config) -> Strategy:
    """The recipe."""
    return Strategy(
        contributes="delta",
        h=config.h,
        fragments=cut(config),
        server_step=step_outer({network: outer.sgd(lr=1.0) for network in config.inner}),
        up=codec(config, "up"),
        down=codec(config, "down"),
        policy=barrier_policy(config),
        hook=OwnExpert,
        merges="sum",
    )


class OwnExpert(SiteHook):
    """Says how many samples this site has, and keeps the others' experts once, not twice.

    Memory: the weights of each other site's expert, for evaluations. None has gradients or moments.
    """

    def __init__(self, replica: Replica) -> None:
        super().__init__()
        self._networks = [net for net in replica.trained.values() if isinstance(net, Experts)]
        for name, network in replica.trained.items():
            assert isinstance(network, Experts)
            own = f"{name}/experts.{network.own}."
            for tensor in replica.live:
                if tensor.startswith(f"{name}/experts.") and not tensor.startswith(own):
                    replica.base[tensor] = replica.live[tensor]

    @torch.no_grad()
    def after_step(self) -> None:
        """The sites' numbers are merged into the largest of each."""
        for network in self._networks:
            network.count()
