"""PyTorch's DistributedDataParallel over gloo: gradients are averaged in every step.

As its documentation has it for CPUs and several nodes: `gloo`, a TCP rendezvous at rank 0, the
interface named by GLOO_SOCKET_IFNAME. Buckets are views of the gradients, networks have no buffers
to broadcast, and the graph is the same in every step, which spares DDP its search for unused
parameters. Options: `flows`, see `part.run_rank`; `fp16`, its hook that halves the bytes; `snoo`,
`every`, `lr` and `momentum` of an outer step over synchronous ones (SNOO, 2510.15830), which all
ranks take alike and without a byte.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from functools import partial
from itertools import count

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel

from benchmarks.harness.stopwatch import STOPWATCH
from benchmarks.peers.part import PORTS, Part, Peer, Spec, run_rank
from fedwan.state import State, clone


class Both(nn.Module):
    """Several networks as one module, as DDP wants them."""

    def __init__(self, networks: dict[str, nn.Module]) -> None:
        super().__init__()
        self.networks = nn.ModuleDict(networks)

    def forward(self, seconds_per_value: float) -> Tensor:
        return torch.stack([n(seconds_per_value) for n in self.networks.values()]).sum()


wrap = partial(
    DistributedDataParallel,
    gradient_as_bucket_view=True,
    forward_sync_buffers=False,
    static_graph=True,
)


def timed_step(part: Part) -> Callable[[], None]:
    timed = part.workload.inner
    both = wrap(Both(dict(timed.networks)))

    def step() -> None:
        for optimizer in timed.optimizers.values():
            optimizer.zero_grad()
        began = time.monotonic()
        timed.backward(both)
        for optimizer in timed.optimizers.values():
            optimizer.step()
        STOPWATCH.count(began, 0.0)

    return step


def flow_step(spec: Spec, part: Part) -> Callable[[], None]:
    """A step of the flow: fedwan's own, on a network that reduces its gradients meanwhile."""
    flow = part.workload.inner  # itself: what it was given to compute its loss is bound to it
    flow.networks = {name: wrap(network) for name, network in flow.networks.items()}
    for network in flow.networks.values() if spec.options.get("fp16") else ():
        network.register_comm_hook(None, fp16_compress_hook)
    return part.step


def with_outer_steps(
    step: Callable[[], None], weights: State, every: int, lr: float, momentum: float
) -> Callable[[], None]:
    """A step, and after each `every` of them an outer one, by what these moved the weights."""
    slow = clone(weights)
    outer = torch.optim.SGD(slow.values(), lr=lr, momentum=momentum, nesterov=True)
    steps = count(1)

    def both() -> None:
        step()
        if next(steps) % every:
            return
        for name, value in slow.items():
            value.grad = value - weights[name]
        outer.step()
        for name, value in slow.items():
            weights[name].copy_(value)

    return both


@contextmanager
def join(spec: Spec, site: int, part: Part) -> Iterator[Peer]:
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{spec.hosts[0]}:{PORTS[0]}",
        rank=site,
        world_size=spec.sites,
        timeout=timedelta(seconds=600),
    )
    step = timed_step(part) if spec.workload == "timed" else flow_step(spec, part)
    if snoo := spec.options.get("snoo"):
        step = with_outer_steps(step, part.state, **snoo)
    dist.barrier()
    yield Peer(lambda: step() is None, lambda: part.state)
    dist.barrier()
    dist.destroy_process_group()


if __name__ == "__main__":
    run_rank(join)
