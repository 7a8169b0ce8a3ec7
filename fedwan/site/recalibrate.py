"""Running statistics of batch norm, taken anew for weights that were merged or averaged.

They are averages over weights that training passed through, merged over sites and averaged over
rounds again; the weights that are measured never saw them. As after stochastic weight averaging
(Izmailov et al. 2018, 1803.05407; `torch.optim.swa_utils.update_bn`) each layer averages the
statistics of some batches, all with equal weight, under the weights at hand.

A workload's own step does the forward passes, so that every network sees what it sees in training;
`reduce` takes the gradients away, so that no optimiser steps.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch, Keeping, Workload

__all__ = ["normalised_layers", "recalibrate"]


def normalised_layers(networks: Mapping[str, nn.Module]) -> list[_BatchNorm]:
    """The layers of these networks that keep running statistics."""
    modules = (module for network in networks.values() for module in network.modules())
    return [m for m in modules if isinstance(m, _BatchNorm) and m.track_running_stats]


def recalibrate(workload: Workload, batches: Iterable[Batch], rng: NamedGenerators) -> None:
    """Take the running statistics of the trained networks anew, in place.

    Parameters, optimisers, gradients and what the workload keeps stay as they are. Costs a training
    step per batch, and the memory of one. Networks without batch norm cost nothing.

    Args:
        workload: in any mode, which stays.
        batches: of training data, on the workload's device.
        rng: for the draws of the steps; of no training.
    """
    trained = {name: workload.networks[name] for name in workload.optimizers}
    layers = normalised_layers(trained)
    if not layers:
        return
    modes = [(m, m.training) for network in trained.values() for m in network.modules()]
    params = [param for network in trained.values() for param in network.parameters()]
    gradients = [param.grad for param in params]
    kept = workload.kept if isinstance(workload, Keeping) else {}
    before = {name: value.clone() for name, value in kept.items()}  # scalars, as a loss scale
    momenta = [layer.momentum for layer in layers]

    def erase(networks: Sequence[str]) -> None:
        for param in params:
            param.grad = None  # whose optimiser then leaves it alone

    try:
        for network in trained.values():
            network.train()
        for layer in layers:
            layer.reset_running_stats()
            layer.momentum = None  # an average of all batches alike
        with torch.enable_grad():
            for batch in batches:
                workload.step(batch, rng, erase)
    finally:
        for layer, momentum in zip(layers, momenta, strict=True):
            layer.momentum = momentum
        for module, mode in modes:
            module.training = mode
        for param, grad in zip(params, gradients, strict=True):
            param.grad = grad
        for name, value in before.items():
            kept[name].copy_(value)
