"""A run at the coordinator, from a resolved configuration to `summary.json`."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import torch

from fedwan.app import load_strategy
from fedwan.config import Config, site_names, to_json
from fedwan.coordinator.desk import Desk
from fedwan.coordinator.intake import Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.plan import Plan
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.rounds import Rounds
from fedwan.coordinator.totals import Totals
from fedwan.data.splits import has_own_data
from fedwan.errors import FedwanError
from fedwan.link.client import CHUNK_BYTES, HEARTBEAT_S
from fedwan.link.server import DataPlane, threads_per_site
from fedwan.link.stripes import PACED_CHANNELS, START_CHANNELS
from fedwan.link.ticket import Ticket
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.output.outputs import Outputs
from fedwan.state import hash_state
from fedwan.strategy import Strategy

__all__ = ["run_coordinator"]

log = logging.getLogger(__name__)

SILENT_HEARTBEATS = 5
SPARE_THREADS = 8

Announce = Callable[[Ticket], AbstractContextManager[object]]


def run_coordinator(
    config: Config, run_id: str, identity: Path, resume: bool, announce: Announce
) -> None:
    """Serve the data plane, run the round loop, and write the run's outputs to `config.out`.

    Args:
        config: resolved.
        run_id: of the run; the same when it is resumed.
        identity: the coordinator's identity folder.
        resume: go on from the checkpoint in `config.out`.
        announce: called with the ticket once the data plane listens; keeps every site in
            possession of it for as long as the context is entered.

    Raises:
        FedwanError: see the tree; outputs are written as far as they go.
    """
    tune_allocator()
    if config.threads:
        torch.set_num_threads(config.threads)
    out = Path(config.out)
    strategy = load_strategy(config.strategy).build(config)
    plan = _plan(config, out)
    loaded = _load(plan, strategy, resume)
    resumed_version = loaded[0].version if loaded else None
    with Outputs(config, out, resumed_version) as outputs:
        desk = _desk(config, run_id, strategy, out, outputs.event)
        rounds = Rounds(plan, strategy, desk, outputs.record, outputs.samples)
        if loaded:
            rounds.resume(*loaded)
            outputs.event("resume", None, f"resumed at version {resumed_version}")
        plane = _data_plane(config, desk, Identity.load(identity, "coordinator"))
        try:
            plane.start()
            address = config.link.address or f"{config.link.host}:{plane.port}"
            outputs.event("listening", None, f"data plane listens on {address}")
            with announce(Ticket(address, run_id, to_json(config))):
                _train(rounds, outputs, config)
        finally:
            plane.stop()


def _train(rounds: Rounds, outputs: Any, config: Config) -> None:
    try:
        model = rounds.run()
    except FedwanError as error:
        outputs.event("stopped", None, str(error))
        raise
    outputs.finish(
        rounds.totals,
        rounds.elapsed_s(),
        model.version,
        model.num_weight_bytes(),
        hash_state(model.state),
    )


def _plan(config: Config, out: Path) -> Plan:
    batch = config.data.batch
    return Plan(
        site_names=tuple(site_names(config)),
        num_versions=config.steps // config.h,
        samples_per_contribution=config.h * batch,
        ema_half_life=config.ema.half_life,
        checkpoint_every=config.checkpoint.every,
        eval_every=-(-config.eval.every // config.h),
        patience_s=config.round.patience_s,
        folder=out / "checkpoint",
        asks_all_sites=has_own_data(config.data),
    )


def _load(plan: Plan, strategy: Strategy, resume: bool) -> tuple[GlobalModel, Totals, str] | None:
    if not resume:
        return None
    model, meta = GlobalModel.load(plan.folder, strategy, plan.ema_half_life, plan.ema_half_lives)
    return model, Totals(**meta["totals"]), meta["frozen_sha256"]


def _desk(
    config: Config,
    run_id: str,
    strategy: Strategy,
    out: Path,
    on_event: Callable[[str, str | None, str], None],
) -> Desk:
    silence_s = SILENT_HEARTBEATS * HEARTBEAT_S
    return Desk(
        run_id,
        Registry(site_names(config), silence_s, time.monotonic),
        Intake(strategy.up, config.round.max_norm, out / "spool"),
        strategy.fragments,
        on_event,
        CHUNK_BYTES,
        strategy.policy.max_staleness,
    )


def _data_plane(config: Config, desk: Desk, identity: Identity) -> DataPlane:
    link = config.link
    channels = link.channels or (PACED_CHANNELS if link.pace_mbit else START_CHANNELS)
    threads = threads_per_site(link.channels, config.stream.fragments)
    return DataPlane(
        desk,
        identity,
        link.host,
        link.port,
        config.sites * threads + SPARE_THREADS,
        HEARTBEAT_S,
        link.congestion,
        link.pace_mbit / channels,
        config.sites,
        channels,
    )
