"""Which networks a LightningModule has: one for each of its optimisers.

A network is the child module that an optimiser trains, under the name of its attribute; or, where
an optimiser trains several children or bare parameters, all of these together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from fedwan.errors import ConfigError

__all__ = ["Parts", "split_module"]

WHOLE = "model"
"""The network of a single optimiser that trains several children."""


class Parts(NamedTuple):
    """A LightningModule, cut into networks."""

    networks: dict[str, nn.Module]
    """By name, those that are trained first, in the order of their optimisers."""
    optimizers: dict[str, torch.optim.Optimizer]
    """By the name of the network."""


def split_module(module: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> Parts:
    """Cut a module into networks, which share its tensors.

    Args:
        module: the LightningModule.
        optimizers: as it configured them.

    Raises:
        ConfigError: there is no optimiser, or what one trains another trains, too, or is not the
            module's.
    """
    if not optimizers:
        raise ConfigError(
            f"{type(module).__name__}.configure_optimizers returns no optimiser, so that nothing "
            "would be trained; return at least one"
        )
    owners = _owners(module)
    parts = Parts({}, {})
    taken: dict[str, int] = {}
    for index, optimizer in enumerate(optimizers):
        attributes = _trained(module, optimizer, owners)
        for attribute in attributes:
            if attribute in taken:
                raise ConfigError(
                    f"optimisers {taken[attribute]} and {index} of {type(module).__name__} both "
                    f"train {attribute!r}; give each of them child modules of its own"
                )
            taken[attribute] = index
        name = _name(attributes, is_only=len(optimizers) == 1)
        parts.networks[name] = _network(module, attributes)
        parts.optimizers[name] = optimizer
    for name, child in module.named_children():
        if name not in taken and name not in parts.networks and child.state_dict():
            parts.networks[name] = child
    return parts


class _Together(nn.Module):
    """Children and parameters of a module under the names that they have there."""

    def __init__(self, module: nn.Module, attributes: Sequence[str]) -> None:
        super().__init__()
        for attribute in attributes:
            setattr(self, attribute, getattr(module, attribute))


def _network(module: nn.Module, attributes: Sequence[str]) -> nn.Module:
    children = dict(module.named_children())
    if len(attributes) == 1 and attributes[0] in children:
        return children[attributes[0]]
    return _Together(module, attributes)


def _name(attributes: Sequence[str], is_only: bool) -> str:
    if len(attributes) > 1 and is_only:
        return WHOLE
    return "_".join(attributes)


def _owners(module: nn.Module) -> dict[nn.Parameter, str]:
    """The attribute that each parameter lies under, the first of several."""
    owners = {parameter: name for name, parameter in module.named_parameters(recurse=False)}
    for name, child in module.named_children():
        for parameter in child.parameters():
            owners.setdefault(parameter, name)
    return owners


def _trained(
    module: nn.Module, optimizer: torch.optim.Optimizer, owners: dict[nn.Parameter, str]
) -> list[str]:
    """The attributes that an optimiser trains, in its order."""
    found: dict[str, None] = {}
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        if parameter not in owners:
            raise ConfigError(
                f"an optimiser of {type(module).__name__} trains a parameter of shape "
                f"{tuple(parameter.shape)} that is not the module's; assign it to an attribute"
            )
        found[owners[parameter]] = None
    return list(found)
