"""The round loop: the life of a run, seen from the coordinator.

    wait for the initial weights
    until the last version: merge contributions in site order as they become whole
                            commit one outer update of all networks, or none
                            publish it, record it, checkpoint, ask for quality
    ask for the final quality, stop the sites, hear their farewells

It knows no strategy and no workload by name.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from queue import Empty
from typing import Any

from fedwan.codecs import fp32
from fedwan.config import Config, site_names
from fedwan.coordinator.evaluation import Evaluator, Finding
from fedwan.coordinator.gathering import Gathering, Merged, Round
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.paces import Paces
from fedwan.coordinator.round_rows import RoundRows
from fedwan.coordinator.servicer import Servicer
from fedwan.coordinator.totals import Totals
from fedwan.data.splits import has_own_data
from fedwan.errors import RunStopped, UserError
from fedwan.fragments import Fragment, next_due, whole
from fedwan.link import wire_pb2 as wire
from fedwan.memory import Tidier
from fedwan.state import hash_state
from fedwan.strategy import Strategy

__all__ = ["Rounds"]

TICK_S = 0.5
"""How often the loop looks for lost sites while nothing arrives."""

PAST_VERSIONS = 1000
"""Versions whose progress is remembered, for reports of quality that come later."""

PAST_ROUNDS = 50
"""Rounds whose times a deadline is drawn from."""

HOPELESS_ROUNDS = 3
"""Rounds in which every contribution was refused, after which a run ends."""

FAREWELL_S = 20.0
"""How long the coordinator waits for farewells when the run is stopped before its end."""


class Rounds:
    """One run's loop.

    Args:
        config: of the run, with nothing left open.
        folder: where checkpoints go.
        strategy: the run's.
        servicer: where sites come and go.
        record: takes rows for `metrics.jsonl`.
        on_samples: takes (version, step, safetensors bytes) of generated samples.
    """

    def __init__(
        self,
        config: Config,
        folder: Path,
        strategy: Strategy,
        servicer: Servicer,
        record: Callable[[dict[str, Any]], None],
        on_samples: Callable[[int, int, bytes], None],
    ) -> None:
        self._config = config
        self._folder = folder
        self._site_names = site_names(config)
        self._num_versions = config.steps // strategy.h
        self._nominal = strategy.h * config.data.batch
        """Samples; a contribution of as many has weight 1."""
        self._strategy = strategy
        self._servicer = servicer
        self._record = record
        self._on_samples = on_samples
        self._mergers: dict[int, Merger] = {}
        self._rows = RoundRows(
            record, corrects=strategy.hook is not None and not strategy.overlap.tau
        )
        self._past_s: dict[int, deque[float]] = {}
        self._progress_at: dict[int, int] = {0: 0}
        """By version; the schedule of evaluations, checkpoints and the end follows the progress."""
        self._paces = Paces(self._site_names, strategy.h, strategy.least_steps)
        self._tidier = Tidier()
        self._evaluator = Evaluator(has_own_data(config.data))
        self._latest: list[str] = []
        """Sites whose contributions are in the latest update."""
        self._began = time.monotonic()
        self.totals = Totals()
        self.model: GlobalModel | None = None

    # The story -----------------------------------------------------------------------------

    def run(self) -> GlobalModel:
        """Train to the last version.

        Raises:
            RunStopped: too few sites for longer than patience allows; a checkpoint was written.
        """
        model = self.model or self._await_initial()
        self.model = model
        self._servicer.updates.run_step = self._run_step(model)
        self._servicer.set_model(model, self._strategy.policy.arrivals_from is not None)
        while self._progress(model) < self._num_versions:
            before, version = self._progress(model), model.version
            while model.version == version:
                self._round(model, self._next(model))
            self._after_version(model, before)
        self._rows.look()
        self._final_quality(model)
        self._servicer.finish("the run is complete", is_complete=True)
        # A live site on a slow link may still be fetching the last update.
        self._await_farewells(self._config.round.patience_s)
        self._check_agreement()
        self.checkpoint(model)
        return model

    def resume(self, model: GlobalModel, totals: Totals) -> None:
        """Go on from a checkpoint instead of fresh initial weights."""
        self.model = model
        self.totals = totals
        self._servicer.rejected, self._servicer.rejoins = totals.rejected, totals.rejoins
        self._servicer.dropped = totals.dropped
        self._servicer.updates.durable_version = model.version
        self._progress_at[model.version] = self._progress(model)
        self._servicer.set_model(model, self._strategy.policy.arrivals_from is not None)

    def share_done(self) -> float:
        """Of the run, 0 to 1."""
        return self._progress(self.model) / self._num_versions if self.model else 0.0

    def _next(self, model: GlobalModel) -> Fragment:
        """Whose turn it is."""
        num_rounds = self._num_versions
        return next_due(model.fragments, model.versions, self._strategy.h, num_rounds)

    def _progress(self, model: GlobalModel) -> int:
        """Outer updates so far; where sites keep their own pace, as many as their samples make."""
        if self._strategy.clock == "versions":
            return model.version
        return self._run_step(model) // self._strategy.h

    def _run_step(self, model: GlobalModel) -> int:
        """Steps of the run so far; where sites keep their own pace, their mean."""
        h = self._strategy.h
        if self._strategy.clock == "versions":
            return model.version * h
        per_round = self._nominal * len(self._site_names)
        return self.totals.samples * h // per_round

    def _round(self, model: GlobalModel, fragment: Fragment) -> None:
        began = time.monotonic()
        version = model.versions[fragment.index]
        merger = self._mergers.setdefault(fragment.index, Merger(fragment.layout))
        past_s = self._past_s.setdefault(fragment.index, deque(maxlen=PAST_ROUNDS))
        gathering = Gathering(
            self._servicer,
            self._strategy,
            merger,
            self._site_names,
            self._nominal // fragment.times,
            Round(fragment, version, past_s),
        )
        self._gather(model, gathering, version)
        past_s.append(gathering.last_s)
        self._servicer.withdraw_update(fragment.index)
        samples = sum(m.contribution.work.samples for m in gathering.merged)
        before = merger.sampler.of(model.state)
        # Optimisers that count arrivals take a barrier's mean for as many as it is made of.
        is_warmup = self._strategy.policy.arrivals_from is not None and not gathering.is_on_arrival
        times = len(self._site_names) if is_warmup else 1
        is_alone = len(gathering.merged) == 1
        payload = model.commit(
            fragment, merger.take(), samples, times, self._run_step(model), is_alone
        )
        self.totals.samples += samples
        self._latest = [merged.contribution.site for merged in gathering.merged]
        for merged in gathering.merged:
            self._paces.note(merged.contribution.site, merged.contribution.work)
        self._servicer.updates.steps = self._paces.steps()
        self._servicer.updates.run_step = self._run_step(model)
        self._servicer.publish(
            fragment.index, version + 1, payload, gathering.starts(), is_own=model.takes_over
        )
        self._count(gathering.merged)
        self._rows.add(
            fragment,
            version + 1,
            gathering.merged,
            before,
            self._run_step(model),
            time.monotonic() - began,
        )
        self._notice_lost()
        self._take_reports()

    def _gather(self, model: GlobalModel, gathering: Gathering, version: int) -> None:
        """Merge contributions until the policy closes the round."""
        is_paused = False
        while True:
            verdict = gathering.advance(model.state, self._tidier.tidy)
            if verdict == "close":
                return
            if verdict == "stop":
                self._stop(version, gathering)
            is_paused = self._idle(gathering, version, is_paused)

    def _idle(self, gathering: Gathering, version: int, is_paused: bool) -> bool:
        """Wait for the next contribution; notice sites that fell silent."""
        with self._servicer.changed:
            if gathering.is_idle():
                self._servicer.changed.wait(TICK_S)
        self._tidier.tidy()  # many chunks were received meanwhile
        self._notice_lost()
        self._take_reports()
        self._heed_stop()
        self._heed_refusals()
        with self._servicer.changed:
            missing = gathering.missing()
            num_live = len(self._servicer.registry.live())
        if gathering.is_on_arrival and num_live >= self._strategy.policy.quorum:
            missing = []
        if missing and not is_paused:
            self._event("paused", None, f"round {version + 1} waits for {', '.join(missing)}")
        return bool(missing)

    def _stop(self, version: int, gathering: Gathering) -> None:
        assert self.model is not None
        self.checkpoint(self.model)
        with self._servicer.changed:
            owing = ", ".join(gathering.owing())
        text = (
            f"round {version + 1} has waited {self._strategy.policy.patience_s:g} s for "
            f"{owing} and is below its quorum of {self._strategy.policy.quorum}; "
            "bring the sites back and continue with --resume, or set round.quorum"
        )
        self._servicer.finish(text)
        self._await_farewells(FAREWELL_S)
        raise RunStopped(text)

    def _heed_refusals(self) -> None:
        """End a run that nothing can come of: no contribution was fit for three rounds.

        Raises:
            UserError: why the latest one was refused.
        """
        servicer = self._servicer
        if servicer.refused_since_update < HOPELESS_ROUNDS * len(self._site_names):
            return
        text = (
            f"{servicer.refused_since_update} contributions in a row were refused, and none was "
            f"merged: {servicer.last_refusal}"
        )
        servicer.finish(text)
        self._await_farewells(FAREWELL_S)
        raise UserError(text)

    def _heed_stop(self) -> None:
        """Stop if the servicer was told to, from outside."""
        if self._servicer.stop_text:
            if self.model is not None:
                self.checkpoint(self.model)
            self._await_farewells(FAREWELL_S)
            raise RunStopped(self._servicer.stop_text)

    # Beginning and end ---------------------------------------------------------------------

    def _await_initial(self) -> GlobalModel:
        deadline = time.monotonic() + self._config.round.patience_s
        while True:
            with self._servicer.changed:
                payload = self._servicer.initial()
                if payload is None:
                    self._servicer.changed.wait(TICK_S)
            self._tidier.tidy()
            if payload is not None:
                break
            self._servicer.reassign_initial(self._notice_lost())
            self._heed_stop()
            if time.monotonic() > deadline:
                text = (
                    f"no site has sent initial weights for {self._config.round.patience_s:g} s; "
                    "check that the sites' services run and can reach the coordinator"
                )
                self._servicer.finish(text)
                raise RunStopped(text)
        layout = self._servicer.layout
        initial = fp32().decode(payload, whole(layout)[0].layout)
        config = self._config
        model = GlobalModel(initial, layout, self._strategy, config.half_life)
        claim = self._servicer.agreement.agreed
        assert claim is not None
        if model.initial_sha256 != claim.initial_sha256:
            text = (
                f"the initial weights that were sent hash to {model.initial_sha256[:12]}, those "
                f"that the sites hold to {claim.initial_sha256[:12]}; start the run again"
            )
            self._servicer.finish(text)
            raise RunStopped(text)
        return model

    def _final_quality(self, model: GlobalModel) -> None:
        version = model.version
        deadline = time.monotonic() + self._config.round.patience_s
        while self.totals.quality_version < version and time.monotonic() < deadline:
            with self._servicer.changed:
                live = self._servicer.registry.live()
            if self._evaluator.is_idle(live):
                self._ask_quality()
            with self._servicer.changed:
                if self._servicer.reports.empty():
                    self._servicer.changed.wait(TICK_S)
            self._notice_lost()
            self._take_reports()
            self._heed_stop()

    def _await_farewells(self, patience_s: float) -> None:
        deadline = time.monotonic() + patience_s
        registry = self._servicer.registry
        with self._servicer.changed:
            while registry.live() and time.monotonic() < deadline:
                self._servicer.changed.wait(TICK_S)
        for farewell in self._servicer.farewells.values():
            self.totals.add_work(farewell.work)

    def _check_agreement(self) -> None:
        assert self.model is not None
        mine = hash_state(self.model.state)
        for site, farewell in self._servicer.farewells.items():
            if farewell.global_sha256 and farewell.global_sha256 != mine:
                self._event(
                    "warning",
                    site,
                    f"{site} ended with weights {farewell.global_sha256[:12]}, the coordinator "
                    f"with {mine[:12]}: their arithmetic differs (another device or library?)",
                    finding="different_weights",
                )

    # After each version --------------------------------------------------------------------

    def _after_version(self, model: GlobalModel, before: int) -> None:
        now = self._progress(model)
        if self._strategy.clock == "samples":  # elsewhere a version is the progress
            self._progress_at[model.version] = now
            while len(self._progress_at) > PAST_VERSIONS:
                del self._progress_at[next(iter(self._progress_at))]
        if now >= self._num_versions or _crosses(
            -(-self._config.eval.every // self._strategy.h), before, now
        ):
            self._ask_quality()
        if _crosses(self._config.checkpoint.every, before, now):
            self.checkpoint(model)

    def checkpoint(self, model: GlobalModel) -> None:
        """Write everything that a resumed run needs."""
        self.totals.rejected = self._servicer.rejected
        self.totals.rejoins = self._servicer.rejoins
        self.totals.dropped = self._servicer.dropped
        totals = asdict(self.totals)
        totals["wall_s"] += time.monotonic() - self._began
        meta = {"totals": totals, "claim": self._servicer.agreement.agreed}
        model.save(self._folder, meta)
        self._servicer.updates.durable_version = model.version

    def elapsed_s(self) -> float:
        """Wall time of this run, with that before it was resumed."""
        return self.totals.wall_s + time.monotonic() - self._began

    def _ask_quality(self) -> None:
        """Have the EMA weights measured, if possible by a site that keeps up."""
        with self._servicer.changed:
            for site in self._evaluator.choose(self._servicer.registry.live(), self._latest):
                self._servicer.registry.tell(site, wire.CoordinatorSignal.EVALUATE)

    def _take_reports(self) -> None:
        while True:
            try:
                self._evaluator.hear(*self._servicer.reports.get_nowait())
            except Empty:
                break
        with self._servicer.changed:
            live = self._servicer.registry.live()
        for finding in self._evaluator.findings(live):
            self._take_finding(finding)

    def _take_finding(self, finding: Finding) -> None:
        sites, version, figures, samples, complaint = finding
        site = ", ".join(sites)
        if "fd" in figures and not math.isfinite(figures["fd"]):
            self._event("warning", site, f"{site} measured an fd of {figures.get('fd')}")
        if complaint:
            self._event("warning", site, complaint)
        step = self._progress_at.get(version, version) * self._strategy.h
        if version == 0:
            self.totals.untrained = figures
        if version >= self.totals.quality_version:
            self.totals.quality = figures
            self.totals.quality_version = version
            self._on_samples(version, step, samples)
        self._record(figures | {"kind": "quality", "version": version, "step": step, "site": site})

    def _count(self, merged: list[Merged]) -> None:
        for contribution, _, staleness, _ in merged:
            self.totals.add_work(contribution.work)
            self.totals.contributions += 1
            self.totals.late += staleness > 0
            self.totals.staleness += staleness

    def _notice_lost(self) -> list[str]:
        with self._servicer.changed:
            lost = self._servicer.registry.newly_lost()
        for name in lost:
            self._event("lost", name, f"{name} has fallen silent")
        return lost

    def _event(self, event: str, site: str | None, text: str, **details: str) -> None:
        self._record({"kind": "event", "event": event, "site": site, "text": text, **details})


def _crosses(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies above `before` and not above `now`; never if it is 0."""
    return bool(every) and now // every > before // every
