"""Which tensors of trained networks stay at the sites, and why.

    excluded    what `network.NETWORK.exclude` names: a site's own layers, as the last ones
                (Arivazhagan et al. 2019, 1912.00818, FedPer) or batch norm (Li et al. 2021,
                2102.07623, FedBN). Its inner optimiser steps them, its checkpoint keeps them.
    frozen      parameters that need no gradient, or that the network's optimiser does not hold: a
                backbone under a trained head. As of frozen networks, every site must have the same.

It is asked once, when a workload was just built: what needs no gradient for a while within a step,
as one of a GAN's networks in the other's turn, is trained all the same.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase

import torch
from torch import nn

from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.state import Role, layout_of

__all__ = ["staying_home"]


def staying_home(
    networks: Mapping[str, nn.Module],
    optimizers: Mapping[str, torch.optim.Optimizer],
    exclude: Mapping[str, Sequence[str]],
) -> dict[str, Role]:
    """The role, `EXCLUDED` or `FROZEN`, of each tensor of trained networks that has one of these.

    Args:
        networks: by name, as they were built.
        optimizers: of those that are trained; None where one was not made, which holds all.
        exclude: by network, patterns of the names of its parameters and buffers.

    Raises:
        ConfigError: a network is not trained, a pattern matches nothing that would travel, or
            nothing of a network is left that is trained and travels.
    """
    for network in exclude:
        if network not in optimizers:
            known = nearest(network, optimizers)
            raise ConfigError(
                f"network.{network}.exclude: trained are {', '.join(optimizers)}{known}"
            )
    home: dict[str, Role] = {}
    for network, optimizer in optimizers.items():
        home |= dict.fromkeys(_frozen(network, networks[network], optimizer), Role.FROZEN)
        if not _parameters(network, networks[network], home):
            raise ConfigError(
                f"network {network!r} has an optimiser but no parameter that it could step, all "
                "are frozen; leave its optimiser out, or have some require a gradient"
            )
        patterns = exclude.get(network, ())
        home |= dict.fromkeys(_matches(network, networks[network], patterns, home), Role.EXCLUDED)
        if not _parameters(network, networks[network], home):
            raise ConfigError(
                f"network.{network}.exclude = {list(patterns)} matches all parameters that are "
                "trained, so that sites would share nothing of it; leave some to travel"
            )
    return home


def _frozen(network: str, module: nn.Module, optimizer: torch.optim.Optimizer | None) -> list[str]:
    held: set[int] | None = None
    if optimizer is not None:
        held = {id(param) for group in optimizer.param_groups for param in group["params"]}
    return [
        f"{network}/{name}"
        for name, param in module.named_parameters()
        if not param.requires_grad or (held is not None and id(param) not in held)
    ]


def _matches(
    network: str, module: nn.Module, patterns: Sequence[str], home: Mapping[str, Role]
) -> list[str]:
    """Names of what would travel, but for these patterns."""
    names = [name.partition("/")[2] for name in layout_of({network: module}, home)]
    for pattern in patterns:
        if not any(fnmatchcase(name, pattern) for name in names):
            raise ConfigError(
                f"network.{network}.exclude holds {pattern!r}, which matches nothing of it that "
                f"would travel; its names are like {names[0]!r}{nearest(pattern, names)}"
            )
    return [f"{network}/{n}" for n in names if any(fnmatchcase(n, p) for p in patterns)]


def _parameters(network: str, module: nn.Module, home: Mapping[str, Role]) -> list[str]:
    layout = layout_of({network: module}, home)
    return [name for name, spec in layout.items() if spec.role is Role.PARAMETER]
