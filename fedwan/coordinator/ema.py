"""The moving average of the global weights, with its half-life in samples.

β = 0.5 ^ (samples of the round / half-life), as in EDM2 (2312.02696): the average then does not
depend on how many steps, sites or samples make a round.
"""

from __future__ import annotations

from fedwan.state import Layout, Role, State

__all__ = ["update_ema"]


def update_ema(
    ema: State,
    state: State,
    layout: Layout,
    samples: int,
    half_life: float,
) -> None:
    """Move `ema` towards `state`, in place. Counters are copied.

    Args:
        ema: the average; same names as `state`.
        state: the new global state.
        layout: for the tensors' roles.
        samples: over all sites since the last call.
        half_life: samples after which an old state counts half; above 0.
    """
    weight = 1.0 - 0.5 ** (samples / half_life)
    for name, value in state.items():
        if layout[name].role is Role.COUNTER:
            ema[name].copy_(value)
        else:
            ema[name].lerp_(value, weight)
