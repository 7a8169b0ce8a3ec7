"""A run at the coordinator, from a resolved configuration to `summary.json`."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from pathlib import Path

import torch

from fedwan.config import Config, host_and_port, to_json
from fedwan.coordinator import control, members
from fedwan.coordinator.run import CoordinatedRun
from fedwan.errors import FedwanError, RunStopped
from fedwan.link.base import Ticket
from fedwan.link.client import HEARTBEAT_S
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.output.outputs import Outputs
from fedwan.state import hash_state

SILENT_HEARTBEATS = 5
MOST_THREADS = 4
"""For merging and the outer step: what they compute at a time, `CPU_SPAN` values, torch shares out
among so many. Others would spin, and take the processors from the sites of a local run."""

Announce = Callable[[Ticket, Callable[[str, str], None]], AbstractContextManager[object]]
"""Hands sites a ticket while it is entered; the callback takes a site and how it has failed."""


def run_coordinator(
    config: Config,
    run_id: str,
    identity: Path,
    resume: bool,
    announce: Announce,
    goes_back: bool = False,
    port: int = 0,
) -> None:
    """Serve the data plane, run the round loop, and write the run's outputs to `config.out`.

    `resume`, `goes_back`, `port`: as in `fedwan.flower.status.Start`.

    Raises:
        FedwanError: see the tree; outputs are written as far as they go.
    """
    tune_allocator()
    torch.set_num_threads(min(torch.get_num_threads(), MOST_THREADS))
    out = Path(config.out)
    run = CoordinatedRun(
        config,
        run_id,
        out,
        lambda row: outputs.record(row),
        lambda *picture: outputs.samples(*picture),
        silence_s=SILENT_HEARTBEATS * HEARTBEAT_S,
    )
    resumed, complaint = run.resume(goes_back=goes_back) if resume else (None, "")
    own = Identity.load(identity, "coordinator")
    with Outputs(config, out, resumed, own.sign) as outputs:
        outputs.record(run.opening() | {"certificate": own.cert_pem.decode()})
        if complaint:
            run.hub.event("warning", None, complaint)
        if run.hub.masking:
            run.hub.masking.identity = own
        plane = DataPlane(run.hub, own, config, port)
        try:
            plane.start()
            address = f"{host_and_port(config.link.listen)[0]}:{plane.port}"
            run.hub.event("listening", None, f"data plane listens on {address}")
            ticket = Ticket(address, run_id, to_json(config), run.hub.start_id)
            with control.serving(out, partial(members.answer, run)), announce(ticket, run.hub.fail):
                model = run.train(outputs.agreed)
                outputs.finish(
                    run.totals,
                    run.elapsed_s(),
                    model.version,
                    model.num_weight_bytes(),
                    hash_state(model.state),
                )
        except FedwanError as error:
            run.hub.event("stopped", None, run.cause or str(error))
            if run.cause:
                raise RunStopped(run.cause) from error
            raise
        finally:
            plane.stop()
