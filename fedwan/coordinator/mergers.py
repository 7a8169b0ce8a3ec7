"""What contributions are added up by: a merger for each fragment, by the run's rule.

Under privacy of whole sites each is clipped on its way in, and their mean gets noise.
Sums under masks outlive the coordinator (`masked`): one that comes back goes on with them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast

from fedwan.config import Config
from fedwan.coordinator.federation import CoordinatorRounds, Federation
from fedwan.coordinator.intake import Contribution
from fedwan.coordinator.masked import MASKED_SUMS, MaskedMerger, saved_sums, take_masks_off
from fedwan.coordinator.merge import Merger
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.robust import RobustMerger, Rule
from fedwan.coordinator.site_privacy import SitePrivacy
from fedwan.fragments import Fragment
from fedwan.protocol.round import Merge, Round
from fedwan.state import State
from fedwan.strategy import Strategy

AnyMerger = Merger | RobustMerger | MaskedMerger


@dataclass
class Mergers:
    """Of one run, whose folder is `folder`."""

    hub: Federation
    strategy: Strategy
    config: Config
    folder: Path
    privacy: SitePrivacy | None
    _mergers: dict[int, AnyMerger] = field(default_factory=dict)
    _sums: dict[tuple[int, int], Path] = field(default_factory=dict)
    """Saved sums, by fragment and version, of rounds that are to be made again."""

    def of(self, fragment: Fragment) -> AnyMerger:
        """The merger of a fragment."""
        if fragment.index not in self._mergers:
            layout, up, (rule, bad) = fragment.layout, self.strategy.up, self.config.round.rule
            self._mergers[fragment.index] = (
                MaskedMerger(layout, up, self.config.num_sites)
                if up.mask_bits
                else Merger(layout)
                if rule == "mean"
                else RobustMerger(layout, cast(Rule, rule), bad)
            )
        return self._mergers[fragment.index]

    def share(self, merge: Merge[Contribution]) -> tuple[float, float]:
        """A contribution's weight, and what its deltas are scaled by."""
        if self.privacy:
            return 1.0, self.privacy.scale(merge.contribution.measures)
        nominal = self.hub.rounds.nominal_of(merge.key.fragment)
        return merge.contribution.work.samples / nominal, merge.scale

    def merged(
        self, model: GlobalModel, round_: Round[Contribution], look: Callable[[], None]
    ) -> State:
        """What a closed round's contributions come to; masks are taken off first, or noise added.

        `look` is called while the sites are waited for that take them off.
        """
        merger = self.of(round_.fragment)
        if not isinstance(merger, MaskedMerger):
            merged = merger.take()
            if self.privacy:
                self.privacy.make_private(merged, round_)
            return merged
        patience_s, weights = self.strategy.policy.patience_s, model.hash_of(round_.fragment)
        folder = self.folder / MASKED_SUMS
        return take_masks_off(self.hub, round_, weights, merger, folder, look, patience_s)

    def resume(self, run_id: str, rounds: CoordinatorRounds, model: GlobalModel) -> None:
        """Go on with the sums whose masks an earlier start may have asked sites to take off."""
        self._sums = saved_sums(self.folder / MASKED_SUMS, run_id, model.fragments, rounds.versions)
        for fragment in model.fragments:
            self.take_up(rounds, model, fragment)

    def take_up(self, rounds: CoordinatorRounds, model: GlobalModel, fragment: Fragment) -> None:
        """The same of a fragment alone, which has come to a version that there may be one of."""
        index, version = fragment.index, model.versions[fragment.index]
        if path := self._sums.pop((index, version), None):
            merger, masking = self.of(fragment), self.hub.masking
            assert isinstance(merger, MaskedMerger) and masking
            if merged := merger.load(path, masking.basis(index, version, model.hash_of(fragment))):
                with self.hub.changed:
                    rounds.close_again(index, merged)
                    masking.asked[index, version] = [merge.key.site for merge in merged]
