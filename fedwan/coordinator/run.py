"""The life of a run, seen from the coordinator.

    wait until the sites agree, and for the initial weights of one of them
    until the last version: merge contributions in site order as they become whole
                            commit one outer update of all networks, or none
                            publish it, record it, checkpoint, ask for quality
    ask for the final quality, stop the sites, hear their farewells

It knows no workload, and no strategy by name: layout, kinds and steps come with Join.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, cast

from fedwan.app import complete, has_own_data, load_strategy, sources
from fedwan.buffers import forget
from fedwan.codecs import Reading
from fedwan.config import MASKED, Config, hash_config, site_names, to_tree
from fedwan.coordinator.evaluator import Evaluator
from fedwan.coordinator.federation import CoordinatorRounds
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.mergers import AnyMerger, Mergers
from fedwan.coordinator.model import GlobalModel, another_version, find_checkpoint
from fedwan.coordinator.opening import await_agreement, await_initial, heed_stop
from fedwan.coordinator.past import Past
from fedwan.coordinator.records import RoundRows, Totals, VersionLines, contribution_row
from fedwan.coordinator.servicer import Servicer
from fedwan.coordinator.site_privacy import SitePrivacy
from fedwan.data.sources import parse_split
from fedwan.doctor.diagnosis import Finding
from fedwan.doctor.sampling import Sample
from fedwan.errors import RunStopped, UserError
from fedwan.files import hash_file, lack_of_room
from fedwan.fragments import Fragment
from fedwan.link.client import CHUNK_BYTES
from fedwan.memory import Tidier
from fedwan.output.journal import JOURNAL
from fedwan.output.records import Resumed, iter_records
from fedwan.protocol.agreement import Agreement, Claim
from fedwan.protocol.evaluation import Evaluation
from fedwan.protocol.gate import Gate
from fedwan.protocol.registry import Registry
from fedwan.protocol.round import Round
from fedwan.state import hash_state
from fedwan.strategy import Strategy

FAREWELL_S = 20.0
"""How long the coordinator waits for farewells when the run is stopped before its end."""


class CoordinatedRun:
    """One run."""

    def __init__(
        self,
        config: Config,
        run_id: str,
        folder: Path,
        record: Callable[[dict[str, Any]], None],
        on_samples: Callable[[int, int, bytes], None],
        strategy: Strategy | None = None,
        silence_s: float = 10.0,
    ) -> None:
        self.config = config
        self.totals = Totals()
        self._folder = folder
        self._record = record
        self._on_samples = on_samples
        self._own_strategy = strategy
        self._names = site_names(config)
        self._registry = Registry(self._names, silence_s)
        is_masked = config.codec.up in MASKED
        quorum = config.round.quorum or len(self._names)
        needed = len(self._names) if is_masked else quorum  # all must be here to agree on masks
        self._run_id = run_id
        self._sources = None if strategy else sources(config)
        has_steps = config.steps > 0
        agreement = Agreement(self._names, needed, sources=self._sources, has_steps=has_steps)
        self.hub = Servicer(
            *(run_id, self._registry, agreement, self._write, CHUNK_BYTES), hash_config(config)
        )
        self.hub.masking = Masking(run_id, self._names, quorum) if is_masked else None
        self._registry.least = quorum if is_masked else 1
        # What sites with data of their own measure may differ.
        is_shared, is_own = not has_own_data(config), parse_split(config.data.split)[0] == "own"
        self.hub.evaluation = Evaluation(is_own, pairs=is_shared)
        self.cause = ""
        """Why who started the run ends it; empty while nobody does."""
        self._resumed: GlobalModel | None = None
        self._past = Past()
        self._num_behind = 0
        """Versions by which the checkpoint is behind the journal's last one, if nobody chose it."""
        self._saved_state: dict[str, Any] = {"gate": {}}
        """Of the gate, masks and privacy, in the checkpoint that the run goes on from."""
        self._num_lost = 0
        """Versions that were sent out and are made again."""
        self._privacy: SitePrivacy | None = None
        self._version_lines = VersionLines(record, self.hub.changed.flush)
        self._tidier = Tidier()
        self._began_s = time.monotonic()

    def share_done(self) -> float:
        """Of the run, 0 to 1."""
        if self.hub.model is None:
            return 0.0
        return self.hub.rounds.progress * self._strategy.h / self.config.steps

    def elapsed_s(self) -> float:
        """Wall time of this run, with that before it was resumed."""
        return self.totals.wall_s + time.monotonic() - self._began_s

    def site_sha256(self) -> dict[str, str]:
        """Hash of the weights that each site ended with."""
        return {name: word.global_sha256 for name, word in self.hub.farewells.items()}

    # The story -----------------------------------------------------------------------------

    def resume(self, *, goes_back: bool = False) -> tuple[Resumed, str]:
        """Go on from the checkpoint in the run's folder: where, and a complaint or nothing.

        `goes_back`: it was chosen, and may be older than the newest one.
        """
        folder = self._folder / "checkpoint"
        meta, complaint = find_checkpoint(folder)
        self._past = past = Past.read(self._folder / JOURNAL)
        try:
            claim = Claim(*meta["claim"])
            self.totals = Totals(**meta["totals"])
            self.hub.began = float(meta["began"])
            self._saved_state = {"gate": dict(meta["gate"]), "masks": meta.get("masks")}
            if self.config.privacy.is_of("site"):
                self._saved_state["privacy"] = meta["privacy"]
                # The versions that a damaged or newer one had were sent out, and are made again.
                self._num_lost = max(int(bool(complaint)), sum(past.saved) - sum(meta["versions"]))
        except (KeyError, TypeError) as error:
            raise another_version(folder, error) from None
        self.hub.agreement.agreed = claim = self.hub.agreement.claim(claim)
        self._registry.rejoins, self.hub.unmerged = past.rejoins, past.unmerged
        for verb, site, has_joined in past.decisions:
            # What could be decided then holds, whatever the registry would object to now. But the
            # run's file may not have the site any more.
            if site in self._registry.sites:
                self.hub.decide(verb, site, has_begun=not has_joined)
        self._settle(claim)
        self._resumed = model = GlobalModel.load(folder, self._strategy, self.config)
        if not complaint and not goes_back and model.versions < past.saved:
            both = zip(past.saved, model.versions, strict=False)
            self._num_behind = max(saved - version for saved, version in both)
            complaint = (
                f"the checkpoint is of version {model.version}, and one of "
                f"{model.version_of(past.saved)} was written: what came between is made again, "
                "with other weights if a site has no checkpoint of then any more; or stop the run, "
                f"restore the newer one in {folder}, and --resume"
            )
        return (model.version, list(model.versions)), complaint

    def opening(self) -> dict[str, Any]:
        """The journal's line that this start of the run begins with."""
        row = {"kind": "event", "site": None, "sources": self._sources, "sites": self._names}
        row["run"], row["config"] = self._run_id, hash_file(self._folder / "config.yaml")
        if (model := self._resumed) is None:
            return row | {"event": "start", "text": f"run {self._run_id} begins"}
        row |= {"event": "resume", "text": f"resumed at version {model.version}"}
        weights = [model.hash_of(fragment) for fragment in model.fragments]
        return row | {"versions": list(model.versions), "weights": weights}

    def train(self, on_agreed: Callable[[Config], None] = lambda _: None) -> GlobalModel:
        """Train to the last version; an error that ends the run leaves a checkpoint."""
        try:
            return self._train(on_agreed)
        except (RunStopped, UserError) as error:
            if not self.hub.stop_text:
                self.hub.finish(str(error))
            if self.hub.model is not None and self.hub.model.is_whole:
                self.checkpoint(self.hub.model)
            self._await_farewells(FAREWELL_S)
            raise
        finally:
            self._version_lines.thread.shutdown()
            forget()

    def _train(self, on_agreed: Callable[[Config], None]) -> GlobalModel:
        hub, patience_s = self.hub, self.config.round.patience_s
        claim = await_agreement(hub, patience_s)
        self._settle(claim)
        on_agreed(self.config)
        rounds, model = self._start(claim), self._resumed
        if model is None:
            words = self._strategy, self.config, self._tidier, self._folder
            opener, model = await_initial(hub, claim, *words)
            for fragment in model.fragments:
                self._version_lines.add(model, fragment)
            self._evaluator.begin(opener, 0)
        hub.set_model(model)
        if model.is_offloaded:
            text = "memory is short: average, outer state and what sites fetch lie on disk"
            hub.event("warning", None, text)
        while not rounds.is_done:
            before, version = rounds.progress, rounds.version
            while rounds.version == version:
                self._round(model, rounds)
            self._after_version(model, before)
        deadline_s = time.monotonic() + patience_s
        while self._evaluator.wants(model.version) and time.monotonic() < deadline_s:
            with hub.changed:
                hub.tick()
            self._look_round()
        hub.finish("the run is complete", is_complete=True)
        # A live site on a slow link may still be fetching the last update, or be measuring.
        self._await_farewells(patience_s)
        self._evaluator.end(model.version)
        self._compare_weights(model)
        self.checkpoint(model)  # without what is in the journal, which is read again
        self.totals.add_work(hub.unmerged)
        return model

    def _settle(self, claim: Claim) -> None:
        """Build the strategy for what the sites train."""
        self.config = complete(self.config, cast(Any, claim.kinds), claim.num_steps)
        built = self._own_strategy or load_strategy(self.config.strategy).build(self.config)
        self._strategy: Strategy = built

    def _start(self, claim: Claim) -> CoordinatorRounds:
        """Admit the sites."""
        config, strategy, layout = self.config, self._strategy, claim.layout
        fragments = strategy.fragments(layout)
        rounds = CoordinatorRounds(
            strategy,
            fragments,
            self._names,
            config.steps // strategy.h,
            config.data.batch,
            self._resumed.versions if self._resumed else (),
            self.totals.samples,
        )
        if self.hub.masking:
            self.hub.masking.begin(layout, fragments, self._saved_state.get("masks"))
        if config.privacy.is_of("site"):
            self._privacy = SitePrivacy(config, layout, fragments)
            if self._resumed:
                state = self._saved_state["privacy"]
                self._privacy.resume(state, self._num_lost, self._past.spent)
            event, text = self._privacy.tell(layout)
            self.hub.event(event, None, text)
        self._mergers = Mergers(self.hub, strategy, config, self._folder, self._privacy)
        if self.hub.masking and self._resumed:
            self._mergers.resume(self._run_id, rounds, self._resumed)
        self._look_for_room(fragments)
        if self._resumed:
            rounds.own = list(self._resumed.own)
        rounds.dropped = self.totals.dropped
        rounds.go_back_to(self._past.anew_from)
        if strategy.hook and self._num_behind > config.checkpoint.every:
            # Sites have checkpoints of versions that are taken back, and none of this one.
            for fragment in fragments:
                rounds.begin_anew(fragment.index)
            text = "what the strategy keeps at sites begins anew, as the checkpoint is an older one"
            self.hub.event("warning", None, text, anew_from=list(rounds.anew_from))
        self.hub.rejected = self.totals.rejected
        self._saved = list(rounds.versions)  # of the fragments in the newest checkpoint
        self._rows = RoundRows(self._record, untold=_untold(strategy))
        if self._resumed is not None:
            self._rows.recall(iter_records(self._folder))
        self._evaluator = Evaluator(config, self.hub, self.totals, self._record, self._on_samples)
        self._evaluator.note(rounds.version, rounds.run_step)
        spool = self._folder / "spool"
        intake = Intake(layout, fragments, strategy.up, spool, self._part)
        # Gradients vary fiftyfold from step to step, deltas of unequal numbers of steps with these.
        is_steady = strategy.contributes == "delta" and strategy.clock == "versions"
        is_steady = is_steady and not strategy.up.mask_bits and not self._privacy
        # Else the update is not what a site's weights have moved by.
        self._is_plain = is_steady and strategy.up.is_exact and strategy.down.is_exact
        self.hub.gate = Gate(config.round.gate if is_steady else 0.0, len(self._names))
        self.hub.gate.load_state(self._saved_state["gate"])
        self.hub.model = self._resumed
        self.hub.start(rounds, intake)
        return rounds

    def _look_for_room(self, fragments: Sequence[Fragment]) -> None:
        """Tell of a disk that two checkpoints, a third being written, and a round would fill."""
        weights = sum(fragment.num_bytes for fragment in fragments)
        payloads = sum(self._strategy.up.payload_bytes(f.layout) for f in fragments)
        num_new = 1 if self._resumed else 3  # each has the weights, their average, and outer state
        num_bytes = 3 * num_new * weights + len(self._names) * payloads
        if text := lack_of_room(self._folder, num_bytes, "checkpoints and a round"):
            self.hub.event("warning", None, text)

    # A round -------------------------------------------------------------------------------

    def _round(self, model: GlobalModel, rounds: CoordinatorRounds) -> None:
        hub, began_s = self.hub, time.monotonic()
        with hub.changed:
            round_ = rounds.begin(began_s)
            round_.is_held = hub.gate.is_warming(round_.fragment.index)
        fragment = round_.fragment
        if hub.masking:
            model.hash_of(fragment)  # from here on contributions are compared with it
        merger = self._mergers.of(fragment)
        if round_.is_closed:  # by an earlier start, with a sum that is still under masks
            samples: list[Sample] = [{} for _ in round_.merged]
        else:
            samples = self._gather(model, round_, merger)
        before = merger.sampler.of(model.state)
        merged = self._mergers.merged(model, round_, self._look_round)
        if model.bound_counters(fragment, merged, rounds.most_counted(fragment.index)):
            for merge in round_.merged:
                if why := hub.overcounted(fragment.index, merge.contribution.measures.figures()):
                    hub.event("warning", merge.key.site, f"{merge.key.site}'s {why}; it is cut")
        contributions = [contribution_row(m, self._mergers.share(m)) for m in round_.merged]
        sites = [merge.key.site for merge in round_.merged]
        self._version_lines.wait()
        payload = model.commit(
            fragment,
            merged,
            round_.samples,
            rounds.counts_as(),
            rounds.run_step,
            alone=sites[0] if self._is_plain and len(sites) == 1 else "",
        )
        self._version_lines.add(model, fragment, contributions)
        self._mergers.take_up(rounds, model, fragment)
        self.totals.add_round(round_.merged)
        if self._privacy:
            self.checkpoint(model)  # what was sent out must count, and not come a second time
        hub.publish(payload, own=model.own[fragment.index])
        self._evaluator.note(rounds.version, rounds.run_step)
        round_s = time.monotonic() - began_s
        self._rows.add(round_, samples, before, rounds.run_step, round_s)
        self._look_round()

    def _part(self, fragment: Fragment, site: str) -> Fragment:
        return self._strategy.part(fragment, self._names.index(site))

    def _gather(
        self, model: GlobalModel, round_: Round[Contribution], merger: AnyMerger
    ) -> list[Sample]:
        """Merge contributions until the policy closes the round; a sample of each."""
        hub, samples = self.hub, list[Sample]()
        is_paused = False
        while True:
            verdict, merges = hub.advance()
            for merge in merges:
                if round_.is_on_arrival and (others := len(hub.rounds.awaited) - 1):
                    # One contribution must not replace the running statistics of all.
                    assert isinstance(merger, Merger), "strategies on arrival merge by the mean"
                    merger.keep(model.state, float(others))
                part = self._part(round_.fragment, merge.key.site)
                reading = Reading(self._strategy.up, merge.contribution.payload, part.layout)
                samples.append(merger.add(reading, *self._mergers.share(merge)))
                self._tidier.tidy()
            if verdict == "close":
                return samples
            if verdict == "stop":
                raise self._absence(round_)
            is_paused = self._idle(round_, is_paused)

    def _idle(self, round_: Round[Contribution], is_paused: bool) -> bool:
        """Wait for the next contribution; tell, once, of sites that the round waits for."""
        hub, rounds = self.hub, self.hub.rounds
        with hub.changed:
            if rounds.is_idle(len(hub.live())):
                hub.tick(rounds.deadline_s())
        self._tidier.tidy()  # many chunks were received meanwhile
        self._look_round()
        if rounds.is_hopeless:
            raise UserError(
                f"{rounds.refused.total()} contributions in a row were refused, and none "
                f"was merged: {hub.last_refusal}"
            )
        if rounds.is_stuck:
            raise UserError(
                f"round {round_.version + 1} has all that it waits for and is below its quorum "
                f"of {self._strategy.policy.quorum}, since {hub.last_refusal}; drain that site, or "
                "set round.quorum, and continue with --resume"
            )
        with hub.changed:
            absent = self._registry.absent(time.monotonic())
            owing = rounds.owing(hub.live())
            missing = [name for name in absent if name in owing]
        if missing and not is_paused:
            text = f"round {round_.version + 1} waits for {', '.join(missing)}"
            hub.event("paused", None, text)
        return bool(missing)

    def _look_round(self) -> None:
        """Notice sites that fell silent, reports of quality, and that the run is to stop."""
        self.hub.notice()
        self._evaluator.take()
        heed_stop(self.hub)

    def _absence(self, round_: Round[Contribution]) -> UserError | RunStopped:
        """Why a round will not close."""
        policy = self._strategy.policy
        with self.hub.changed:
            live, sites = self.hub.live(), self._registry.sites
            owing = self.hub.rounds.owing(live)
            # One that joined meanwhile has had no time to come round.
            since_s = time.monotonic() - policy.patience_s
            here = [name for name in live if sites[name].joined_s <= since_s]
            why = {name: f"connected, at step {sites[name].step}" for name in here}
            why |= self.hub.shut_out
            told = [f"{name} ({why[name]})" if name in why else name for name in owing]
        kind: type[UserError | RunStopped] = RunStopped
        mend, below = "bring the sites back", ""
        if policy.quorum < policy.num_sites:
            below = f": it is below its quorum of {policy.quorum}"
        if {*owing} <= {*here}:
            kind = UserError
            mend = (
                "mend a script that does not come back to `site`, or in a loop of its own calls no "
                "site.after_step(), or raise round.patience_s"
            )
        return kind(
            f"round {round_.version + 1} waits for {', '.join(told)}, and no site has taken a step "
            f"for {policy.patience_s:g} s{below}; {mend} and continue with --resume, or "
            f"{'lower' if below else 'set'} round.quorum"
        )

    def _await_farewells(self, patience_s: float) -> None:
        """Until no site is there any more, but not for ever."""
        hub, deadline_s = self.hub, time.monotonic() + patience_s
        with hub.changed:
            while hub.live() and time.monotonic() < deadline_s:
                hub.tick()
        hub.changed.flush()

    def _compare_weights(self, model: GlobalModel) -> None:
        """Tell of sites that ended with other weights."""
        mine = hash_state(model.state)
        for site, theirs in self.site_sha256().items():
            if theirs and theirs != mine:
                why = f"it ended with weights {theirs[:12]}, the coordinator with {mine[:12]}"
                mend = "run the same libraries on the same kind of device at every site"
                found = Finding("different_weights", site, None, model.version, why, mend)
                self.hub.event("finding", site, found.text, **found.details)

    # After each version --------------------------------------------------------------------

    def _after_version(self, model: GlobalModel, before: int) -> None:
        rounds, config = self.hub.rounds, self.config
        now, rounds_between = rounds.progress, -(-(config.eval.every or 0) // self._strategy.h)
        if rounds.is_done or _crosses(rounds_between, before, now):
            self._evaluator.ask()
        if not self._privacy and _crosses(config.checkpoint.every, before, now):
            self.checkpoint(model)

    def checkpoint(self, model: GlobalModel) -> None:
        """Write everything that a resumed run needs."""
        totals, hub = self.totals, self.hub
        totals.rejected, totals.rejoins = hub.rejected, self._registry.rejoins
        totals.dropped = hub.rounds.dropped
        row = asdict(totals) | {"wall_s": self.elapsed_s()}
        self._version_lines.wait()
        meta: dict[str, Any] = {"totals": row, "claim": hub.agreement.agreed}
        meta |= {"gate": hub.gate.state(), "began": hub.began}
        meta |= {"config": to_tree(self.config), "step": hub.rounds.run_step}
        if hub.masking:
            meta["masks"] = hub.masking.state()
        if self._privacy:
            meta["privacy"] = self._privacy.state_dict()
        versions = list(model.versions)
        model.save(self._folder / "checkpoint", meta)
        told = {"versions": versions} | ({"spent": self._privacy.steps} if self._privacy else {})
        self._record({"kind": "event", "event": "checkpoint", "site": None, **told})
        if versions != self._saved:
            # Sites keep what they need to go on from the one before, too: this one may be damaged.
            durable, self._saved = self._saved, versions
            hub.durable_version = model.version_of(durable)
            if hub.masking:
                with hub.changed:
                    hub.masking.note_durable(durable)

    def _write(self, event: str, site: str | None, text: str, **details: Any) -> None:
        self._record({"kind": "event", "event": event, "site": site, "text": text, **details})


def _untold(strategy: Strategy) -> tuple[str, ...]:
    """What directions do not tell."""
    if strategy.share or strategy.up.mask_bits:
        return ("agreement", "backward", "cosines")
    return ("backward",) if strategy.hook and not strategy.overlap.tau else ()


def _crosses(every: int, before: int, now: int) -> bool:
    """Whether a multiple of `every` lies above `before` and not above `now`; never if it is 0."""
    return bool(every) and now // every > before // every
