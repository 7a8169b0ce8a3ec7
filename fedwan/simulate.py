"""A whole run in one process: coordinator and sites in threads, joined by loopback links.

The real engine, round loop, codecs and strategies, without Flower and without sockets: to test a
workload or a strategy of one's own, or to try it on a shaped link. Threads share torch's global
random generator, so workloads that draw from it are not reproducible here.
"""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedwan.config import InnerConfig
from fedwan.coordinator.desk import Desk
from fedwan.coordinator.intake import Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.plan import Plan
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.rounds import Rounds
from fedwan.coordinator.totals import Totals
from fedwan.data.shard import Shard
from fedwan.errors import FedwanError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.link.loopback import LoopbackLink
from fedwan.site.loop import SiteLoop
from fedwan.site.plan import SitePlan
from fedwan.strategy import Strategy
from fedwan.workloads.base import Workload

__all__ = ["Absence", "SimulatedRun", "SimulatedSite", "simulate"]

RUN_ID = "simulated"
SILENCE_S = 600.0
POLL_S = 0.1
STANDSTILL_S = 2.0
CPU = torch.device("cpu")


class SimulatedSite(NamedTuple):
    """What one site brings."""

    workload: Workload
    shard: Shard
    rebuild: Callable[[], Workload] | None = None
    """Makes the workload anew, for a site that leaves and returns."""


class Absence(NamedTuple):
    """A site's process dies, and a new one takes its place later.

    Where the others wait for it, it returns after two seconds of standstill.
    """

    leaves_at: float
    """Share of the run that is done by then."""
    returns_at: float


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
    ema_half_lives: Mapping[str, float] | None = None,
    eval_every: int = 0,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
    absences: Mapping[str, Absence] | None = None,
    inner: Mapping[str, InnerConfig] | None = None,
    num_recalibrate: int = 0,
    exclude: Mapping[str, Sequence[str]] | None = None,
    checkpoint_every: int = 0,
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
        ema_half_lives: by network, of those that have one of their own.
        eval_every: versions between evaluations; 0 for none but the first and the last.
        wrap: gets a site's name and link, and returns the link to use, e.g. a `ShapedLink`.
        absences: by site; each of these needs its `rebuild`.
        inner: by network, for learning rates that change, and moments that are not kept.
        num_recalibrate: see `EvalConfig.recalibrate`.
        exclude: by network, see `NetworkConfig.exclude`.
        checkpoint_every: versions between two checkpoints of a site; 0 for none.

    Raises:
        FedwanError: the first that any party raised.
    """
    records: list[dict[str, Any]] = []
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
        ema_half_lives=ema_half_lives or {},
    )
    rounds = Rounds(plan, strategy, desk, records.append, lambda *_: None)
    parties = _Parties(desk, rounds, strategy, folder, wrap)
    for name, site in sites.items():
        site_plan = SitePlan(
            *(RUN_ID, name, seed, batch, num_steps, 16, checkpoint_every or num_steps, 0.2),
            inner=inner or {},
            num_recalibrate=num_recalibrate,
            exclude=exclude or {},
        )
        parties.start(site_plan, site, (absences or {}).get(name))
    try:
        model = rounds.run()
    except BaseException as error:
        parties.errors.append(error)
    desk.finish("the simulation ended")
    parties.join()
    if parties.errors:
        raise parties.errors[0]
    return SimulatedRun(model, rounds.totals, records, parties.hashes)


class _Left(BaseException):
    """A site's process dies."""


class _Parties:
    """The sites' threads.

    Args:
        desk: that they talk to.
        rounds: the coordinator's loop.
        strategy: the recipe.
        folder: for checkpoints.
        wrap: see `simulate`.
    """

    def __init__(
        self,
        desk: Desk,
        rounds: Rounds,
        strategy: Strategy,
        folder: Path,
        wrap: Callable[[str, Link], Link],
    ) -> None:
        self.errors: list[BaseException] = []
        self.hashes: dict[str, str] = {}
        self._desk = desk
        self._rounds = rounds
        self._strategy = strategy
        self._folder = folder
        self._wrap = wrap
        self._num_threads = torch.get_num_threads()
        self._threads: list[threading.Thread] = []

    def start(self, plan: SitePlan, site: SimulatedSite, absence: Absence | None) -> None:
        """Let a site live."""
        thread = threading.Thread(target=self._live, args=(plan, site, absence), name=plan.site)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join()

    def _live(self, plan: SitePlan, site: SimulatedSite, absence: Absence | None) -> None:
        # A new thread would take over what another one has set for as long as it evaluates.
        torch.set_num_threads(self._num_threads)
        name = plan.site
        link = self._wrap(name, LoopbackLink(self._desk, name))
        if absence is not None:
            link = _Leaving(link, lambda: self._rounds.share_done() >= absence.leaves_at)
        try:
            loop = SiteLoop(
                plan, site.workload, site.shard, self._strategy, link, self._folder / name, CPU
            )
            self.hashes[name] = loop.run()
        except _Left:
            self._return(plan, site, absence)
        except BaseException as error:
            self.errors.append(error)
            self._desk.finish(f"{name} failed: {error}")
            # No other process will take this site's place: do not wait for it.
            with suppress(FedwanError):
                link.leave(wire.Farewell(error=str(error)))
        finally:
            link.close()

    def _return(self, plan: SitePlan, site: SimulatedSite, absence: Absence | None) -> None:
        assert absence is not None and site.rebuild is not None, "a site that leaves has `rebuild`"
        with self._desk.changed:
            entry = self._desk.registry.sites[plan.site]
            entry.heard_s = -math.inf  # as after the silence that a dead process leaves
            done, since = -1.0, time.monotonic()
            while not self._desk.stop_text and done < absence.returns_at:
                if self._rounds.share_done() > done:
                    done, since = self._rounds.share_done(), time.monotonic()
                elif time.monotonic() - since > STANDSTILL_S:
                    break  # the others wait for it
                self._desk.changed.wait(POLL_S)
        self._live(plan, site._replace(workload=site.rebuild()), None)


class _Leaving:
    """A link whose site dies between two steps."""

    def __init__(self, inner: Link, is_due: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_due = is_due

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def heartbeat(self, step: int) -> None:
        self._inner.heartbeat(step)
        if self._is_due():
            raise _Left
