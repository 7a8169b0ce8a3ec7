"""The step loop: the life of a run, seen from a site.

    join; take over the weights, and what this site's own checkpoint holds
    until the last step: one step; upload what is due; apply what has come; save
    stay for questions about quality until the coordinator says stop; say farewell

It knows no strategy and no workload by name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from queue import Empty

import safetensors.torch
import torch
from torch import Tensor

from fedwan.data import Shard, num_samples_in
from fedwan.errors import LinkLost, RunStopped, SessionLost
from fedwan.fragments import reached_step
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Link
from fedwan.rng import NamedGenerators, derive_seed, lent_generators, seed_torch
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.courier import Courier, is_merged
from fedwan.site.delta import DeltaExchange
from fedwan.site.exchange import Exchange, Station
from fedwan.site.gradient import GradientExchange
from fedwan.site.meter import Meter
from fedwan.site.own_pace import OwnPaceExchange
from fedwan.site.plan import SitePlan
from fedwan.site.push_pull import PushPullExchange
from fedwan.site.recalibrate import recalibrate
from fedwan.site.replica import Replica
from fedwan.site.sharing import alone
from fedwan.site.vitals import Vitals
from fedwan.state import State, add_prefix, layout_to_json
from fedwan.strategy import Strategy
from fedwan.workloads.base import Batch, Following, Workload, discloses_inputs
from fedwan.workloads.schedule import set_rates

__all__ = ["SiteLoop"]

log = logging.getLogger(__name__)


class SiteLoop:
    """One site's part in one run.

    Args:
        plan: name, seeds and numbers.
        workload: freshly built.
        shard: this site's data.
        strategy: the run's recipe.
        link: to the coordinator.
        folder: for this site's checkpoints of this run.
        device: where the workload lives.
    """

    def __init__(
        self,
        plan: SitePlan,
        workload: Workload,
        shard: Shard,
        strategy: Strategy,
        link: Link,
        folder: Path,
        device: torch.device,
    ) -> None:
        seed_torch(derive_seed(plan.seed, plan.site, "torch"))
        self._plan = plan
        self._workload = workload
        self._begin = workload.begin if isinstance(workload, Following) else lambda _: None
        self._shard = shard
        self._strategy = strategy
        self._link = link
        self._replica = Replica(workload, plan.inner, plan.exclude)
        self._rng = NamedGenerators(plan.seed, plan.site)
        self._stream = shard.loader(plan.batch, self._rng["data"], device)
        self._checkpoints = SiteCheckpoints(
            folder, self._replica, self._stream, self._rng, is_beside=strategy.overlap.tau > 0
        )
        self._meter = Meter(link)
        self._vitals = Vitals(workload, shard, strategy.h, plan.seed, plan.site)
        self._courier = Courier(link, plan.run_id, self._replica.layout, plan.poll_s)
        station = Station(
            self._replica,
            strategy.fragments(self._replica.layout),
            strategy,
            self._courier,
            self._meter,
            self._listen,
            self,
            plan.num_steps,
            lambda: self._is_stopped,
        )
        self._fragments = station.fragments
        self._exchange = _exchange(strategy, station)
        self._num_steps = plan.num_steps if strategy.clock == "versions" else sys.maxsize
        self._device = device
        self._saved_version = 0
        self._is_stopped = False

    # The story -----------------------------------------------------------------------------

    def run(self) -> str:
        """Take part until the run is over.

        Returns:
            SHA-256 of the weights that this site ended with.

        Raises:
            JoinRefused: this site does not belong to the run as it is.
            LinkLost: the coordinator could not be reached for too long.
            SessionLost: another process of this site took over, or the coordinator was started
                anew: join again.
            RunStopped: the run was ended before its last step.
        """
        try:
            step = self._train(self._join())
            self._checkpoints.settle()  # before the farewell: the last one may have failed
            return self._stay(step)
        finally:
            self._exchange.close()
            self._checkpoints.close()
            self._stream.close()

    def _train(self, step: int) -> int:
        while step < self._num_steps:
            self._listen()
            if self._is_stopped:
                break
            set_rates(self._workload.optimizers, self._plan.inner, step, self._plan.num_steps)
            self._begin(step)
            batch = next(self._stream)
            self._meter.begin_step(num_samples_in(batch))
            with self._meter.computing():
                losses = self._workload.step(batch, self._rng, self._exchange.reduce)
            step += 1
            self._meter.add_losses(losses)
            with self._meter.waiting():
                self._meter.set_figures(self._vitals.after_step(batch))
            self._link.heartbeat(step)
            step = self._exchange.after_step(step)
        self._exchange.finish()
        return step

    def _join(self) -> int:
        """Introduce this site and find its place; the step to go on from."""
        hello = wire.Hello(
            run_id=self._plan.run_id,
            protocol=PROTOCOL,
            site=self._plan.site,
            session=uuid.uuid4().hex,
            layout_json=layout_to_json(self._replica.layout),
            initial_sha256=self._replica.initial_sha256,
            frozen_sha256=self._replica.frozen_sha256,
            checkpoint=max(self._checkpoints.versions(), default=0),
        )
        welcome = self._link.join(hello)
        if welcome.send_initial:
            self._open_run()
        versions = list(welcome.versions) or [0] * len(self._fragments)
        return self._take_over(versions, welcome.run_step)

    def _take_over(self, versions: list[int], run_step: int) -> int:
        """Find this site's place in the run; the step to go on from.

        Weights are the coordinator's, the rest is of this site's nearest checkpoint.
        """
        exchange = self._exchange
        weights: State | None = None
        header = wire.DownloadHeader()
        outer: State = {}
        if any(versions):
            weights, header = self._courier.fetch_present()
            versions = list(header.versions)
        if weights is not None and isinstance(exchange, GradientExchange):
            outer, stepped = self._courier.fetch_outer()
            while stepped != versions:  # a quorum went on meanwhile
                weights, versions = self._courier.fetch_global()
                outer, stepped = self._courier.fetch_outer()
        kept = self._checkpoints.versions()
        nearest = versions[0]
        if self._strategy.contributes == "delta":
            nearest += 1  # deltas save before their contribution leaves
        if isinstance(exchange, DeltaExchange) and exchange.is_exact and nearest in kept:
            exchange.resume_variates(header, nearest)
            return self._send_again(versions[0], weights)
        usable = [v for v in kept if v <= nearest]
        # Whether the predecessor's last contribution was merged before it saw the update.
        is_missed = self._strategy.corrects and bool(usable) and usable[-1] == versions[0]
        if is_missed and header.merged_into:  # nothing is known where the coordinator is new, too
            is_missed = is_merged(header, versions[0] - 1, versions[0])
        ledger = self._checkpoints.load(usable[-1], with_model=is_missed) if usable else None
        if weights is not None:
            if is_missed and isinstance(exchange, DeltaExchange):
                assert ledger is not None
                exchange.catch_up(weights, ledger)
            self._replica.adopt(weights)
        exchange.take_over(versions, ledger)
        if isinstance(exchange, DeltaExchange):
            exchange.resume_variates(header, usable[-1] if usable else 0)
        if weights is not None:
            if outer:
                self._replica.load_optimizers(outer)
            log.info("goes on from version %d", versions[0])
            if versions[0] not in kept:
                at = f"version {usable[-1]}" if usable else "the beginning"
                log.warning("data order and optimisers go on from %s", at)
        if self._strategy.clock == "samples":
            return run_step
        return reached_step(self._fragments, versions, self._strategy.h, self._num_steps)

    def _send_again(self, version: int, weights: State | None) -> int:
        """The steps to the next version are complete: only their contribution may be missing."""
        assert isinstance(self._exchange, DeltaExchange)
        if weights is not None:
            self._replica.adopt(weights)
        self._exchange.take_over([version], None)
        ledger = self._checkpoints.load(version + 1, with_model=True)
        log.info("sends its contribution to version %d again", version)
        return self._exchange.send_again(ledger, (version + 1) * self._strategy.h)

    def save(self, version: int, durable_version: int, ledger: Ledger) -> None:
        """See `fedwan.site.exchange.Keeper`."""
        every = self._plan.checkpoint_every
        if version // every > self._saved_version // every or version < self._saved_version:
            self._saved_version = version
            self._checkpoints.save(version, durable_version, ledger)

    def discard(self, version: int) -> None:
        """See `fedwan.site.exchange.Keeper`."""
        self._checkpoints.drop(version)
        self._saved_version = min(self._saved_version, version - 1)

    def _stay(self, step: int) -> str:
        """Answer the coordinator until it says stop; then say farewell."""
        sha256 = self._replica.global_sha256()
        version = self._exchange.versions[0]
        with self._meter.waiting():
            while not self._is_stopped:
                self._listen(wait_s=self._plan.poll_s)
                if not self._is_stopped and self._courier.is_over(version):
                    break
        self._leave(wire.Farewell(global_sha256=sha256, work=self._meter.work(step, Work(0, 0))))
        return sha256

    def _leave(self, farewell: wire.Farewell) -> None:
        try:
            self._link.leave(farewell)
        except (LinkLost, SessionLost) as error:
            log.warning("the coordinator did not hear this site's farewell: %s", error)

    # What the coordinator asks between steps -----------------------------------------------

    def _listen(self, wait_s: float = 0.0) -> None:
        """Act on signals that have arrived; wait up to `wait_s` for the first one."""
        while True:
            try:
                signal = self._link.signals.get(block=wait_s > 0, timeout=wait_s or None)
            except Empty:
                return
            wait_s = 0.0
            if signal.kind == wire.CoordinatorSignal.EVALUATE:
                self._evaluate()
            elif signal.kind == wire.CoordinatorSignal.SEND_INITIAL:
                self._open_run()
            elif signal.kind == wire.CoordinatorSignal.STOP:
                self._stop(signal)
            elif signal.kind == wire.CoordinatorSignal.GONE:
                raise SessionLost(signal.text)

    def _stop(self, signal: wire.CoordinatorSignal) -> None:
        self._is_stopped = True
        text = signal.text
        if self._strategy.clock == "samples" and signal.is_complete:
            return
        # What is in flight may have been published: then it lands, or else its flight says why not.
        versions, h, num_steps = self._exchange.expected, self._strategy.h, self._num_steps
        if reached_step(self._fragments, versions, h, num_steps) < num_steps:
            self._leave(wire.Farewell(work=self._meter.work(0, Work(0, 0)), error=text))
            raise RunStopped(f"the coordinator ended the run: {text}")

    def _open_run(self) -> None:
        """Send the initial weights, and measure them: what training starts from."""
        with self._meter.aside():
            self._courier.send_initial(self._replica.base)
            self._measure(self._replica.base, 0)

    def _evaluate(self) -> None:
        """Measure the EMA weights as they stand at the coordinator."""
        with self._meter.aside():
            self._measure(*self._courier.fetch_ema())

    def _measure(self, weights: State, version: int) -> None:
        """Quality of some weights on held-out data, and samples from them, for the coordinator.

        Samples that are made of private inputs stay here, unless this site's owner shows them.
        """
        began = time.monotonic()
        seed = self._plan.seed
        # Sites that measure together do so on different samples.
        draws = derive_seed(seed, self._plan.site) if self._plan.has_own_data else seed
        gpus = [self._device] if self._device.type == "cuda" else []
        with self._replica.showing(weights), torch.no_grad(), lent_generators(gpus):
            self._recalibrate()
            figures = dict(self._workload.evaluate(self._shard.held_out, draws))
            shown: dict[str, Tensor] = {}
            if self._may_show_samples():
                samples = self._workload.sample(self._plan.num_samples, seed)
                shown["generated"] = samples.float().cpu().contiguous()
        moments = figures.pop("moments", {})
        if self._plan.has_own_data:
            shown |= add_prefix("moments", moments)
        if self._shard.public:
            real = self._shard.held_out.x[: self._plan.num_samples]
            shown["real"] = real.float().cpu().contiguous()
        text = json.dumps(_plain(figures))
        self._courier.report(version, text, safetensors.torch.save(shown))
        log.info("quality of version %d in %.2f s: %s", version, time.monotonic() - began, text)

    def _may_show_samples(self) -> bool:
        is_private = discloses_inputs(self._workload) and not self._shard.public
        return self._plan.show_samples or not is_private

    def _recalibrate(self) -> None:
        """Have the networks' running statistics fit the weights that they hold, if asked to."""
        if not self._plan.num_recalibrate:
            return
        size = self._plan.batch
        some = self._shard.tell(self._shard.some(self._plan.num_recalibrate * size))
        rng = NamedGenerators(derive_seed(self._plan.seed, "recalibrate"), self._plan.site)
        order = torch.randperm(len(some.y), generator=rng["data"])
        num = max(1, len(order) // size)  # none but whole ones
        parts = (order[index * size : (index + 1) * size] for index in range(num))
        batches = (Batch(*(values[part].to(self._device) for values in some)) for part in parts)
        with alone(self._workload) as workload:
            recalibrate(workload, batches, rng)


def _exchange(strategy: Strategy, station: Station) -> Exchange:
    if strategy.clock == "samples":
        is_delta = strategy.contributes == "delta"
        return OwnPaceExchange(station) if is_delta else PushPullExchange(station)
    return DeltaExchange(station) if strategy.contributes == "delta" else GradientExchange(station)


def _plain(figures: Mapping[str, object]) -> dict[str, object]:
    """Numbers as JSON has them: tensors and numpy scalars become floats."""
    return {k: v.item() if hasattr(v, "item") else v for k, v in figures.items()}
