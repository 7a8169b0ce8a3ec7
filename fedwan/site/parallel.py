"""Dense layers that several processes compute together: tensor parallel, by torch's own styles.

In a pair of layers the first is cut by its outputs ("columns"), the second by its inputs ("rows"),
so that what lies between them, an attention's heads or a perceptron's hidden values, is cut as
well, and only the second's sums travel (Shoeybi et al. 2019, 1909.08053, section 3). All other
parameters are whole everywhere, and so is each step's batch: who draws, draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    ParallelStyle,
    RowwiseParallel,
    parallelize_module,
)

from fedwan.models.dense_cuts import DenseCut, DenseParallel

__all__ = ["TensorParallel"]

_STYLES: Mapping[DenseCut, Callable[[], ParallelStyle]] = {
    "columns": ColwiseParallel,
    "rows": RowwiseParallel,
    "gathered": lambda: ColwiseParallel(output_layouts=Replicate()),
}


class TensorParallel:
    """Implements `fedwan.site.pieces.Cut`.

    Args:
        device: of this process.
        size: number of processes, of which every number that a network cuts by is a multiple.
    """

    cuts_batch = False

    def __init__(self, device: torch.device, size: int) -> None:
        self._mesh = DeviceMesh(device.type, list(range(size)))

    def cut(self, name: str, network: nn.Module) -> list[Tensor]:
        """See `Cut`."""
        assert isinstance(network, DenseParallel), f"{name} does not say how it is cut"
        styles = {path: _STYLES[kind]() for path, kind in network.dense_cuts.items()}
        parallelize_module(network, self._mesh, styles)
        return list(network.parameters())

    def rest(self) -> None:
        """See `Cut`: nothing is ever whole."""
