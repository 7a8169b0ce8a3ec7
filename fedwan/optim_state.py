"""Torch optimisers tensor by tensor: moments by the names of their parameters.

A moment's name is `optimizer:field|parameter`, as in `velocity:exp_avg|velocity/net.0.weight`: the
coordinator and the sites may list the same parameters in different orders. Under FSDP2 a moment
lies in pieces like its parameter, and each process has its own. What an optimiser keeps of a
parameter as a plain number, as some count steps, is kept beside its groups' settings.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fedwan.config import InnerConfig
from fedwan.errors import CheckpointError, UserError
from fedwan.pieces import is_cut, is_plain, local, piece_like
from fedwan.state import State, network_of
from fedwan.workloads.optim import begin_moments, counted_beside

log = logging.getLogger(__name__)


class NamedOptimizers:
    """Optimisers by name, over named parameters.

    A `UserError` if they hold others, or one under two names, or keep what no checkpoint does,
    which is known once they have stepped.
    """

    def __init__(
        self, params: Mapping[str, Tensor], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> None:
        self.optimizers = optimizers
        self.params = params
        self._names: dict[Tensor, str] = {}
        again = {p: name for name, p in params.items() if self._names.setdefault(p, name) != name}
        if odd := [key for key in optimizers if "|" in key]:
            raise UserError(f"optimiser name {odd[0]!r} holds a '|'; choose another name")
        self.state()
        for param in again.keys() & {p for o in optimizers.values() for p in _held(o)}:
            raise UserError(
                f"{self._names[param]!r} and {again[param]!r} are one parameter, which would be "
                "merged twice; give one network that holds both, such as nn.ModuleDict"
            )

    @classmethod
    def of(
        cls, networks: Mapping[str, nn.Module], optimizers: Mapping[str, torch.optim.Optimizer]
    ) -> NamedOptimizers:
        """Over all parameters of networks."""
        named = ((key, net.named_parameters()) for key, net in networks.items())
        return cls({f"{key}/{n}": p for key, params in named for n, p in params}, optimizers)

    def held(self) -> set[str]:
        """Names of the parameters that some optimiser steps."""
        return {self._names[p] for o in self.optimizers.values() for p in _held(o)}

    def of_network(self, network: str) -> list[str]:
        """Names of the optimisers that step some of a network's parameters."""
        return [
            name
            for name, optimizer in self.optimizers.items()
            if any(network_of(self._names[param]) == network for param in _held(optimizer))
        ]

    def state(self) -> State:
        """All moments by name, sharing memory; a `UserError` if one is no dense tensor."""
        flat: State = {}
        for key, optimizer in self.optimizers.items():
            self._check(key, optimizer)
            for param, fields in optimizer.state.items():
                odd = [] if isinstance(param, Tensor) else [param]
                for field, value in fields.items() if param in self._names else ():
                    if isinstance(value, Tensor) and is_plain(value):
                        flat[f"{key}:{field}|{self._names[param]}"] = value
                    elif not _is_kept_beside(value):
                        odd.append(field)
                if odd:
                    raise UserError(
                        f"optimizers[{key!r}] keeps {odd[0]!r}, which no checkpoint of a site "
                        "keeps; use an optimiser whose state is made of dense tensors and numbers "
                        "of its parameters"
                    )
        return flat

    def _check(self, key: str, optimizer: torch.optim.Optimizer) -> None:
        if hasattr(optimizer, "consolidate_state_dict"):
            raise UserError(
                f"optimizers[{key!r}] is a {type(optimizer).__name__}, which keeps moments in "
                "another optimiser of each process, so that no checkpoint would have them; give "
                "that one itself over networks in DDP, or shard them by FSDP2 (fully_shard)"
            )
        for name, inner in vars(optimizer).items():
            if not isinstance(inner, torch.optim.Optimizer) or inner.state is optimizer.state:
                continue
            is_told = optimizer.state_dict().keys() - {"state", "param_groups"}
            if inner not in self.optimizers.values() and not is_told:
                raise UserError(
                    f"optimizers[{key!r}] is a {type(optimizer).__name__} around another "
                    "optimiser, whose moments no checkpoint would have; give that one, too: "
                    f"optimizers={{{key!r}: it, '{key}_inner': it.{name}}}"
                )
        for param in _held(optimizer):
            if param not in self._names:
                networks = ", ".join(dict.fromkeys(map(network_of, self.params)))
                raise UserError(
                    f"optimizers[{key!r}] holds a parameter of shape {tuple(param.shape)} that "
                    f"is in none of the networks {networks}; build it from their parameters(), "
                    "after they were wrapped or sharded, and before fedwan.join; a parameter of a "
                    "loss is to be in one of them, or in one more: nn.ParameterList([parameter])"
                )

    def load(self, flat: Mapping[str, Tensor], *, is_whole: bool = True) -> None:
        """Have these moments and no others; learning rates stay as they are."""
        self.forget()
        beside = {key: counted_beside(o) for key, o in self.optimizers.items()}
        owners = {self._names[p]: key for key, o in self.optimizers.items() for p in _held(o)}
        for name, value in flat.items():
            head, _, parameter = name.partition("|")
            key, _, field = head.rpartition(":")
            if is_whole:  # the coordinator's, by its own names: one for each network
                key = owners.get(parameter, key)
            if parameter not in self.params or key not in self.optimizers:
                raise CheckpointError(
                    f"optimiser state {name!r} is of no parameter of this model; resume with the "
                    "networks and optimisers that the run began with"
                )
            param = self.params[parameter]
            if field != "step":
                value = placed(value, param, is_whole)
            else:
                value = value.detach().to(param.device if param in beside[key] else None, copy=True)
            self.optimizers[key].state[param][field] = value

    def groups(self) -> dict[str, list[dict[str, Any]]]:
        """Settings of each optimiser's parameter groups, learning rates among them.

        At last, by parameter, the numbers that it keeps, and by no name what else it gives.
        """
        kept: dict[str, list[dict[str, Any]]] = {}
        for key, optimizer in self.optimizers.items():
            numbers = {
                self._names[param]: {f: v for f, v in state.items() if _is_kept_beside(v)}
                for param in _held(optimizer)
                if (state := optimizer.state.get(param))
            }
            given = optimizer.state_dict()
            if more := {k: v for k, v in given.items() if k not in ("state", "param_groups")}:
                numbers[""] = more
            groups = optimizer.param_groups
            settings = [{k: _number(v) for k, v in g.items() if k != "params"} for g in groups]
            kept[key] = [*settings, numbers]
        return kept

    def load_groups(self, groups: Mapping[str, list[dict[str, Any]]]) -> None:
        """Put back what `groups` gave; moments were loaded before."""
        for key, (*saved, numbers) in groups.items():
            optimizer = self.optimizers.get(key)
            if optimizer is None:
                raise CheckpointError(
                    f"the checkpoint has optimizers[{key!r}], and the script gives "
                    f"{', '.join(map(repr, self.optimizers))}; name them as before"
                )
            if len(saved) != len(optimizer.param_groups):
                raise CheckpointError(
                    f"optimizers[{key!r}] had {len(saved)} groups of parameters in the checkpoint "
                    f"and has {len(optimizer.param_groups)}; add groups before fedwan.join"
                )
            if more := numbers.pop("", {}):
                moments = dict(optimizer.state)  # torch rounds them to their parameters' dtype
                optimizer.load_state_dict(optimizer.state_dict() | more)
                optimizer.state.update(moments)
            for group, values in zip(optimizer.param_groups, saved, strict=True):
                _tell_rate(key, group, values)
                group.update(values)
            for name, values in numbers.items():
                optimizer.state[self.params[name]].update(values)

    def forget(self, parameters: Collection[str] | None = None) -> None:
        """Drop the moments of these parameters, or all, as if they had never stepped."""
        for optimizer in self.optimizers.values():
            for param in list(optimizer.state):
                if parameters is None or self._names[param] in parameters:
                    del optimizer.state[param]

    def begin(self, inner: Mapping[str, InnerConfig]) -> None:
        """Give the parameters of these networks moments of zero steps where they have none."""
        for optimizer in self.optimizers.values():
            for network, config in inner.items():
                mine = [p for p in _held(optimizer) if network_of(self._names[p]) == network]
                begin_moments(config, optimizer, [p for p in mine if p.requires_grad])


def _held(optimizer: torch.optim.Optimizer) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def _is_kept_beside(value: object) -> bool:
    return value is None or isinstance(value, int | float)


def _number(setting: Any) -> Any:
    """A setting of a group; a number of Python's own for numpy's."""
    return setting.item() if isinstance(setting, np.generic) else setting


def placed(value: Tensor, param: Tensor, is_whole: bool) -> Tensor:
    """A copy of a moment or a gradient on its parameter's device, laid out and cut as that is.

    A copy: optimisers and clipping write to it, and what it came from must not change.
    """
    if not is_cut(param) and value.shape == param.shape:
        # Fused optimisers go through memory, and not by indices.
        return torch.empty_like(param, dtype=value.dtype).copy_(value.detach())
    value = value.detach().to(param.device, copy=True)
    if not is_cut(param) or value.shape != (param.shape if is_whole else local(param).shape):
        return value
    from torch.distributed.tensor import DTensor

    assert isinstance(param, DTensor)
    piece = piece_like(value, param) if is_whole else value
    return DTensor.from_local(
        piece, param.device_mesh, param.placements, shape=param.shape, stride=param.stride()
    )


def _tell_rate(key: str, group: Mapping[str, Any], saved: Mapping[str, Any]) -> None:
    """Tell of another rate than the script's: who has lowered it there may wait in vain."""
    name = "initial_lr" if "initial_lr" in group.keys() & saved.keys() else "lr"
    own, kept = float(group.get(name, 0.0)), float(saved.get(name, 0.0))
    if own != kept:
        log.info(
            "optimizers[%r] goes on with %s %g, as saved; the script has %g", key, name, kept, own
        )
