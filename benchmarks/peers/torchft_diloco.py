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

Options: `bucketize`; `flows`, see `part.name_interface`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torch.distributed import TCPStore
from torchft import Manager, ProcessGroupGloo
from torchft.coordination import LighthouseServer
from torchft.local_sgd import DiLoCo

from benchmarks.harness.stopwatch import STOPWATCH
from benchmarks.peers.part import Curve, Part, Spec, enter, name_interface, open_part, save_site
from fedwan.errors import FedwanError
from fedwan.state import State, hash_state

TIMEOUT = timedelta(seconds=600)
QUORUM_TICK_MS = 10


def outer_optimizer(part: Part, model: nn.Module) -> torch.optim.Optimizer:
    """Nesterov, with the learning rate and momentum that fedwan's `diloco` takes here."""
    outer = next(iter(part.config.outer.values()))
    return torch.optim.SGD(model.parameters(), lr=outer.lr, momentum=outer.momentum, nesterov=True)


@contextmanager
def managed(spec: Spec, site: int, part: Part) -> Iterator[Manager]:
    """This site's manager, and at rank 0 the lighthouse, until the training is over."""
    host, ports = spec.hosts[site], spec.ports
    lighthouse = None
    if site == 0:
        lighthouse = LighthouseServer(
            bind=f"[::]:{ports[0]}",
            min_replicas=spec.sites,
            quorum_tick_ms=QUORUM_TICK_MS,
            join_timeout_ms=60_000,
        )
    store = TCPStore(host, ports[1 + site], is_master=True, wait_for_workers=False)
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
        lighthouse_addr=f"http://{spec.hosts[0]}:{ports[0]}",
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


def train(spec: Spec, site: int, folder: Path) -> None:
    name_interface(spec, site)
    part = open_part(spec, site)
    model = nn.ModuleList(part.workload.networks.values())
    curve = Curve(part, spec) if site == 0 else None
    with (
        managed(spec, site, part) as manager,
        DiLoCo(
            manager,
            [model],
            list(part.workload.optimizers.values())[-1],
            [outer_optimizer(part, model)],
            sync_every=spec.h,
            use_bucketization=spec.options.get("bucketize", True),
        ) as diloco,
    ):
        manager.start_quorum()  # everybody is here: a first exchange would have to wait for it
        commits = 0
        for number in range(1, spec.num_steps + 1):
            part.step()
            if manager.current_step() > commits:
                commits += 1
                if curve is not None:
                    curve.update(number, global_weights(part, diloco))
        expected = spec.num_steps // spec.h
        if commits != expected:
            raise FedwanError(f"torchft committed {commits} of {expected} exchanges; see its log")
        STOPWATCH.discount({step for step in range(spec.num_steps) if (step + 1) % spec.h == 0})
        save_site(folder, site, hash_state(global_weights(part, diloco)), curve)


if __name__ == "__main__":
    logging.basicConfig(level=logging.INFO)
    spec, folder, site = enter()
    train(spec, int(site), folder)
