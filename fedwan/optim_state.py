"""A torch optimiser's state as a flat dict of tensors, for safetensors checkpoints.

Fields are kept under their parameter's name, not its position: the coordinator and the sites may
list the same parameters in different orders.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from fedwan.errors import CheckpointError
from fedwan.state import State

__all__ = ["load_optimizer", "optimizer_state", "parameter_names"]


def parameter_names(optimizer: torch.optim.Optimizer, tensors: State) -> list[str]:
    """Names of the optimiser's parameters in its own order, found by memory address.

    Raises:
        ValueError: the optimiser holds a parameter that is not among the tensors.
    """
    by_address = {value.data_ptr(): name for name, value in tensors.items() if value.numel()}
    # All tensors without elements lie at address 0: they are told apart by their order alone.
    empty = iter([name for name, value in tensors.items() if not value.numel()])
    names: list[str] = []
    for parameter in (p for group in optimizer.param_groups for p in group["params"]):
        name = by_address.get(parameter.data_ptr()) if parameter.numel() else next(empty, None)
        if name is None:
            raise ValueError(
                f"an optimiser holds a parameter of shape {tuple(parameter.shape)} that its "
                "network does not have; build it from network.parameters()"
            )
        names.append(name)
    return names


def optimizer_state(optimizer: torch.optim.Optimizer, names: Sequence[str]) -> State:
    """The optimiser's tensors as `field|parameter name`; no copies.

    Raises:
        ValueError: a field is neither a tensor nor None, so it would be lost.
    """
    flat: State = {}
    for index, fields in optimizer.state_dict()["state"].items():
        for field, value in fields.items():
            if isinstance(value, Tensor):
                flat[f"{field}|{names[index]}"] = value
            elif value is not None:
                raise ValueError(
                    f"optimiser field {field!r} is a {type(value).__name__}, not a tensor; "
                    "use an optimiser whose state is made of tensors"
                )
    return flat


def load_optimizer(optimizer: torch.optim.Optimizer, names: Sequence[str], flat: State) -> None:
    """Put back what `optimizer_state` gave, in its dtypes; learning rates stay as they are.

    Raises:
        CheckpointError: the state names a parameter that the optimiser does not have.
    """
    positions = {name: index for index, name in enumerate(names)}
    state: dict[int, dict[str, Any]] = defaultdict(dict)
    for key, value in flat.items():
        field, _, name = key.partition("|")
        if name not in positions:
            raise CheckpointError(
                f"optimiser state is of parameter {name!r}, which this model does not have; "
                "resume with the model and optimiser that the run began with"
            )
        state[positions[name]][field] = value.clone()
    content = optimizer.state_dict()
    content["state"] = dict(state)
    optimizer.load_state_dict(content)
    # Which has cast them to their parameter's.
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for index, fields in state.items():
        for field, value in fields.items():
            if optimizer.state[params[index]][field].dtype != value.dtype:
                optimizer.state[params[index]][field] = value.to(params[index].device)
