"""Muon for the matrices of a network, AdamW for everything else, as one optimiser.

Muon (Jordan et al. 2024) steps a matrix by its momentum with all singular values made about alike,
so that an update has full rank. What has no two dimensions (gains, biases, convolutions) is stepped
by AdamW. Both follow one learning rate and one decay: a matrix's step is scaled to the size that
AdamW's has (Liu et al. 2025, 2502.16982), so that a rate found for AdamW is one to begin with.

`torch.optim.Muon` takes the products of matrices in bf16 everywhere, which a processor without
instructions for it does up to 50 times slower than in fp32; apart from that, steps are the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

__all__ = ["Muon", "is_matrix", "orthogonalised"]

QUINTIC = (3.4445, -4.7750, 2.0315)
"""Of x, x^3 and x^5: drives singular values from (0, 1] to about 0.7 … 1.2, small ones fast."""
NUM_ITERATIONS = 5
ADAMW_SIZE = 0.2
"""Root mean square of an AdamW update in units of its rate."""


class Muon(torch.optim.Optimizer):
    """One group and one state, whoever steps a parameter.

    A matrix has one moment, `momentum_buffer`, where AdamW keeps two: a network of matrices takes
    12 bytes a value in fp32 for 16. A step costs 15 products of matrices for each.
    """

    def __init__(
        self, params: Sequence[Tensor], lr: float, betas: tuple[float, float], weight_decay: float
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        """Step every parameter that has a gradient; without closure."""
        assert closure is None
        (group,) = self.param_groups
        settings = {name: group[name] for name in ("lr", "betas", "weight_decay")}
        others = []
        for param in group["params"]:
            if not is_matrix(param.ndim):
                others.append(param)
            elif param.grad is not None:
                self._step_matrix(param, param.grad, **settings)
        if others:
            adamw = torch.optim.AdamW(others, foreach=False, fused=False, **settings)
            adamw.state = self.state
            adamw.step()

    def _step_matrix(
        self,
        matrix: Tensor,
        gradient: Tensor,
        lr: float,
        betas: tuple[float, float],
        weight_decay: float,
    ) -> None:
        state, momentum = self.state[matrix], betas[0]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        buffer = state["momentum_buffer"].lerp_(gradient, 1 - momentum)
        update = orthogonalised(gradient.lerp(buffer, momentum))  # Nesterov's
        matrix.mul_(1 - lr * weight_decay)
        matrix.add_(update.to(matrix.dtype), alpha=-lr * ADAMW_SIZE * max(matrix.shape) ** 0.5)


def is_matrix(ndim: int) -> bool:
    """Whether a parameter of so many dimensions is stepped by Muon.

    Embeddings, one row for each class, are matrices, too: nothing but its shape tells a parameter
    apart at the coordinator.
    """
    return ndim == 2


def orthogonalised(matrix: Tensor) -> Tensor:
    """A matrix with the same singular vectors, all of its singular values in about 0.7 … 1.2.

    Five Newton-Schulz iterations; values below a thousandth of the norm stay smaller. On a CPU they
    are taken in fp32, elsewhere in bf16, the dtype of what is returned.
    """
    is_tall = matrix.shape[0] > matrix.shape[1]
    dtype = torch.float32 if matrix.device.type == "cpu" else torch.bfloat16
    wide = (matrix.T if is_tall else matrix).to(dtype)
    wide = wide / wide.norm().clamp(min=1e-7)
    first, third, fifth = QUINTIC
    for _ in range(NUM_ITERATIONS):
        gram = wide @ wide.T
        wide = torch.addmm(
            wide, torch.addmm(gram, gram, gram, beta=third, alpha=fifth), wide, beta=first
        )
    return wide.T if is_tall else wide
