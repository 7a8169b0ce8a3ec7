"""Runs in one process whose parties can fail and come back: real engine, loopback links."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from fedwan import outer
from fedwan.codecs import fp32
from fedwan.config import InnerConfig
from fedwan.coordinator.desk import Desk
from fedwan.coordinator.intake import Intake
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.plan import Plan
from fedwan.coordinator.policy import barrier, on_arrival
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.rounds import Rounds
from fedwan.coordinator.server_step import mirror_inner, step_inner, step_outer
from fedwan.data.shard import Shard
from fedwan.fragments import whole
from fedwan.link.base import Link
from fedwan.link.loopback import LoopbackLink
from fedwan.site.loop import SiteLoop
from fedwan.site.plan import SitePlan
from fedwan.strategy import Strategy
from tests.planes import eventually, in_thread
from tests.support import TinyWorkload, tiny_shard

INNER = {"net": InnerConfig(name="adam", lr=1e-2)}
H = 3
BATCH = 4


def delta_strategy(
    num_sites: int, quorum: int = 0, patience_s: float = 60.0, h: int = H
) -> Strategy:
    step = step_outer({"net": outer.nesterov(0.7, 0.5)})
    return Strategy("delta", h, whole, step, fp32(), fp32(), barrier(num_sites, quorum, patience_s))


def arrival_strategy(num_sites: int, quorum: int, patience_s: float = 60.0) -> Strategy:
    step = step_outer({"net": outer.delayed_nesterov(0.7, 0.5, num_sites)})
    policy = on_arrival(num_sites, quorum, patience_s, max_staleness=20)
    return Strategy("delta", H, whole, step, fp32(), fp32(), policy, clock="samples", least_steps=1)


def push_pull_strategy(num_sites: int) -> Strategy:
    policy = on_arrival(num_sites, 1, max_staleness=20, discount=1.0)
    step = step_inner(INNER)
    return Strategy("gradient", 1, whole, step, fp32(), fp32(), policy, clock="samples")


def gradient_strategy(num_sites: int) -> Strategy:
    return Strategy("gradient", 1, whole, mirror_inner(INNER), fp32(), fp32(), barrier(num_sites))


_INITIAL = TinyWorkload(INNER, norm=True).networks["net"].state_dict()


class SameStart(TinyWorkload):
    """Starts from the same weights though other threads draw from torch's generator meanwhile."""

    def __init__(self) -> None:
        super().__init__(INNER, norm=True)
        self.networks["net"].load_state_dict(_INITIAL)


def tiny_workload() -> TinyWorkload:
    return SameStart()


class TinyRun:
    """A coordinator in a thread; sites are started, killed and started again by the test."""

    def __init__(
        self,
        folder: Path,
        strategy: Strategy,
        *,
        sites: Sequence[str] = ("s1", "s2"),
        num_versions: int = 6,
        silence_s: float = 60.0,
        patience_s: float = 60.0,
        eval_every: int = 0,
        checkpoint_every: int = 1,
        shard_of: Callable[[str], Shard] = lambda name: tiny_shard(int(name[1:])),
        has_own_data: bool = False,
        inner: Mapping[str, InnerConfig] | None = None,
        exclude: Mapping[str, Sequence[str]] | None = None,
        show_samples: bool = False,
    ) -> None:
        self.exclude = exclude or {}
        self.shard_of = shard_of
        self.show_samples = show_samples
        self.folder = folder
        self.inner = inner or {}
        self.strategy = strategy
        self.sites = sites
        self.num_versions = num_versions
        self.checkpoint_every = checkpoint_every
        self.rows: list[dict[str, Any]] = []
        self.samples: list[int] = []
        self.desk = Desk(
            "run",
            Registry(sites, silence_s),
            Intake(strategy.up, 0.0, folder / "spool"),
            strategy.fragments,
            lambda event, site, text: self.rows.append(
                {"kind": "event", "event": event, "site": site, "text": text}
            ),
            1 << 16,
            strategy.policy.max_staleness,
        )
        plan = Plan(
            site_names=tuple(sites),
            num_versions=num_versions,
            samples_per_contribution=strategy.h * BATCH,
            ema_half_life=100.0,
            checkpoint_every=checkpoint_every,
            eval_every=eval_every,
            patience_s=patience_s,
            folder=folder / "checkpoint",
            asks_all_sites=has_own_data,
        )
        self.plan = plan
        self.rounds = Rounds(
            plan,
            strategy,
            self.desk,
            self.rows.append,
            lambda v, step, data: self.samples.append(v),
        )

    def resume(self) -> None:
        """Go on from the checkpoint in the folder."""
        half_life = self.plan.ema_half_life
        model, meta = GlobalModel.load(self.plan.folder, self.strategy, half_life)
        self.rounds.resume(model, self.rounds.totals, meta["frozen_sha256"])

    def start(self) -> Callable[[float], GlobalModel]:
        return in_thread(self.rounds.run)

    def site(
        self,
        name: str,
        workload: Any = None,
        wrap: Callable[[Link], Link] = lambda link: link,
        dial: Callable[[], Link] | None = None,
    ) -> Callable[[float], str]:
        """Start a site; it ends as its loop does."""
        workload = workload or tiny_workload()

        def live() -> str:
            link = wrap(dial() if dial else LoopbackLink(self.desk, name))
            try:
                return self.loop(name, workload, link).run()
            finally:
                link.close()

        return in_thread(live)

    def loop(self, name: str, workload: Any, link: Link) -> SiteLoop:
        plan = SitePlan(
            run_id="run",
            site=name,
            seed=0,
            batch=BATCH,
            num_steps=self.num_versions * self.strategy.h,
            num_samples=4,
            checkpoint_every=self.checkpoint_every,
            poll_s=0.05,
            has_own_data=self.plan.asks_all_sites,
            show_samples=self.show_samples,
            inner=self.inner,
            exclude=self.exclude,
        )
        folder = self.folder / name
        cpu = torch.device("cpu")
        return SiteLoop(plan, workload, self.shard_of(name), self.strategy, link, folder, cpu)

    def events(self, kind: str) -> list[str]:
        return [row["text"] for row in self.rows if row.get("event") == kind]

    def await_version(self, version: int) -> None:
        def reached() -> bool:
            model = self.rounds.model
            return model is not None and min(model.versions) >= version

        eventually(reached, within_s=20.0)


class Crash(BaseException):
    """A site's process dies."""


class CrashingWorkload(SameStart):
    """Dies in the step after so many were completed."""

    def __init__(self, after_steps: int) -> None:
        super().__init__()
        self.left = after_steps

    def step(self, *args: Any) -> Any:
        if self.left == 0:
            raise Crash
        self.left -= 1
        return super().step(*args)


class GatedWorkload(SameStart):
    """Takes each step once the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.permits = threading.Semaphore(0)

    def step(self, *args: Any) -> Any:
        assert self.permits.acquire(timeout=20)
        return super().step(*args)

    def allow(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.permits.release()
