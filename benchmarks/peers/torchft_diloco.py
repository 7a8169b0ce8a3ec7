"""torchft's DiLoCo over gloo: local steps, and an all-reduce of what changed.

As its README and its `train_diloco.py` have it: a lighthouse (here in rank 0's process), a replica
group of one process per site with a store and a manager of its own, DiLoCo around the inner steps.
Initial weights are the same everywhere, so `init_sync` is off, as its documentation advises.

What its version 0.2.0 needs to be right, and to be at its best on a slow link:
- a host name that the others can reach, and timeouts longer than any exchange;
- one bucket, or none: with several buckets in a fragment it leaves tensors unmerged, and says
  nothing. Every run therefore ends with a comparison of all sites' weights;
- a lighthouse that looks every 10 ms instead of every 100;
- `should_quantize` is left alone: it does nothing on gloo.

Its step counter hangs on one inner optimiser: the one that steps last.

Options: `bucketize`; `flows`, see `part.run_rank`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.peers.part import PORTS, Part, Peer, Spec, run_rank
from fedwan.state import State

TIMEOUT = timedelta(seconds=600)
QUORUM_TICK_MS = 10


def outer_optimizer(part: Part, model: nn.Module) -> torch.optim.Optimizer:
    """Nesterov, with the learning rate and momentum that fedwan's `diloco` takes here."""
    outer = next(iter(part.config.outer.values()))
    return torch.optim.SGD(model.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)


@contextmanager
def managed(spec: Spec, site: int) -> Iterator[Manager]:
    """This site's manager, and at rank 0 the lighthouse, until the training is over."""
    host = spec.hosts[site]
    lighthouse = None
    if site == 0:
        lighthouse = LighthouseServer(
            bind=f"[::]:{PORTS[0]}",
            min_replicas=spec.sites,
            quorum_tick_ms=QUORUM_TICK_MS,
            join_timeout_ms=60_000,
        )
    store = TCPStore(host, PORTS[1 + site], is_master=True, wait_for_workers=False)
    manager = Manager(
        pg=ProcessGroupGloo(timeout=TIMEOUT),
        load_state_dict=lambda state: None,
        state_dict=lambda: {"steps": 0},
        min_replica_size=spec.sites,
        use_async_quorum=False,
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        connect_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        store_addr=host,
        store_port=store.port,
        lighthouse_addr=f"http://{spec.hosts[0]}:{PORTS[0]}",
        replica_id=f"site_{site}",
        hostname=host,
        init_sync=False,
    )
    try:
        yield manager
    finally:
        manager.shutdown(wait=False)
        if lighthouse is not None:
            lighthouse.shutdown()


def global_weights(part: Part, diloco: DiLoCo) -> State:
    """What all sites agree on: the weights after the last exchange."""
    by_address = {value.data_ptr(): name for name, value in part.state.items()}
    (fragment,) = diloco._fragments
    return {
        by_address[parameter.data_ptr()]: fragment.original_parameters[name]
        for name, parameter in fragment._model_fragment.named_parameters()
    }


@contextmanager
def join(spec: Spec, site: int, part: Part) -> Iterator[Peer]:
    model = nn.ModuleList(part.workload.networks.values())
    optimizer = list(part.workload.optimizers.values())[-1]
    outer = [outer_optimizer(part, model)]
    with (
        managed(spec, site) as manager,
        DiLoCo(
            manager,
            [model],
            optimizer,
            outer,
            sync_every=spec.h,
            use_bucketization=spec.options["bucketize"],
        ) as diloco,
    ):
        manager.start_quorum()  # everybody is here: a first exchange would have to wait for it

        def step() -> bool:
            commits = manager.current_step()
            part.step()
            return manager.current_step() > commits

        yield Peer(step, lambda: global_weights(part, diloco))


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    run_rank(join)
