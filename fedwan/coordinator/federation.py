"""What the calls of sites and the round loop share: the state machines, under one lock.

It is never held while bytes are checked, merged or sent, nor while files are made, written or
closed.
"""

from __future__ import annotations

import math
import threading
import time
import uuid
from collections import defaultdict
from collections.abc import Mapping
from typing import Any

from fedwan.codecs import Payload
from fedwan.codecs.payload import Source
from fedwan.coordinator.intake import Contribution, Intake
from fedwan.coordinator.mask_keys import Masking
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.records import Totals
from fedwan.coordinator.snapshots import Snapshots
from fedwan.coordinator.telling import Event, TellingLock
from fedwan.errors import NotJoined, PayloadError
from fedwan.link import wire_pb2 as wire
from fedwan.output.records import SPENT
from fedwan.protocol.agreement import Agreement
from fedwan.protocol.evaluation import Evaluation
from fedwan.protocol.gate import Gate
from fedwan.protocol.limits import Allowance, Refusals, shown
from fedwan.protocol.policy import Verdict
from fedwan.protocol.registry import Registry, Verb
from fedwan.protocol.round import Key, Merge
from fedwan.protocol.rounds import Rounds

TICK_S = 0.5
"""How often the run looks for lost sites while nothing arrives."""

HALT_S = 2.0
"""Between two looks, after which this process itself did not run, or was busy."""

CLOCKS_S = 60.0
"""By which a site may count more seconds than have passed here: clocks differ, and may be set."""

LONGEST_FAILURE = 1000
"""Characters of how a site says that it failed."""

CoordinatorRounds = Rounds[Contribution, Payload]
"""The machine with what the coordinator puts in."""


class Federation:
    """What the round loop and the operator do; `Servicer` adds what sites can ask."""

    def __init__(
        self,
        run_id: str,
        registry: Registry,
        agreement: Agreement,
        on_event: Event,
        chunk_bytes: int,
        config_sha256: bytes = b"",
    ) -> None:
        self.changed = TellingLock(on_event)
        self.event = self.changed.tell
        self.registry = registry
        self.agreement = agreement
        self.evaluation = Evaluation(asks_all=False)
        self.gate = Gate(0.0, 1)
        """Refuses contributions for their size; this one none."""
        self.masking: Masking | None = None
        """Where contributions travel under masks."""
        self.farewells: dict[str, wire.Farewell] = {}
        """The last of each site."""
        self.unmerged = Totals()
        """Time and bytes of farewells, and of contributions that were dropped or refused."""
        self.shut_out: dict[str, str] = {}
        """Why a site is not there, as far as it is known."""
        self.rejected = 0
        self.last_refusal = ""
        self.initial: tuple[str, Source] | None = None
        """The initial weights as uploaded, once they are whole, and by which site."""
        self.model: GlobalModel | None = None
        self.durable_version = 0
        self.stop_text = ""
        """Why the run is over; empty while it is not."""
        self.deciding = threading.Lock()
        """Held by the operator's decisions, one at a time."""
        self.start_id = uuid.uuid4().hex
        self._run_id = run_id
        self._config_sha256 = config_sha256
        self._rounds: CoordinatorRounds | None = None
        self._intake: Intake | None = None
        self._chunk_bytes = chunk_bytes
        self.is_complete = False
        self._refusals: dict[str, Refusals] = defaultdict(Refusals)
        self._untold: dict[str, dict[str, float]] = defaultdict(dict)
        """Time and bytes of each site's refusals since the last one that was told."""
        self._joins: dict[str, Allowance] = defaultdict(Allowance)
        """Of new sessions, each of which is in the journal, and of layouts to be read."""
        self._reading = threading.Lock()
        self.false_openers: set[str] = set()
        """Sites that have sent other initial weights than they had said."""
        self.began = time.time()
        """When the run began, however often it was started, in Unix seconds."""
        self._began_s = self._looked_s = time.monotonic()
        self._snapshots = Snapshots()
        self._certificates: dict[str, bytes] = {}
        """By site, the one that the journal told of last."""
        self._last_refused: dict[tuple[str, int], tuple[object, ...]] = {}
        """By site and fragment, what was refused last, and why."""

    @property
    def rounds(self) -> CoordinatorRounds:
        """The rounds' state, once the run has begun."""
        if self._rounds is None:
            raise NotJoined("the run has not begun; join first")
        return self._rounds

    @property
    def intake(self) -> Intake:
        """Contributions on their way in, once the run has begun."""
        if self._intake is None:
            raise NotJoined("the run has not begun; join first")
        return self._intake

    def passed_s(self) -> float:
        """Seconds since the run began, those of a machine that slept among them; at most."""
        return CLOCKS_S + max(time.time() - self.began, time.monotonic() - self._began_s)

    def start(self, rounds: CoordinatorRounds, intake: Intake) -> None:
        """The sites agree: admit them."""
        with self.changed:
            self._rounds, self._intake = rounds, intake
            rounds.is_over = bool(self.stop_text)
            self._follow()

    # The round loop ------------------------------------------------------------------------

    def tick(self, until_s: float = math.inf) -> None:
        """Wait until something changes or it is time, but not for long; the lock is held."""
        left_s = until_s - time.monotonic()
        self.changed.wait(left_s if 0.0 < left_s < TICK_S else TICK_S)

    def live(self) -> list[str]:
        """Sites that are there now."""
        with self.changed:
            return self.registry.live(self._look())

    def _look(self) -> float:
        """The time, at which sites may be found silent: not for what passed while nobody looked."""
        now_s = time.monotonic()
        if (halted_s := now_s - self._looked_s) > HALT_S:
            self.registry.excuse(halted_s, now_s)
        self._looked_s = now_s
        return now_s

    def missing_of_initial(self) -> dict[str, int]:
        """Chunks of initial weights that are still on their way, by site."""
        with self.changed:
            kind = wire.UploadHeader.INITIAL
            open_ones = [up for up in self.intake.open_of() if up.kind == kind]
            found = {upload.key.site: self.intake.find(upload) for upload in open_ones}
        return {site: len(there.missing()) for site, there in found.items() if there}

    def refuse_initial(self, site: str, text: str) -> None:
        """The initial weights that a site has sent are not those that the sites agreed on."""
        with self.changed:
            self.initial = None
            self.false_openers.add(site)
        self._refuse(site, text)

    def set_model(self, model: GlobalModel) -> None:
        """The global weights are here."""
        with self.changed:
            self.model, self.initial = model, None
            self.changed.notify_all()

    def advance(self) -> tuple[Verdict, list[Merge[Contribution]]]:
        """See `Rounds.advance`."""
        with self.changed:
            if self.masking and self.masking.is_deciding:
                self.tick()
                return "wait", []
            now_s = self._look()
            gone = self.registry.absent(now_s)
            num_live, moved_s = len(self.live()), self.registry.moved_s
            verdict, merges = self.rounds.advance(now_s, num_live, gone, moved_s)
            present = self.rounds.present
            if self.masking:
                merges = self._of_present_weights(merges)
                # What is merged now cannot be taken out of the sum, whoever is let go meanwhile.
                at = present.fragment.index, present.version
                self.masking.asked[at] = [merge.key.site for merge in present.merged]
            if verdict == "close" and not self.rounds.updates.keeps_past:
                self._snapshots.clear()
            if verdict == "close" and present.is_held:
                merges = self._sift(merges)
            return verdict, merges

    def _of_present_weights(self, merges: list[Merge[Contribution]]) -> list[Merge[Contribution]]:
        """Without those of others under masks, which would not come off: some came before these."""
        found, masking, model = [], self.masking, self.model
        assert masking and model
        for merge in merges:
            key, bundle = merge.key, merge.contribution.bundle
            try:
                assert bundle is not None, "none is taken without masks"
                masking.check(key, bundle, model.known_hash(key.fragment, key.version))
                found.append(merge)
            except PayloadError as error:
                self.rounds.leave_out(merge)
                self.refuse_contribution(key, str(error), merge.contribution.work)
        return found

    def _sift(self, merges: list[Merge[Contribution]]) -> list[Merge[Contribution]]:
        """What is merged of all that a round was given where nothing tells what is usual."""
        merged = self.rounds.present.merged  # these are the last of it
        first = len(merged) - len(merges)
        found = self.gate.odd_ones([merge.contribution.measures.figures() for merge in merged])
        odd = {place - first: why for place, why in found.items() if place >= first}
        for place, why in odd.items():
            self.rounds.leave_out(merges[place])
            self.refuse_contribution(merges[place].key, why, merges[place].contribution.work)
        return [merge for place, merge in enumerate(merges) if place not in odd]

    def oversized(self, key: Key, figures: Mapping[str, float]) -> str:
        """The gate's objection to a contribution; where most have one, this round is its first."""
        present, num_taken = self.rounds.round, self.rounds.num_taken(key.fragment)
        problem = self.gate.objection(key.fragment, key.site, figures, num_taken)
        if problem and present and present.fragment.index == key.fragment:
            if self.gate.is_warming(key.fragment) and not present.is_held:
                present.is_held = True
                text = "most sites' contributions are above what was merged before: they are "
                text += "compared with one another from now on, as in a run's first rounds"
                self.event("warning", None, text)
        return problem

    def publish(self, payload: Payload, *, own: str = "") -> None:
        """See `Rounds.publish`; frees the contributions that are done with."""
        with self.changed:
            done = self.rounds.publish(payload, own=own)
            for key, contribution, _, _ in self.rounds.present.merged:
                self.gate.note(key.fragment, contribution.measures.figures())
            for (fragment, version, site), work in self.rounds.outdated:
                late = f"{site}'s contribution to version {version} is dropped, it waited until "
                late += f"{self.rounds.versions[fragment]}"
                self.event("late", site, late, **self.unmerge(work))
            self.intake.forget(*self.rounds.least_wanted())
            self.changed.notify_all()
        for contribution in done:
            contribution.payload.close()
        self.intake.free()

    def finish(self, text: str, is_complete: bool = False) -> None:
        """Tell every site that the run is over, and whether it has done what it was to do."""
        with self.changed:
            self.stop_text = self.stop_text or text
            self.is_complete = self.is_complete or is_complete
            if self._rounds is not None:
                self._rounds.is_over = True
            for name in self.registry.sites:
                self.registry.tell(name, wire.CoordinatorSignal.STOP, text, self.is_complete)
            self.changed.notify_all()

    def notice(self) -> list[str]:
        """Tell of sites that are heard again, and of those that have fallen silent: these."""
        with self.changed:
            now_s, sites = self._look(), self.registry.sites
            lost, returned = self.registry.notice(now_s)
            silent_s = {n: now_s - max(sites[n].heard_s, sites[n].joined_s) for n in lost}
            self._release()
        for name in returned:
            self.event("back", name, f"{name} is heard again")
        for name in lost:
            self._snapshots.clear(name)
            why = self.shut_out.get(name, "")
            text = f"{name} has fallen silent{why and ': '}{why}"
            self.event("lost", name, text, heard=time.time() - silent_s[name])
        return lost

    def fail(self, site: str, text: str) -> None:
        """A site's service says how its training has failed: told once the site is silent.

        Or at once, of one that is not in this run.
        """
        with self.changed:
            entry = self.registry.sites.get(site)
            if entry is not None:
                text = text.removeprefix(f"site {site}: ")
                self.shut_out[site] = text = shown(text, LONGEST_FAILURE)
            is_gone = entry is not None and (entry.is_lost or not entry.session)
        if entry is None:
            self._refuse("", text)
        elif is_gone:
            self.event("failed", site, f"{site}: {text}")

    # Membership ----------------------------------------------------------------------------

    def decide(self, verb: Verb, site: str, *, has_begun: bool = False) -> None:
        """The operator has decided on a site, and `Registry.objection` has nothing to say.

        `has_begun`: a site that is admitted is waited for once it has joined, as in a run that has
        begun.
        """
        done: list[Contribution] = []
        with self.changed:
            sending = self._intake.open_of(site) if self._intake else []
            awaited = () if self.masking else sending
            self.registry.decide(verb, site, awaited, has_begun or self._rounds is not None)
            if verb == "eject":
                self._snapshots.clear(site)
            # Under masks nobody may be in a sum who will not help to take them off.
            is_out = verb == "eject" or (verb == "drain" and self.masking is not None)
            if is_out and self._intake and self._rounds:
                for upload in sending:
                    self._intake.close(upload, self.registry.refusal(site))
                done = self._rounds.forget(site)
            self._release()
            self._follow()
        for contribution in done:
            contribution.payload.close()

    def survey(self) -> dict[str, Any]:
        """Where the run stands, for whom it waits, and its sites; times in Unix seconds."""
        with self.changed:
            now_s, rounds, registry = time.monotonic(), self._rounds, self.registry
            to_unix = time.time() - now_s
            round_ = rounds.round if rounds else None
            if rounds is None or round_ is None:  # who sends the initial weights is waited for, too
                awaited = [registry.first] if rounds else self.agreement.missing()
            else:
                awaited = rounds.owing(registry.live(now_s))
            sending = [up.key.site for up in self._intake.open_of()] if self._intake else []
            rows = [
                {
                    "site": name,
                    "state": registry.state_of(name, now_s, name in awaited, name in sending),
                    "version": site.version,
                    "heard": site.heard_s + to_unix if site.heard_s else None,
                    "error": self.shut_out.get(name, ""),
                }
                for name, site in registry.sites.items()
            ]
            return {
                "version": rounds.progress if rounds else 0,
                "since": (round_.began_s if round_ else self._began_s) + to_unix,
                "waits_for": awaited,
                "sites": rows,
            }

    def _release(self) -> None:
        """Let sites go that have nothing on its way in any more, and were to leave."""
        gone = self.registry.release(self._intake.open_of() if self._intake else ())
        if gone:
            self._follow()
        for name in gone:
            self._snapshots.clear(name)
            if self._rounds:
                self.event("leave", name, f"{name} left: it was drained")

    def _follow(self) -> None:
        """Rounds, and the sites' agreement, follow the registry."""
        self.agreement.expect(self.registry.admitted())
        if self._rounds is not None:
            self._rounds.expect(self.registry.awaited())
        self.changed.notify_all()

    def unmerge(self, work: wire.Work) -> dict[str, float]:
        """Count time and bytes of what is part of no merged contribution; as an event tells."""
        self.unmerged.add_work(work)
        return {name: getattr(work, name) for name in SPENT}

    def refuse_contribution(self, key: Key, why: str, work: wire.Work) -> None:
        """Count it, and tell of it."""
        site, present = key.site, self.rounds.round
        # What one overflow has spoilt of fragments that travel at the same time is one try.
        if present is None or present.fragment.index == key.fragment:
            self.rounds.refused[site] += 1
        self.last_refusal = f"contribution of {site} refused: {why}"
        self._refuse(site, self.last_refusal, **self.unmerge(work))

    def _refuse(self, site: str, text: str, **spent: float) -> None:
        with self.changed:
            self.rejected += 1
            untold = self._untold[site]
            untold |= {name: untold.get(name, 0) + value for name, value in spent.items()}
            told = self._refusals[site].tell(shown(text, LONGEST_FAILURE), time.monotonic())
            spent = self._untold.pop(site) if told else {}
        if told:
            self.event("rejected", site or None, told, **spent)
