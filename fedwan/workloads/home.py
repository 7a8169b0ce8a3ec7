"""Which tensors of trained networks stay at the sites, and why.

    excluded    what `network.NETWORK.exclude` names: a site's own layers, as the last ones
                (Arivazhagan et al. 2019, 1912.00818, FedPer) or batch norm (Li et al. 2021,
                2102.07623, FedBN). Its inner optimiser steps them, its checkpoint keeps them.
    frozen      parameters that need no gradient, or that the network's optimiser does not hold: a
                backbone under a trained head. As of frozen networks, every site must have the same.

It is asked once, when a workload was just built: what needs no gradient for a while later, within
a step or until it thaws, is trained all the same.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from fnmatch import fnmatchcase

from torch import nn

from fedwan.codecs.payload import check_travels
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.state import Role, layout_of


def staying_home(
    trained: Mapping[str, nn.Module],
    held: Collection[str] | None,
    exclude: Mapping[str, Sequence[str]],
) -> dict[str, Role]:
    """The role, `EXCLUDED` or `FROZEN`, of each tensor of trained networks that has one of these.

    `held` names the parameters that optimisers step; None where none was made yet. A `ConfigError`
    if a pattern matches nothing that would travel, or nothing is left of a network that does; a
    `UserError` if what is left cannot travel.
    """
    home: dict[str, Role] = {}
    for network, module in trained.items():
        for name, param in module.named_parameters():
            key = f"{network}/{name}"
            if not param.requires_grad or (held is not None and key not in held):
                home[key] = Role.FROZEN
        if not _is_sent(network, module, home):
            raise ConfigError(
                f"network {network!r} has an optimiser but no parameter that it could step, all "
                "are frozen; leave its optimiser out, or have some require a gradient"
            )
        patterns = exclude.get(network, ())
        home |= dict.fromkeys(_matches(network, module, patterns, home), Role.EXCLUDED)
        if not _is_sent(network, module, home):
            raise ConfigError(
                f"network.{network}.exclude = {list(patterns)} matches all parameters that are "
                "trained, so that sites would share nothing of it; leave some to travel"
            )
    check_travels(layout_of(trained, home))
    return home


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


def _is_sent(network: str, module: nn.Module, home: Mapping[str, Role]) -> bool:
    layout = layout_of({network: module}, home)
    return any(spec.role is Role.PARAMETER for spec in layout.values())
