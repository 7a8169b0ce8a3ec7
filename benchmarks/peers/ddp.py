"""PyTorch's DistributedDataParallel over gloo: gradients are averaged in every step.

As its documentation has it for CPUs and several nodes: `gloo`, a TCP rendezvous at rank 0, the
interface named by GLOO_SOCKET_IFNAME. Buckets are views of the gradients, networks have no buffers
to broadcast, and the graph is the same in every step, which spares DDP its search for unused
parameters. Options: `bucket_cap_mb`; `flows`, see `part.name_interface`.
"""

from __future__ import annotations

import copy
import dataclasses
import os
import sys
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.stopwatch import STOPWATCH
from benchmarks.peers.part import (
    Curve,
    Part,
    Spec,
    enter,
    measure_local_step,
    name_interface,
    open_part,
    save_site,
)
from fedwan.state import hash_state

TIMEOUT = timedelta(seconds=600)


class Both(nn.Module):
    """Several networks as one module, as DDP wants them."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks)

    def forward(self, seconds_per_value: float) -> Tensor:
        return torch.stack([n(seconds_per_value) for n in self.networks.values()]).sum()


def wrap(module: nn.Module, spec: Spec) -> DistributedDataParallel:
    return DistributedDataParallel(
        module,
        bucket_cap_mb=spec.options.get("bucket_cap_mb", 25),
        gradient_as_bucket_view=True,
        forward_sync_buffers=False,
        static_graph=True,
    )


def timed_step(part: Part, spec: Spec) -> Callable[[], None]:
    timed = part.workload.inner
    both = wrap(Both(dict(timed.networks)), spec)

    def step() -> None:
        for optimizer in timed.optimizers.values():
            optimizer.zero_grad()
        began = STOPWATCH.now()
        timed.backward(both)
        for optimizer in timed.optimizers.values():
            optimizer.step()
        STOPWATCH.count(began, 0.0)

    return step


def flow_step(part: Part, spec: Spec, site: int) -> Callable[[], None]:
    """A step of the flow: fedwan's own, on a network that reduces its gradients meanwhile."""
    STOPWATCH.nominal_s = measure_local_step(spec, site)
    flow = copy.copy(part.workload.inner)
    flow.networks = {name: wrap(network, spec) for name, network in flow.networks.items()}
    return dataclasses.replace(part, workload=STOPWATCH.watch(flow)).step


def train(spec: Spec, site: int, folder: Path) -> None:
    name_interface(spec, site)
    part = open_part(spec, site)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{spec.hosts[0]}:{spec.ports[0]}",
        rank=site,
        world_size=spec.sites,
        timeout=TIMEOUT,
    )
    curve = Curve(part, spec) if site == 0 else None
    step = timed_step(part, spec) if spec.workload == "timed" else flow_step(part, spec, site)
    weights = part.state
    dist.barrier()
    for number in range(1, spec.num_steps + 1):
        step()
        if curve is not None:
            curve.update(number, weights)
    sha256 = hash_state(weights)
    dist.barrier()
    dist.destroy_process_group()
    save_site(folder, site, sha256, curve)


if __name__ == "__main__":
    spec, folder, site = enter()
    train(spec, int(site), folder)
    # Everything is written; gloo's threads can hang the interpreter's own way out.
    sys.stdout.flush()
    os._exit(0)
