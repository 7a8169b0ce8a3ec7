"""What the sites train: two networks whose every bit depends on every step that was taken.

The gradients are made, not computed: they depend on the weights, the site and the place in its
data. A step that is lost, taken twice, or taken from other weights changes the bits of the run.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Any, cast

import torch
from torch import Tensor, nn

from fedwan.config import MASKED, Config
from fedwan.site.group import Group
from fedwan.site.script import Script
from fedwan.site.site import Membership, Site

KINDS = {"generator": "adversarial", "discriminator": "adversarial"}


class _Network(nn.Module):
    """Parameters, and a buffer of each kind that is merged in a way of its own.

    Under masks there are none, whose sums cannot be read.
    """

    def __init__(self, width: int, seed: int, *, has_buffers: bool) -> None:
        super().__init__()
        values = torch.arange(width, dtype=torch.float32)
        self.weight = nn.Parameter(torch.sin(values + seed))
        self.bias = nn.Parameter(torch.cos(values[:8] + seed))
        if not has_buffers:
            return
        self.register_buffer("running_mean", torch.zeros(4))
        self.register_buffer("running_var", torch.ones(4))
        self.register_buffer("num_batches", torch.tensor(0))


class _Data:
    def __init__(self) -> None:
        self.place = 0

    def state_dict(self) -> dict[str, int]:
        return {"place": self.place}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.place = int(state["place"])


def networks_of(config: Config) -> dict[str, nn.Module]:
    """A site's networks, as they begin."""
    has_buffers = config.codec.up not in MASKED
    return {name: _Network(160, seed, has_buffers=has_buffers) for seed, name in enumerate(KINDS)}


def train(
    member: Membership,
    index: int,
    pause: Callable[[Site], None],
    bad_places: Collection[int] = (),
) -> str:
    """One site's part in a run; the hash of the weights that it ended with.

    `pause` is what takes time in each step. At `bad_places` in its data gradients are no numbers.
    """
    networks = networks_of(member.config)
    optimizers = {
        name: torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        for name, network in networks.items()
    }
    data = _Data()
    script = Script(
        networks=networks,
        optimizers=optimizers,
        kinds=KINDS,  # type: ignore[arg-type]
        state={"data": data},
        evaluate=lambda seed: {"fd": 1.0},
    )
    with Site(member, script, Group()) as site:
        for _ in site:
            for network in networks.values():
                _set_gradients(network, index, data.place)
                if data.place in bad_places:
                    cast(Tensor, network.weight.grad).fill_(float("nan"))
            data.place += 1
            pause(site)
            site.reduce()
            for optimizer in optimizers.values():
                optimizer.step()
    return site.global_sha256


def _set_gradients(network: _Network, index: int, place: int) -> None:
    with torch.no_grad():
        for parameter in (network.weight, network.bias):
            pull = torch.sin(parameter * (index + 2) + 0.7 * place)
            parameter.grad = 0.3 * parameter + pull
        if not network.state_dict().keys() - {"weight", "bias"}:
            return
        network.running_mean.lerp_(network.weight[:4], 0.1)
        network.running_var.lerp_(network.weight[:4].square() + 0.1, 0.1)
        network.num_batches += 1
