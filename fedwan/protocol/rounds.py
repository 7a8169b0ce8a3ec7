"""The rounds of a run as a state machine: inputs in, effects out, the time passed in.

    settled, arrive     a contribution is announced; it is whole and checked
    begin, advance      the next round begins; what is merged now, and whether the round closes
    publish             its update is out; which contributions are done with
    answer, tell        what a site that asks for an update is told

The coordinator drives it with payloads and its own clock, the planner with numbers of bytes in
virtual time. Not locked.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Sequence
from typing import TYPE_CHECKING, Any, Generic, Literal

from fedwan.errors import PayloadError
from fedwan.fragments import Fragment, due_step, next_due, rounds_done
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.pace import Paces, RoundTimes
from fedwan.protocol.policy import Verdict
from fedwan.protocol.round import C, Key, Merge, Round
from fedwan.protocol.updates import U, Updates

if TYPE_CHECKING:
    from fedwan.strategy import Strategy

COUNTS_OF_A_SAMPLE = 1 << 10
"""The most that a counter grows by: passes, samples, or tokens."""
HOPELESS_ROUNDS = 3
"""Contributions of a site, none of which was taken, after which nothing is hoped of it."""


class Rounds(Generic[C, U]):
    """The rounds of all fragments."""

    def __init__(
        self,
        strategy: Strategy,
        fragments: Sequence[Fragment],
        site_names: Sequence[str],
        num_versions: int,
        batch: int,
        versions: Sequence[int] = (),
        samples: int = 0,
    ) -> None:
        self.versions = list(versions) or [0] * len(fragments)
        """By fragment, what sites can have."""
        self.nominal = strategy.h * batch
        """Samples of a site in a round."""
        self.samples = samples
        self.refused: Counter[str] = Counter()
        """Contributions of each site that were refused since the last update went out."""
        self.setbacks: Counter[str] = Counter()
        """Of each site since then: processes that took another's place, and calls that were refused
        before they were read. They end no run, as refused contributions may."""
        self.dropped = 0
        """Contributions that came too late to be merged."""
        self.latest: list[str] = []
        """Sites whose contributions are in the latest update."""
        self.outdated: list[tuple[Key, wire.Work]] = []
        """Contributions that were whole, and grew too old for any update with the latest one."""
        self.is_over = False
        self.round: Round[C] | None = None
        self._strategy = strategy
        self._policy = strategy.policy
        self._fragments = fragments
        self._names = list(site_names)
        self.awaited = list(site_names)
        """Sites that rounds wait for."""
        self._num_versions = num_versions
        self.updates: Updates[U] = Updates(fragments, keeps_past=strategy.policy.leaves_behind)
        self._batch = batch
        self._paces = Paces(strategy.h, strategy.least_steps, len(fragments))
        self._durations = [RoundTimes() for _ in fragments]
        self._whole: list[dict[tuple[int, str], C]] = [{} for _ in fragments]
        """By version and site, in the order in which they became whole."""
        self._closed: dict[int, Sequence[Merge[C]]] = {}
        """By fragment, what its next round is made of, where an earlier start has closed it."""
        self._merged: list[dict[str, tuple[int, int]]] = [{} for _ in fragments]
        """Of each site, the version that its latest merged contribution started from, and the one
        that it became part of."""
        self._left: set[Key] = set()
        """Contributions of processes that are gone, which their successors cannot make again."""
        self.own = [""] * len(fragments)
        """By fragment, the site whose contribution its latest update is, bit for bit; or empty."""
        self.anew_from = [0] * len(fragments)
        """By fragment, the version at which what a strategy keeps at the sites began anew."""
        self._resumed_at = list(self.versions)
        """Whose contributions these are made of, this coordinator does not know."""
        self._last_dropped: dict[tuple[int, str], int] = {}

    def nominal_of(self, fragment: int) -> int:
        """Samples behind a contribution of weight 1."""
        return self.nominal // self._fragments[fragment].per_round

    # Progress ------------------------------------------------------------------------------

    @property
    def version(self) -> int:
        """Whole rounds that every fragment has had."""
        return rounds_done(self._fragments, self.versions)

    @property
    def quorum(self) -> int:
        """Fewest sites that a round may close with."""
        return self._policy.quorum

    @property
    def run_step(self) -> int:
        """Where the run stands: at a pace of the sites' own, the mean of the steps merged."""
        if self._strategy.clock == "versions":
            return self.version * self._strategy.h
        return self.samples * self._strategy.h // (self.nominal * len(self._names))

    @property
    def progress(self) -> int:
        """Outer updates; where sites keep their own pace, as many as their samples make."""
        return self.run_step // self._strategy.h

    @property
    def is_done(self) -> bool:
        """Whether the run has had all its rounds."""
        return self.progress >= self._num_versions

    @property
    def present(self) -> Round[C]:
        """The present round, once one has begun."""
        assert self.round is not None, "a round has begun"
        return self.round

    @property
    def is_stuck(self) -> bool:
        """Whether the round was given all that it waits for, and may not close with what it has."""
        present = self.round
        if present is None or present.is_on_arrival or present.is_closed or present.waiting:
            return False
        return len(present.merged) < self._policy.quorum

    @property
    def is_hopeless(self) -> bool:
        """Whether no site's contribution was fit for several rounds."""
        return bool(self.refused) and all(
            self.refused[name] >= HOPELESS_ROUNDS for name in self.awaited
        )

    # Contributions -------------------------------------------------------------------------

    def settled(self, key: Key) -> Literal["accepted", "stale", ""]:
        """What becomes of a contribution whatever its bytes are; empty where they are wanted."""
        fragment, version, site = key
        if key in self._left:
            return "stale"
        if (version, site) in self._whole[fragment]:
            return "accepted"
        if any(merge.key.version == version for merge in self._closed.get(fragment, ())):
            return "stale"
        if self._policy.max_staleness and self.is_merged(key):
            return "accepted"
        # A site that took the global weights may be ahead of the update that leads to them.
        is_wanted = self._least_wanted(fragment) <= version <= self.versions[fragment] + 1
        # Else one site could make update after update, each of an older version.
        if self._policy.is_on_arrival(self.versions[fragment]):
            is_wanted &= all(name != site for _, name in self._whole[fragment])
        return "" if is_wanted and not self.is_over else "stale"

    def check(self, key: Key, work: wire.Work) -> None:
        """Refuse a contribution of no work, or of more than the schedule has.

        So no site weighs more than one that took all steps; whether it took them, nobody can tell.
        """
        if not work.samples:
            raise PayloadError(
                "contribution of 0 samples announced, which has no weight; "
                "take at least one step between two uploads"
            )
        most = self._most_steps(key.fragment)
        if work.steps > most or work.samples > work.steps * self._batch:
            raise PayloadError(
                f"contribution of {work.samples} samples in {work.steps} steps announced, where "
                f"{most} steps of {self._batch} are the most; start site and coordinator with the "
                "same configuration"
            )

    def _most_steps(self, fragment: int) -> int:
        # Shifted for the first time; and a step that a site repeats that begins anew.
        shifted = self._fragments[fragment]
        return shifted.steps(self._strategy.h) + shifted.offset + 1

    def most_counted(self, fragment: int) -> float:
        """How far a contribution's integer buffers may be above the global ones.

        Any number where sites move different tensors: some count what a site has.
        """
        most = self._most_steps(fragment) * self._batch * COUNTS_OF_A_SAMPLE
        return math.inf if self._strategy.share else most

    def announce(self, key: Key, now_s: float) -> None:
        """A wanted contribution is on its way: its site holds the update before it."""
        fragment, version, site = key
        self._durations[fragment].announce(version, site, now_s)
        self.updates.note_holder(fragment, version, site, self.awaited)

    def note_dropped(self, key: Key, work: wire.Work, now_s: float) -> bool:
        """Count a contribution that is too late, once: it may come in stripes, or again.

        Whether it was counted now, and says what a contribution can say.
        """
        is_last = self._last_dropped.get((key.fragment, key.site)) == key.version
        if self.is_merged(key) or key in self._left or is_last or self.is_over:
            return False
        self._drop(key)
        self._durations[key.fragment].arrive(key.version, key.site, now_s)
        try:
            self.check(key, work)
        except PayloadError:
            return False
        self._paces.note(key.site, work)  # so that its next one is in time
        return True

    def _drop(self, key: Key) -> None:
        self._last_dropped[key.fragment, key.site] = key.version
        self.dropped += 1

    def arrive(self, key: Key, contribution: C, now_s: float) -> None:
        """A wanted contribution is whole and checked."""
        fragment, version, site = key
        self._whole[fragment][version, site] = contribution
        self._durations[fragment].arrive(version, site, now_s)
        present = self.round
        if present and (present.fragment.index, present.version) == (fragment, version):
            if not present.is_closed:
                present.last_s = now_s - present.began_s

    def num_taken(self, fragment: int) -> int:
        """How many contributions are whole, and wait for their update or are part of it."""
        return len(self._whole[fragment])

    def is_merged(self, key: Key) -> bool:
        """Whether a site's contribution to a version, or to a later one, has been merged."""
        start, into = self._merged[key.fragment].get(key.site, (0, 0))
        return into > 0 and start >= key.version

    # Rounds --------------------------------------------------------------------------------

    def begin(self, now_s: float) -> Round[C]:
        """Turn to the fragment whose turn it is."""
        fragment = next_due(self._fragments, self.versions, self._strategy.h, self._num_versions)
        index, version = fragment.index, self.versions[fragment.index]
        is_on_arrival = self._policy.is_on_arrival(version)
        self.round = Round(fragment, version, now_s, is_on_arrival, self._whole[index])
        self.round.merged = list(self._closed.pop(index, []))
        self.round.is_closed = bool(self.round.merged)
        self.round.expect(self.awaited, self._names)
        return self.round

    def close_again(self, fragment: int, merged: Sequence[Merge[C]]) -> None:
        """The next round of a fragment was closed by an earlier start, with these."""
        self._closed[fragment] = merged
        for key, contribution, _, _ in merged:
            self._whole[fragment][key.version, key.site] = contribution

    def expect(self, awaited: Sequence[str]) -> None:
        """Wait for these sites from now on; what is whole of others is merged all the same."""
        if self.awaited == list(awaited):
            return
        self.awaited = list(awaited)
        self._paces.keep(self.awaited)
        quorum = min(self._strategy.policy.quorum, len(self.awaited))
        self._policy = self._strategy.policy._replace(quorum=quorum)
        if self.round is not None:
            self.round.expect(awaited, self._names)
        for index in range(len(self._fragments)):
            self.begin_anew(index)

    def forget(self, site: str) -> list[C]:
        """Drop what is whole of a site and waits to be merged; the contributions done with.

        What the round was given already it is done with when its update is out.
        """
        taken = [merge.key for merges in self._closed.values() for merge in merges]
        taken += self.round.given if self.round else []
        done = []
        for index, whole in enumerate(self._whole):
            keys = [key for key in whole if key[1] == site and Key(index, *key) not in taken]
            done += [whole.pop(key) for key in keys]
        if self.round is not None:
            self.round.expect(self.awaited, self._names)
        return done

    def advance(
        self,
        now_s: float,
        num_live: int,
        gone: Collection[str] = (),
        moved_s: float = -math.inf,
    ) -> tuple[Verdict, list[Merge[C]]]:
        """What the policy says, and which contributions are merged now, in this order.

        `gone`: sites that were here and are not any more. `moved_s`: when one last took a step.
        """
        present, self._paces.gone = self.present, gone
        num_arrived, policy = len(present.whole), self._policy
        if not present.is_on_arrival:
            lacking = present.lacking()
            num_sites = len(present.merged) + len(present.waiting)
            num_arrived = num_sites - len(lacking)
            # A quorum waits neither for who has gone nor for who is refused, or begins anew, again
            # and again.
            tries = self.refused + self.setbacks
            hopeless = sum(name in gone or tries[name] >= HOPELESS_ROUNDS for name in lacking)
            policy = policy._replace(num_sites=max(policy.quorum, num_sites - hopeless))
        index = present.fragment.index
        elapsed_s = now_s - present.began_s
        past_s, idle_s = self._durations[index].past_s, now_s - moved_s
        verdict = policy.decide(num_arrived, elapsed_s, past_s, present.version, num_live, idle_s)
        keys = present.take(closes=verdict == "close")
        merges = [self._merge(present, version, site) for version, site in keys]
        present.merged += merges
        if verdict == "close":
            present.is_closed = True
            if not present.is_on_arrival:
                self._durations[index].close(present.version, present.began_s, present.last_s)
            self.updates.close(index)
        return verdict, merges

    def _merge(self, present: Round[C], version: int, site: str) -> Merge[C]:
        staleness = max(0, present.version - version)
        scale = self._policy.scale(staleness)
        key = Key(present.fragment.index, version, site)
        return Merge(key, present.whole[version, site], staleness, scale)

    def leave_out(self, merge: Merge[C]) -> None:
        """What the round has just closed with is not merged; it is done with like what is."""
        present = self.present
        present.merged.remove(merge)
        present.left_out.append(merge.key)

    def deadline_s(self) -> float:
        """When the present round may close without sites that are late; never where it may not."""
        present = self.present
        if not self._policy.leaves_behind:
            return math.inf
        past_s = self._durations[present.fragment.index].past_s
        return present.began_s + self._policy.deadline_s(past_s)

    def is_idle(self, num_live: int) -> bool:
        """Whether nothing is here that could be merged now."""
        present = self.present
        if present.is_on_arrival:
            return not present.whole or num_live < self._policy.quorum
        lacking = present.lacking()
        return bool(lacking) if present.is_held else present.waiting[:1] == lacking[:1]

    def counts_as(self) -> int:
        """As how many contributions the round's mean is taken by optimisers that count them."""
        is_warmup = self._policy.arrivals_from is not None and not self.present.is_on_arrival
        return len(self.awaited) if is_warmup else 1

    def publish(self, update: U, *, own: str = "") -> list[C]:
        """The round's update is out; contributions that are done with: merged, or too late."""
        present = self.present
        index, version = present.fragment.index, present.version + 1
        self.hold(index, version, update)
        self.own[index] = own
        self.samples += present.samples
        self.latest = [merge.key.site for merge in present.merged]
        merged = self._merged[index]
        for key, contribution, _, _ in present.merged:
            if key not in self._left:
                merged[key.site] = max((key.version, version), merged.get(key.site, (0, 0)))
            self._paces.note(key.site, contribution.work)
        whole, (_, least) = present.whole, self.least_wanted()
        done = [whole.pop((key.version, key.site)) for key in present.given]
        self._left = {key for key in self._left if key.fragment != index or key.version >= least}
        self.outdated = []
        for start, site in [key for key in whole if key[0] < least]:
            key, contribution = Key(index, start, site), whole.pop((start, site))
            self._drop(key)
            self._paces.note(site, contribution.work)
            self.outdated.append((key, contribution.work))
            done.append(contribution)
        return done

    def hold(self, fragment: int, version: int, update: U) -> None:
        """Hand an update out."""
        self.updates.put(fragment, version, update)
        self.versions[fragment] = version
        self.refused.clear()
        self.setbacks.clear()

    def least_wanted(self) -> tuple[int, int]:
        """The fragment of the present round, and the least version that is still wanted of it."""
        index = self.present.fragment.index
        return index, self._least_wanted(index)

    def _least_wanted(self, fragment: int) -> int:
        """What a closed round was not given comes too late, although its update is not out yet."""
        present, round_ = self.versions[fragment], self.round
        if round_ and (round_.fragment.index, round_.version) == (fragment, present):
            present += round_.is_closed
        # A site that keeps a pace of its own waits until it is merged, and a barrier for the site.
        is_owed = self._strategy.clock == "samples" and not self._policy.is_on_arrival(present)
        return present - (0 if is_owed else self._policy.max_staleness)

    def owing(self, live: Collection[str]) -> list[str]:
        """Sites without whose contribution the round could not close.

        On arrival those that a quorum of live sites lacks; where it has one, any that is live.
        """
        present = self.present
        waiting = present.lacking()
        if not present.is_on_arrival:
            return waiting
        if len(live) >= self._policy.quorum:
            return [name for name in waiting if name in live]
        return [name for name in waiting if name not in live] or waiting

    # What sites are told -------------------------------------------------------------------

    def answer(
        self, site: str, fragment: int, version: int, *, waits: bool = True
    ) -> tuple[wire.DownloadHeader.Status, U | None]:
        """What a site that asks for an update gets; if it `waits`, its contribution is for it."""
        update = self.updates.get(fragment, version)
        if update is not None:
            return wire.DownloadHeader.READY, update
        if self.versions[fragment] >= version:
            is_merged = self._merged[fragment].get(site, (0, 0))[1] == version
            # A question of who has the answer is an earlier one, which a network has repeated.
            if waits and is_merged and not self.updates.holds_newest(fragment, site):
                self.begin_anew(fragment)  # it cannot learn from it any more
            return wire.DownloadHeader.SUPERSEDED, None
        return (wire.DownloadHeader.DONE if self.is_over else wire.DownloadHeader.NOT_YET), None

    def others_step(self, now_s: float, site: str) -> int:
        """The step for a site to go on from that was late; 0 if nothing tells.

        That is where the others stand, as past rounds tell, but never beyond what they can take
        before the present round's update lands; or later, if the site is slower than they are, or
        longer on its way: its own contribution shall leave when theirs do, and be there in time.
        """
        present = self.round
        if present is None or present.is_on_arrival or not (speed := self._paces.usual()):
            return 0
        index, h = present.fragment.index, self._strategy.h
        sent_s = self._durations[index].sent_s(present.version, present.began_s, now_s)
        if sent_s is None:
            return 0
        due = due_step(present.fragment, present.version, h, self._num_versions * h)
        most = min(self._strategy.overlap.tau, present.fragment.steps(h) - 1)
        step = due + min(most, math.floor((now_s - sent_s) * speed))
        own = self._paces.of(site)
        until_s = self.deadline_s() - self._durations[index].travel_s(site)
        if own < speed or until_s < sent_s:
            can = math.floor(max(0.0, min(sent_s, until_s) - now_s) * min(own, speed))
            step = max(step, due - max(1, can))
        return max(0, step)

    def tell(self, site: str, fragment: int, **fields: Any) -> wire.DownloadHeader:
        """What holds for this site alone, and these fields."""
        start, into = self._merged[fragment].get(site, (0, 0))
        return wire.DownloadHeader(
            merged_from=start,
            merged_into=into,
            is_own=self.own[fragment] == site,
            anew_from=self.anew_from[fragment],
            steps=self._paces.steps(site),
            run_step=self.run_step,
            **fields,
        )

    def is_behind(self, site: str, checkpoint: int) -> bool:
        """Whether a new process, of this checkpoint, takes the steps of the last round again.

        Its predecessor's contribution is merged, and what it knew after it is lost.
        """
        if not self._strategy.repeats(len(self._fragments)) or self.is_done:
            return False
        last = (self.versions[0] - 1, self.versions[0])
        return checkpoint == last[0] and self._merged[0].get(site, last) == last

    def note_back(self, site: str, checkpoint: int, *, repeats: bool = True) -> bool:
        """A process is new, of this checkpoint; whether that is older than the run, for good.

        Others must not be corrected for what it lost; where it cannot make again what was sent, as
        no checkpoint is of all fragments, never. Without `repeats` it cannot have the weights to
        take the last steps again from.
        """
        self.updates.forget_holder(site)
        if repeats and self.is_behind(site, checkpoint):
            return False
        if self._strategy.contributes == "delta" and self._strategy.clock == "versions":
            self._leave(site, checkpoint, repeats)
        return self._strategy.clock == "versions" and checkpoint < self.versions[0]

    def _leave(self, site: str, checkpoint: int, repeats: bool) -> None:
        """What a process has sent counts, but who cannot make it again learns nothing of it."""
        count = len(self._fragments)
        is_exact = self._strategy.is_exact(count)
        made = checkpoint + (repeats and self._strategy.repeats(count)) if is_exact else 0
        for fragment, merged in enumerate(self._merged):
            start, into = merged.get(site, (0, self._resumed_at[fragment]))
            has_lost = into > checkpoint if is_exact else self.versions[fragment] > 0
            sent = [version for version, name in self._whole[fragment] if name == site]
            sent += [start] if site in merged else []
            if left := {Key(fragment, version, site) for version in sent if version >= made}:
                merged.pop(site, None)
                self._left |= left
            if left or has_lost:
                self.begin_anew(fragment)

    def begin_anew(self, fragment: int) -> None:
        """What a strategy keeps at the sites begins anew at all of them, with the next version.

        It may hold together over all sites, which it no longer does where a site has not learnt
        from an update that it is merged into.
        """
        self.anew_from[fragment] = self.versions[fragment] + 1

    def go_back_to(self, anew_from: Sequence[int]) -> None:
        """An earlier start had `anew_from`, maybe at versions that are taken back."""
        for fragment, version in enumerate(anew_from):
            self.anew_from[fragment] = min(version, self.versions[fragment] + 1)
