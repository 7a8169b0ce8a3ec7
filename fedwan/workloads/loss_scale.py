"""One scale for the losses of a step whose gradients are made in half precision.

Small gradients vanish in fp16, whose least number is 6e-8, so losses are multiplied by a scale and
gradients divided by it (Micikevicius et al. 2018, 1710.03740, section 3.2). It is as large as
gradients allow: half as large after one that is not finite, twice as large after many that are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from fedwan.errors import FedwanError

__all__ = ["LossScale"]

_FIRST = 2.0**16
_LEAST = 2.0**-10
_GROWS_AFTER = 2000


class LossScale:
    """Scales losses, and judges the gradients that come of them.

    Attributes:
        state: `scale` (float32, ()) and `streak` (int64, ()), how many updates in a row were
            good; on the CPU. Who puts a checkpoint back writes into them.
    """

    def __init__(self) -> None:
        self.state = {"scale": torch.tensor(_FIRST), "streak": torch.tensor(0)}

    @property
    def factor(self) -> float:
        """That losses are to be multiplied by."""
        return float(self.state["scale"])

    def unscale(self, gradients: Sequence[Tensor]) -> bool:
        """Divide complete gradients by the scale, in place; False if one is not finite.

        Waits for a GPU.
        """
        for gradient in gradients:
            gradient.div_(self.factor)
        # The largest magnitude of each; NaN stays NaN.
        peaks = [torch.linalg.vector_norm(g, float("inf")) for g in gradients if g.numel()]
        return not peaks or bool(torch.stack(peaks).isfinite().all())

    def update(self, is_finite: bool) -> None:
        """Adapt the scale once the gradients of all networks that step together were unscaled."""
        scale, streak = self.state["scale"], self.state["streak"]
        if is_finite:
            streak.add_(1)
            if int(streak) == _GROWS_AFTER:
                streak.zero_()
                scale.mul_(2)
            return
        streak.zero_()
        scale.div_(2)
        if self.factor < _LEAST:
            raise FedwanError(
                "gradients in fp16 are not finite at any loss scale: training diverged, or its "
                "values leave fp16's range; set site.precision=bf16-mixed, or lower the learning "
                "rates (inner.NETWORK.lr, outer.NETWORK.lr)"
            )
