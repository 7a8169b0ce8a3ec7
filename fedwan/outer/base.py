"""Outer transforms as (init, update) pairs, in the manner of optax.

`state = init(params)`; `update, state = update(delta, state, params)`; the new global state is
`params + update`. Inputs are never mutated. State is a flat dict of tensors, so that a checkpoint
is one safetensors file; a tensor's state is named `field:tensor name`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

from fedwan.state import State, add_prefix, select_prefix

Init = Callable[[State], State]
"""Makes a transform's first state, a flat dict of tensors, from the global parameters."""


class Update(Protocol):
    """Turns a merged delta into an update, and the state into the next one."""

    def __call__(
        self, delta: State, state: State, params: State | None = None
    ) -> tuple[State, State]:
        """The update (to be added to the parameters) and the next state."""
        ...


class Transform(NamedTuple):
    """An outer optimiser, or one link in a chain of them."""

    init: Init
    update: Update
    per_tensor: bool = True
    """Whether each tensor's update depends on that tensor alone. The engine then passes one tensor
    at a time, so that temporaries are as large as a tensor, not as the model."""


def chain(*transforms: Transform) -> Transform:
    """Apply transforms in order, each to what the one before it returned.

    The last of them decides the sign: `sgd` and `nesterov` turn a delta (global - local) into an
    update to be added.
    """

    def init(params: State) -> State:
        state: State = {}
        for index, transform in enumerate(transforms):
            state |= add_prefix(str(index), transform.init(params))
        return state

    def update(delta: State, state: State, params: State | None = None) -> tuple[State, State]:
        new_state: State = {}
        for index, transform in enumerate(transforms):
            delta, part = transform.update(delta, select_prefix(str(index), state), params)
            new_state |= add_prefix(str(index), part)
        return delta, new_state

    return Transform(init, update, all(t.per_tensor for t in transforms))
