"""A site's place in the run: which version of each fragment it holds, and how it came there.

It finds its place when it joins, from the coordinator's versions and its own checkpoints, and anew
when its steps cannot be merged. Touched are the replica, the strategy's hook, what error feedback
owes, and checkpoints; whole weights are fetched. Nothing here knows what is on its way.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from fedwan.codecs import Codec
from fedwan.codecs.masked import first_sizes
from fedwan.codecs.payload import Source
from fedwan.fragments import Fragment, due_step, reached_step
from fedwan.link import wire_pb2 as wire
from fedwan.site.checkpoint import Ledger, Residuals, SiteCheckpoints
from fedwan.site.flight import Anew
from fedwan.site.masker import Masker
from fedwan.site.meter import Meter, Work
from fedwan.site.replica import Replica
from fedwan.site.stub import Asked, CoordinatorStub, is_merged
from fedwan.state import State
from fedwan.strategy import Landing, SiteHook, Strategy

log = logging.getLogger(__name__)

_BEHIND = wire.DownloadHeader.BEHIND
"""Updates lead from the weights that this site has to the present ones."""


@dataclass
class Place:
    """One site's."""

    strategy: Strategy
    number: int
    """Of the site, in the order of their names."""
    num_steps: int
    replica: Replica
    hook: SiteHook
    checkpoints: SiteCheckpoints
    stub: CoordinatorStub
    meter: Meter
    masker: Masker | None = None

    def __post_init__(self) -> None:
        strategy = self.strategy
        self.fragments = strategy.fragments(self.replica.layout)
        self.parts = [strategy.part(fragment, self.number) for fragment in self.fragments]
        """What this site contributes of each fragment."""
        count = len(self.fragments)
        self.has_gradients = strategy.contributes == "gradient"
        self.keeps_pace = strategy.clock == "samples"
        self.is_mirrored = strategy.is_mirrored
        assert count == 1 or not self.keeps_pace, "at a pace of their own sites send all at once"
        self.is_exact = strategy.is_exact(count)
        """Whether a contribution can be sent again, bit for bit, by a successor of this process."""
        self.can_repeat = strategy.repeats(count)
        """Whether a successor that lacks the last checkpoint takes the steps to it again."""
        self.follows = not self.has_gradients and not self.keeps_pace
        """Whether updates, all of which it takes, lead from its global weights to the next ones."""
        self.is_behind = False
        """Whether it is made again only for what is known after it: it is merged already."""
        self.versions = [0] * count
        """Per fragment, what this site holds."""
        self.steps, self.run_step = strategy.h, 0
        """At a pace of its own: steps until the next upload, and where the run stands."""
        self.residuals = Residuals(count)
        self.marks = [Work(0, 0)] * count
        """Per fragment, all work until its last contribution left."""
        self.sizes = [first_sizes(part.layout) for part in self.parts]
        """Of each fragment's parameters, what the next contribution under masks is rounded by."""
        self._anew: dict[int, int] = {}  # by fragment, the version at which the hook began anew
        self._others = (0, 0.0)
        """Step of the sites that keep up, 0 for nothing said, and when that was told."""

    def reached(self, versions: Sequence[int]) -> int:
        """Where a site stands that holds these versions."""
        return reached_step(self.fragments, versions, self.strategy.h, self.num_steps)

    def due(self, step: int, flying: Collection[int], landing: Collection[int]) -> list[Fragment]:
        """What leaves after a step; of fragments in flight, those that land first."""
        if self.keeps_pace:
            is_due = self.meter.total.since(self.marks[0]).steps >= self.steps
            return list(self.fragments) if is_due else []
        h, rounds = self.strategy.h, self.num_steps // self.strategy.h

        def due(fragment: Fragment) -> bool:
            index = fragment.index
            version = self.versions[index] + (index in landing)
            is_free = index in landing or index not in flying
            # A site that starts over near the end may hold some fragments' last versions.
            is_to_come = version < rounds * fragment.per_round
            return is_free and is_to_come and step == due_step(fragment, version, h, self.num_steps)

        return [fragment for fragment in self.fragments if due(fragment)]

    # What lands ----------------------------------------------------------------------------

    def note(self, header: wire.DownloadHeader) -> None:
        """What the coordinator said of this site's pace."""
        self.steps = int(header.steps) or self.strategy.h
        self.run_step = int(header.run_step)

    def note_sizes(self, header: wire.DownloadHeader, fragments: Sequence[Fragment]) -> None:
        """What these fragments' next contributions under masks are rounded by."""
        at = 0
        for fragment in fragments if header.sizes else ():
            end = at + len(self.sizes[fragment.index])
            self.sizes[fragment.index], at = header.sizes[at:end], end

    def seal(self, fragment: Fragment, header: wire.UploadHeader, weights_sha256: str) -> Codec:
        """How a fragment's contribution is coded, at rank 0; its masks' shares join its header."""
        index, up = fragment.index, self.strategy.up
        if self.masker is None:
            return up
        up, bundle = self.masker.seal(up, index, header.version, weights_sha256, self.sizes[index])
        header.bundle.CopyFrom(bundle)
        return up

    def renew(
        self, header: wire.DownloadHeader, fragments: Sequence[Fragment], checkpoint: int = 0
    ) -> None:
        """Have the hook begin anew, once, if all did since the checkpoint of a version."""
        for fragment in fragments:
            index, version = fragment.index, self.versions[fragment.index]
            if checkpoint > header.anew_from:
                self._anew[index] = header.anew_from
            if self._anew.get(index, 0) < header.anew_from <= version:
                self._anew[index] = header.anew_from
                self.hook.forget(fragment)
                log.info("state of the strategy begins anew at version %d", version)

    def owe(self, fragment: Fragment) -> None:
        """Where the weights hold what error feedback owes, put it there."""
        if self.strategy.owes == "weights":
            self.replica.owe(self.residuals.of(fragment))

    # Left behind ---------------------------------------------------------------------------

    def note_others(self, told: wire.Receipt | wire.DownloadHeader) -> None:
        """Where sites stood which keep up, as the coordinator said of a round that went on."""
        if told.others_step:
            self._others = (told.others_step, time.monotonic())

    def ahead(self, step: int, flying: Collection[int] = ()) -> int:
        """The step to go on from where others went on without this site; collective.

        It is theirs, but before its own next contribution, which would else come too late as well.
        """
        if not self.strategy.policy.leaves_behind or self.keeps_pace:
            return step

        def present() -> int:
            told_step, at_s = self._others
            self._others = (0, 0.0)
            return told_step and told_step + int((time.monotonic() - at_s) * self.meter.speed())

        h, num_steps = self.strategy.h, self.num_steps
        due = min(
            due_step(f, self.versions[f.index] + (f.index in flying), h, num_steps)
            for f in self.fragments
        )
        return max(step, min(self.replica.group.lead(present), due - 1))

    # Beginning, and beginning anew ---------------------------------------------------------

    def take_weights(self) -> wire.DownloadHeader:
        """Take the present global weights whole, as both global and local."""
        header = self._fetch("")
        self.replica.adopt()
        return header

    def holds_present(self) -> bool:
        """Whether its global weights are the present ones, which it has afterwards."""
        header = self._fetch(self.replica.held_sha256(self.fragments))
        return header.status == wire.DownloadHeader.HELD

    def keep(self, fragment: Fragment) -> None:
        """Write the global weights that a fragment has now, for a successor."""
        if self.follows:
            self.checkpoints.keep_global(fragment, self.versions[fragment.index])

    def advance(self, fragment: Fragment, payload: Source) -> None:
        """A fragment's global weights move by an update."""
        self.checkpoints.await_global(fragment)
        self.replica.advance(payload, fragment, self.strategy.down)

    def _follow(self, versions: Sequence[int], held: Sequence[int | None]) -> wire.DownloadHeader:
        """Have the present global weights: those held, with the updates missed, or all anew.

        Where versions follow each other without this site, what was missed meanwhile, too.
        """
        header = wire.DownloadHeader(status=_BEHIND, versions=versions)
        while header.status == _BEHIND:
            if not all(map(self._advance_to, self.fragments, held, header.versions)):
                header = self._fetch("")
                if not self.strategy.policy.leaves_behind:
                    break
            now = list(header.versions)
            header, held = self._fetch(self.replica.held_sha256(self.fragments), now), now
        return header

    def _advance_to(self, fragment: Fragment, held: int | None, version: int) -> bool:
        """Have a fragment's global weights of a version, if updates lead there from those held."""
        while held is not None and held < version:
            update = self.stub.fetch_published(fragment.index, held + 1)
            if update.payload is None:
                return False
            self.advance(fragment, update.payload)
            held += 1
        return held is not None

    def _fetch(
        self, held_sha256: str, held: Sequence[int] = (), repeats: int = 0
    ) -> wire.DownloadHeader:
        """Have the weights that the coordinator has, which sends what this site has not.

        Nothing is sent where `held_sha256` is theirs, or they are of the version before the one to
        which this site `repeats` the steps, or where it can follow the updates from the versions
        `held`.
        """
        asked = Asked(kind=Asked.GLOBAL, version=repeats, held_sha256=held_sha256)
        asked.held_versions.extend(held)
        weights, header = self.stub.fetch_weights(asked)
        if header.status == _BEHIND:
            return header
        if header.status != wire.DownloadHeader.HELD:
            for fragment in self.fragments:
                self.checkpoints.await_global(fragment)
            self.replica.load_base(weights)
        self.note_others(header)
        self.versions = list(header.versions)
        self.note_sizes(header, self.fragments)
        return header

    def _mirror(
        self, header: wire.DownloadHeader
    ) -> tuple[Mapping[str, Tensor] | None, wire.DownloadHeader]:
        """The coordinator's optimisers, of the weights that this site has.

        These come anew where a quorum went on meanwhile.
        """
        while True:
            outer, of = self.stub.fetch_outer()
            if of == self.versions:
                return outer, header
            header = self._fetch("")

    def catch_up(self) -> wire.DownloadHeader:
        """The last round's steps are taken again: the present global weights are its update."""
        (version,) = self.versions
        header = self._follow([version + 1], [version])
        self.is_behind = False
        if not header.merged_into:  # the coordinator is new, too: it had waited for this site
            header.merged_from, header.merged_into = self.versions[0] - 1, self.versions[0]
        return header

    def start_over(self, anew: Anew) -> None:
        """Take the global weights; without what error feedback owes, if that was refused.

        Where the coordinator is lost meanwhile, nothing is done yet that cannot be done again.
        """
        is_refused, held, unpaid = anew
        versions = [version or 0 for version in held]
        if self.is_behind:  # what it sent is merged, and this it has lost
            header, self.is_behind = self._fetch("", repeats=versions[0] + 1), False
        else:
            header = self._follow(versions, held) if self.follows else self._fetch("")
        outer = None
        if self.is_mirrored:
            outer, header = self._mirror(header)
        self.replica.adopt()
        self.note(header)
        for index, (version, debt) in unpaid.items():
            # Only the receipt was late, if it is merged; of other fragments nobody says.
            if index or not header.merged_into or header.merged_from != version:
                self.residuals.settle(self.fragments[index], version, debt)
        owed = self.residuals.ledger(Work(0, 0))._replace(versions=tuple(self.versions))
        for fragment in self.fragments:
            self.keep(fragment)
        if is_refused:
            # The optimisers too: moments that are not finite would spoil every later step. So would
            # layers and statistics that are the site's own.
            self.replica.load_optimizers({})
            self.checkpoints.restore_own()
        if outer is not None:
            self.replica.load_optimizers(outer, is_whole=True)
        self._take_over(self.versions, None if is_refused else owed)
        self.renew(header, self.fragments)
        if is_refused and self.can_repeat:
            ledger = self.residuals.ledger(Work(0, 0))
            self.checkpoints.save_start(self.versions[0], ledger)

    def _take_over(self, versions: Sequence[int], ledger: Ledger | None) -> None:
        """Go on from these versions, with what a predecessor of this process left."""
        self.versions = list(versions)
        self.residuals.restore(self.fragments, versions, ledger)
        for fragment in self.fragments:
            self.owe(fragment)
        self.marks = [self.meter.total] * len(versions)
        self.hook.on_adopt()

    def find(self, versions: list[int], run_step: int) -> tuple[int, bool]:
        """Find this site's place in a run at these versions: the step to go on from.

        And whether it is to begin with the contribution that the steps until there are for. Weights
        are the coordinator's, the rest is of this site's nearest checkpoint. If that is of the
        version before, the steps of the last round are taken again.
        """
        kept = self.checkpoints.versions()
        header, outer = self._find_weights(versions, max(kept, default=0))
        self.note(header)
        version, is_begun = self.versions[0], any(self.versions)
        if self.is_exact and version + 1 in kept:
            return self._stand_before(header, version)
        # Deltas save before their contribution leaves.
        usable = max((v for v in kept if v <= version + (not self.has_gradients)), default=0)
        self._stand_at(header, version, usable)
        if outer is not None:
            self.replica.load_optimizers(outer, is_whole=True)
        if is_begun:
            log.info("goes on from version %d", version)
            if version not in kept:
                at = f"version {usable}" if usable else "the beginning"
                what = "draws" if outer is not None else "data order and optimisers"
                log.warning("of an earlier place: %s, from %s", what, at)
        return run_step if self.keeps_pace else self.ahead(self.reached(self.versions)), False

    def _find_weights(
        self, versions: list[int], newest: int
    ) -> tuple[wire.DownloadHeader, Mapping[str, Tensor] | None]:
        """Have the weights that this site goes on from; and the coordinator's optimisers, if any.

        `newest` is the version of its newest checkpoint.
        """

        def is_behind(versions: Sequence[int]) -> bool:
            is_over = bool(versions) and self.reached(versions) >= self.num_steps
            return self.can_repeat and not is_over and list(versions) == [newest + 1]

        self.is_behind = is_behind(versions)
        # Of version 0 it holds those that were compared: of who has a checkpoint they are not.
        if not versions or (not newest and (not any(versions) or self.is_behind)):
            return wire.DownloadHeader(), None
        header = self._bring(versions, newest)
        if not self.is_behind and is_behind(self.versions):  # the update came out since Join
            self.is_behind = True
            header = self._bring(self.versions, newest)
        if self.is_mirrored:
            outer, header = self._mirror(header)
            return header, outer
        return header, None

    def _stand_at(self, header: wire.DownloadHeader, version: int, usable: int) -> None:
        """Go on from a version, with the checkpoint of a usable one, 0 for none."""
        replica, is_begun = self.replica, any(self.versions)
        is_start = self.can_repeat and usable in self.checkpoints.starts()
        # Whether the predecessor's last contribution was merged, and so what was owed is paid.
        # Nothing is known of that where the coordinator is new, too.
        is_known = header.merged_into and not self.is_behind  # else of the version that is merged
        is_paid = not is_known or is_merged(header, version - 1, version)
        # Before it saw the update.
        is_missed = is_begun and self.is_exact and usable == version and not is_start and is_paid
        found = None
        if usable or is_start:
            # Its weights too, where others take their place: a copy in an optimiser follows.
            found = self.checkpoints.load(usable, not self.is_mirrored, is_start)
        if found is not None and is_missed:
            # The hook learns from it: the local weights still are the predecessor's.
            (fragment,) = self.fragments
            steps = fragment.steps(self.strategy.h)
            landing = Landing(steps, found.work.steps, True, True, found.residual, found.owed)
            self.hook.on_land(fragment, landing)
        elif found is not None and self.keeps_pace:
            owed = self._still_owed(found, header, version, usable - 1)
            found = found._replace(owed=owed, versions=(version,))
        elif found is not None and usable == version and not is_paid:
            found = found._replace(owed=found.residual)
        # Where the update was made of its weights alone, what it left are the global ones.
        has_all = (is_missed and header.is_own) or (is_start and usable == version)
        if (is_begun or found is not None) and not has_all:
            replica.adopt()
        self._take_over(self.versions, found)
        self.renew(header, self.fragments, usable)

    def _still_owed(
        self, ledger: Ledger, header: wire.DownloadHeader, version: int, start: int
    ) -> State:
        """What is owed at a pace of its own, by whether the contribution from `start` was merged.

        A later one has paid of what is owed, and nobody knows what it left.
        """
        # A new coordinator has merged what was sent for the versions before its own.
        last = header.merged_from if header.merged_into else min(start, version - 1)
        if last < start:
            return ledger.residual
        return ledger.owed if last == start else {}

    def _bring(self, versions: Sequence[int], newest: int) -> wire.DownloadHeader:
        """Have the weights that this site goes on from."""
        if not self.follows:
            return self._fetch("")
        if self.is_behind:
            is_here = self.checkpoints.load_global(self.fragments[0], newest)
            held_sha256 = self.replica.held_sha256(self.fragments) if is_here else ""
            header = self._fetch(held_sha256, repeats=newest + 1)
            self.is_behind = self.versions == [newest]
            return header
        held = [self._held(f, v) for f, v in zip(self.fragments, versions, strict=True)]
        header = self._follow(versions, held)
        for fragment, version in zip(self.fragments, held, strict=True):
            if self.versions[fragment.index] != version:
                self.keep(fragment)
        return header

    def go_back(self, held: Sequence[int | None], versions: Sequence[int]) -> list[int | None]:
        """Versions may be taken back: have the global weights of these, as far as they were kept.

        The versions of those that this site has then, if it knows.
        """
        self.checkpoints.begin_anew()
        now = list(held)
        for fragment, version in zip(self.fragments, versions, strict=True):
            had = now[fragment.index]
            if self.follows and (had is None or version < had):
                if self.checkpoints.load_global(fragment, version):
                    now[fragment.index] = version
        return now

    def _held(self, fragment: Fragment, version: int) -> int | None:
        """Of its newest global weights up to a version, which this site has now."""
        least = 0 if self.strategy.policy.leaves_behind else version - 1
        for held in self.checkpoints.kept_global(fragment):
            if least <= held <= version and self.checkpoints.load_global(fragment, held):
                return held
        # A process begins with the weights of version 0.
        return 0 if least <= 0 else None

    def _stand_before(self, header: wire.DownloadHeader, version: int) -> tuple[int, bool]:
        """Take over all that a predecessor had when its contribution to a version could leave."""
        (fragment,) = self.fragments
        if version:
            self.replica.adopt()
        self.renew(header, self.fragments, version + 1)
        self._take_over([version], None)
        log.info("sends its contribution to version %d again", version)
        ledger = self.checkpoints.load(version + 1, with_model=True, is_start=False)
        self.residuals.settle(fragment, version, ledger.residual)
        self.marks[0] = self.meter.total.since(ledger.work)
        return (version + 1) * self.strategy.h, True
