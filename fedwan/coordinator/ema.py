"""The moving average of the global weights, with its half-life in samples.

β = 0.5 ^ (samples of the round / half-life), as in EDM2 (2312.02696): the average then does not
depend on how many steps, sites or samples make a round.
"""

from __future__ import annotations

from collections.abc import Mapping

from fedwan.state import Layout, Role, State, network_of

__all__ = ["update_ema"]


def update_ema(
    ema: State,
    state: State,
    layout: Layout,
    samples: int,
    half_life: float,
    half_lives: Mapping[str, float] | None = None,
) -> None:
    """Move `ema` towards `state`, in place. Counters are copied.

    Args:
        ema: the average; same names as `state`.
        state: the new global state.
        layout: for the tensors' roles.
        samples: over all sites since the last call.
        half_life: samples after which an old state counts half; above 0.
        half_lives: the same by network, of those that have one of their own.
    """
    own = half_lives or {}
    for name, value in state.items():
        weight = 1.0 - 0.5 ** (samples / own.get(network_of(name), half_life))
        if layout[name].role is Role.COUNTER:
            ema[name].copy_(value)
        else:
            ema[name].lerp_(value, weight)
