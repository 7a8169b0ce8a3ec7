"""A run at the coordinator, from a resolved configuration to `summary.json`."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from fedwan.config import Config, host_and_port, to_json
from fedwan.coordinator import control, members
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.servicer import Servicer
from fedwan.errors import FedwanError
from fedwan.link.base import Ticket
from fedwan.link.client import HEARTBEAT_S
from fedwan.link.rpc import threads_per_site
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.output.outputs import Outputs
from fedwan.state import hash_state

log = logging.getLogger(__name__)

SILENT_HEARTBEATS = 5
SPARE_THREADS = 8

Announce = Callable[[Ticket], AbstractContextManager[object]]


def run_coordinator(
    config: Config, run_id: str, identity: Path, resume: bool, announce: Announce
) -> None:
    """Serve the data plane, run the round loop, and write the run's outputs to `config.out`.

    Raises:
        FedwanError: see the tree; outputs are written as far as they go.
    """
    tune_allocator()
    torch.set_num_threads(config.threads or torch.get_num_threads())  # before the data plane's
    out = Path(config.out)
    run = CoordinatedRun(
        config,
        run_id,
        out,
        lambda row: outputs.record(row),
        lambda *picture: outputs.samples(*picture),
        silence_s=SILENT_HEARTBEATS * HEARTBEAT_S,
    )
    resumed_version, complaint = run.resume() if resume else (None, "")
    with Outputs(config, out, resumed_version) as outputs:
        outputs.record(run.opening())
        if complaint:
            outputs.event("warning", None, complaint)
        plane = _data_plane(config, run.hub, Identity.load(identity, "coordinator"))
        try:
            plane.start()
            address = f"{host_and_port(config.link.listen)[0]}:{plane.port}"
            outputs.event("listening", None, f"data plane listens on {address}")
            ticket = Ticket(address, run_id, to_json(config))
            answer = partial(members.answer, run)
            with control.serving(out, answer), announce(ticket):
                _train(run, outputs)
        finally:
            plane.stop()


def _train(run: CoordinatedRun, outputs: Outputs) -> None:
    try:
        model = run.train(outputs.agreed)
    except FedwanError as error:
        outputs.event("stopped", None, str(error))
        raise
    outputs.finish(
        run.totals,
        run.elapsed_s(),
        model.version,
        model.num_weight_bytes(),
        hash_state(model.state),
    )


def _data_plane(config: Config, servicer: Servicer, identity: Identity) -> DataPlane:
    link = config.link
    threads = threads_per_site(0, config.stream.fragments)
    return DataPlane(
        servicer,
        identity,
        *host_and_port(link.listen),
        config.sites * threads + SPARE_THREADS,
        HEARTBEAT_S,
        link.congestion,
        link.pace_mbit,
        config.sites,
    )
