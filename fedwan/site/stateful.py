"""What a script keeps beside networks and optimisers, as tensors of a checkpoint.

`state` of `fedwan.join` takes anything with torch's pair of methods, `state_dict` and
`load_state_dict`: loaders, schedulers, gradient scalers, generators of one's own. What they give is
written with `torch.save` and read back with `weights_only=True`: tensors and plain values.
"""

from __future__ import annotations

import io
import json
import pickle
import random
from typing import Any, Protocol

import numpy as np
import torch
from torch import Tensor

from fedwan.errors import CheckpointError, UserError
from fedwan.state import State


class Stateful(Protocol):
    """As torch names it (`torch.distributed.checkpoint.stateful`)."""

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from what `state_dict` gave."""
        ...


def pack(what: str, value: object) -> Tensor:
    """Tensors and plain values as bytes, uint8 (n,); a `UserError` for what is none, by `what`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(f"{what} cannot be kept in a checkpoint: {error}") from None
    foreign = torch.serialization.get_unsafe_globals_in_checkpoint(io.BytesIO(buffer.getvalue()))
    if foreign:
        raise UserError(
            f"{what}.state_dict() holds {', '.join(sorted(foreign))}, which a checkpoint does not "
            "keep; have it return tensors, numbers, text, lists and dicts alone"
        )
    return torch.frombuffer(bytearray(buffer.getvalue()), dtype=torch.uint8)


def unpack(what: str, packed: Tensor) -> Any:
    """The inverse of `pack`."""
    try:
        return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{what} in a checkpoint cannot be read: {error}") from None


def random_state() -> State:
    """The global generators of torch, Python and numpy, which scripts and dropout draw from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    others = {"python": random.getstate(), "numpy": (kind, np.asarray(keys).tolist(), *rest)}
    text = json.dumps(others).encode()  # 1,250 numbers, which torch.save takes 2 ms for
    return state | {"others": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load_random_state(state: State) -> None:
    """Put back what `random_state` gave; a GPU's part is left out where there is none."""
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    others = json.loads(state["others"].numpy().tobytes())
    version, internal, gauss = others["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
