"""A whole run in one process: coordinator and sites in threads, joined by loopback links.

The real engine, round loop, codecs and strategies, without Flower and without sockets: to test a
workload or a strategy of one's own, or to try it on a shaped link. Threads share torch's global
random generator, so workloads that draw from it are not reproducible here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedwan.coordinator.desk import Desk
from fedwan.coordinator.intake import Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.rounds import Plan, Rounds, Totals
from fedwan.data.shard import Shard
from fedwan.errors import FedwanError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.link.loopback import LoopbackLink
from fedwan.site.loop import SiteLoop
from fedwan.site.plan import SitePlan
from fedwan.strategy import Strategy
from fedwan.workloads.base import Workload

__all__ = ["SimulatedRun", "SimulatedSite", "simulate"]

RUN_ID = "simulated"
SILENCE_S = 600.0
CPU = torch.device("cpu")


class SimulatedSite(NamedTuple):
    """What one site brings."""

    workload: Workload
    shard: Shard


@dataclass
class SimulatedRun:
    """How a run went."""

    model: GlobalModel
    totals: Totals
    records: list[dict[str, Any]] = field(default_factory=list)
    """Rows as in `metrics.jsonl`."""
    site_sha256: dict[str, str] = field(default_factory=dict)
    """Hash of the weights that each site ended with."""


def simulate(
    sites: Mapping[str, SimulatedSite],
    strategy: Strategy,
    folder: Path,
    *,
    num_steps: int,
    batch: int,
    seed: int = 0,
    ema_half_life: float = 1e4,
    eval_every: int = 0,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
) -> SimulatedRun:
    """Train to the end.

    Args:
        sites: by name, in merge order; workloads freshly built from the same seed.
        strategy: the recipe.
        folder: for checkpoints.
        num_steps: per site, a multiple of the strategy's H.
        batch: samples per site and step.
        seed: of data order and draws.
        ema_half_life: in samples.
        eval_every: versions between evaluations; 0 for none but the first and the last.
        wrap: gets a site's name and link, and returns the link to use, e.g. a `ShapedLink`.

    Raises:
        FedwanError: the first that any party raised.
    """
    records: list[dict[str, Any]] = []
    errors: list[BaseException] = []
    desk = Desk(
        RUN_ID,
        Registry(list(sites), SILENCE_S),
        Intake(strategy.up, 0.0, folder / "spool"),
        strategy.fragments,
        lambda event, site, text: records.append(
            {"kind": "event", "event": event, "site": site, "text": text}
        ),
        1 << 20,
        strategy.policy.max_staleness,
    )
    plan = Plan(
        site_names=tuple(sites),
        num_versions=num_steps // strategy.h,
        samples_per_contribution=strategy.h * batch,
        ema_half_life=ema_half_life,
        checkpoint_every=num_steps,
        eval_every=eval_every,
        patience_s=SILENCE_S,
        folder=folder / "checkpoint",
    )
    rounds = Rounds(plan, strategy, desk, records.append, lambda version, samples: None)
    hashes: dict[str, str] = {}

    def live(name: str, site: SimulatedSite) -> None:
        link = wrap(name, LoopbackLink(desk, name))
        site_plan = SitePlan(RUN_ID, name, seed, batch, num_steps, 16, num_steps, 0.2)
        try:
            loop = SiteLoop(
                site_plan, site.workload, site.shard, strategy, link, folder / name, CPU
            )
            hashes[name] = loop.run()
        except BaseException as error:
            errors.append(error)
            desk.finish(f"{name} failed: {error}")
            # No other process will take this site's place: do not wait for it.
            with suppress(FedwanError):
                link.leave(wire.Farewell(error=str(error)))
        finally:
            link.close()

    threads = [
        threading.Thread(target=live, args=(name, site), name=name) for name, site in sites.items()
    ]
    for thread in threads:
        thread.start()
    try:
        model = rounds.run()
    except BaseException as error:
        errors.append(error)
    desk.finish("the simulation ended")
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]
    return SimulatedRun(model, rounds.totals, records, hashes)
