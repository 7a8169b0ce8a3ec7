"""Differential privacy of whole sites: DP-FedAvg (McMahan et al. 2018, 1710.06963), all at once.

    Δ = 1 / n (sum of Δ_i min(1, C / |Δ_i|) + normal noise of deviation s C)

over the n contributions to a version of a fragment. C is the norm in `privacy.unit`, |Δ_i| is over
all networks and parameters of the fragment, and all sites count alike: a site moves the sum by C at
most, whatever it sends. Each version of each fragment is a step of the mechanism, in which every
site takes part; s is the accountant's (`fedwan.privacy`), for two runs in one of which a site's
contributions are all 0. What sites get is made of Δ alone; the coordinator knows each Δ_i.

A version's noise follows from the secret and from what it is made of, so that a coordinator which
was killed before its checkpoint repeats the bits. Nothing is sent out before the checkpoint has it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedwan.config import Config
from fedwan.coordinator.intake import Contribution, Measures
from fedwan.fragments import Fragment
from fedwan.privacy import EPSILON, Spending, require_parameters
from fedwan.protocol.round import Round
from fedwan.state import Layout, State


class SitePrivacy(Spending):
    """One run's noise, and what it has spent; goes into the coordinator's checkpoint."""

    def __init__(self, config: Config, layout: Layout, fragments: Sequence[Fragment]) -> None:
        """Of a resolved configuration; a `ConfigError` for what noise does not cover."""
        require_parameters(layout)
        versions = config.steps // config.h * sum(fragment.per_round for fragment in fragments)
        super().__init__(config.privacy, config.num_sites, "sites", 1.0, versions)
        self._num_sites = config.num_sites

    def resume(self, state: dict[str, Any], num_lost: int, spent: int) -> None:
        """Go on from a checkpoint, after which so many versions were sent out that it has not.

        `spent`: steps that were counted before, maybe of versions that are made a third time.
        """
        self.load_state_dict(state)
        self.steps = max(self.steps + num_lost, spent)

    def tell(self, layout: Layout) -> tuple[str, str]:
        """An event, a warning if noise drowns the rest, and a line of how much there is."""
        num_values = sum(spec.num_values for spec in layout.values())
        deviation = self.deviation(1 / self._num_sites)
        norm = deviation * math.sqrt(num_values)
        text = (
            f"whole sites are private: each version gets noise of {deviation:.2g} in each of "
            f"{num_values:,} values, a norm of {norm:.2g}; of contributions {self.budget.clip:g} "
            "is left at most"
        )
        if norm < self.budget.clip:
            return "privacy", text
        return "warning", f"{text}; more sites, a larger h or privacy.epsilon make it less"

    def scale(self, measures: Measures) -> float:
        """What a contribution is multiplied by, so that its norm is C at most."""
        return min(1.0, self.budget.clip / max(math.hypot(*measures.norms.values()), 1e-30))

    def make_private(self, merged: State, round_: Round[Contribution]) -> None:
        """Noise onto the mean of a round's contributions, in place; each says what was spent."""
        self.steps += 1
        made_of = [(m.key.site, m.contribution.payload_hash) for m in round_.merged]
        step = (round_.fragment.index, round_.version, made_of)
        self.add_noise(merged.values(), 1 / len(round_.merged), *step)
        for merge in round_.merged:
            merge.contribution.work.figures[EPSILON] = self.epsilon()
