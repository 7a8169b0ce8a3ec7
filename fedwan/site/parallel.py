"""Dense layers that several processes compute together: tensor parallel, by torch's own styles.

In a pair of layers the first is cut by its outputs ("columns"), the second by its inputs ("rows"),
so that what lies between them, an attention's heads or a perceptron's hidden values, is cut as
well, and only the second's sums travel (Shoeybi et al. 2019, 1909.08053, section 3), and on the way
back those of the gradients of the first's inputs. All other parameters are whole everywhere, and so
is each step's batch: who draws, draws the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatch

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

from fedwan.errors import FedwanError
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
        size: number of processes.

    Raises:
        FedwanError: from `cut`: a network does not say how, or has layers that cannot be cut so.
    """

    cuts_batch = False

    def __init__(self, device: torch.device, size: int) -> None:
        self._mesh = DeviceMesh(device.type, list(range(size)))

    def cut(self, name: str, network: nn.Module) -> list[Tensor]:
        """See `Cut`."""
        if not isinstance(network, DenseParallel):
            raise FedwanError(
                f"network {name!r} does not say how its dense layers are cut; give it "
                "`dense_cuts`, or set site.partition=weights"
            )
        for path, kind in network.dense_cuts.items():
            self._check(name, network, path, kind)
        styles = {path: _STYLES[kind]() for path, kind in network.dense_cuts.items()}
        parallelize_module(network, self._mesh, styles)
        return [param for param in network.parameters() if param.requires_grad]

    def _check(self, name: str, network: nn.Module, path: str, kind: DenseCut) -> None:
        """Refuse what torch would leave whole, or cut into unequal parts."""
        found = [layer for at, layer in network.named_modules() if fnmatch(at, path)]
        layers = [layer for layer in found if isinstance(layer, nn.Linear)]
        if not found or len(layers) < len(found):
            raise FedwanError(
                f"network {name!r} has no dense layers at {path!r} to be cut; mend its `dense_cuts`"
            )
        for layer in layers:
            num = layer.in_features if kind == "rows" else layer.out_features
            if num % self._mesh.size():
                raise FedwanError(
                    f"network {name!r} has {num} values at {path!r} to be cut among "
                    f"{self._mesh.size()} processes; make it a multiple, or set "
                    "site.partition=weights"
                )

    def rest(self) -> None:
        """See `Cut`: nothing is ever whole."""
