"""What a training script brings to a site, and what it is told where it does not fit."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.errors import UserError
from fedwan.site.checkpoint import Stateful
from fedwan.workloads.base import NetworkKind

NOT_JOINED = "the loop is over no joined site; write `with fedwan.join(...) as site:` around it"
LEFT_EARLY = (
    "the script left its loop at step {0.step} of {0.num_steps}, before the run was over; iterate "
    "over `site` to its end"
)
DATA_ENDED = (
    "the script's data ended at step {0.step} of {0.num_steps}; take a loader that begins anew, as "
    "fedwan.data.Loader does"
)
ONCE = (
    "a script takes part in its run once, and this one has already; put all networks and phases "
    "into one fedwan.join(...) and one `with`"
)
PAST_END = (
    "a step was begun at step {0.step} of {0.num_steps}, after the end of the run; leave the loop "
    "once site.is_done"
)

Evaluate = Callable[[int], Mapping[str, Any]]
"""Gets a seed; figures of the weights at hand, JSON-ready. Under `moments` and `real`, tensors:
see `fedwan.metrics.distances`, and real samples that may be shown."""
Sample = Callable[[int, int], Tensor]
"""Gets a number and a seed; samples of the weights at hand that may be shown, (num, …)."""


@dataclass(frozen=True)
class Script:
    """What a training script brings."""

    networks: Mapping[str, nn.Module]
    optimizers: Mapping[str, torch.optim.Optimizer]
    kinds: Mapping[str, NetworkKind]
    """By network; of those that are trained."""
    state: Mapping[str, Stateful]
    num_steps: int = 0
    """Of the run; 0 leaves it to the configuration."""
    evaluate: Evaluate | None = None
    sample: Sample | None = None


def scalars(losses: Mapping[str, Tensor | float]) -> dict[str, Tensor]:
    """Losses as tensors of one value, (); a `UserError` of what is none."""
    found = {}
    for name, value in losses.items():
        try:
            found[name] = tensor = torch.as_tensor(value).detach().reshape(())
            if tensor.is_complex():
                raise TypeError("complex")
        except (TypeError, ValueError, RuntimeError):
            raise UserError(
                f"site.log({name}={str(value)[:40]!r}) is no number; give one, such as loss.mean()"
            ) from None
    return found
