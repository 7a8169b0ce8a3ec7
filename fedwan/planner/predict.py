"""Utilisation, bytes, time and cost of a setting: a few rounds of it in virtual time.

What is told is the middle of a long run: the first rounds, in which the lines fill up, and the last
one, where nothing overlaps, are left out, as in `benchmarks/timed.py`.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from dataclasses import dataclass, replace

from fedwan.planner.candidates import Candidate, Question, candidate
from fedwan.planner.costs import global_bytes
from fedwan.planner.virtual import Course, VirtualRun

ROUNDS = 14
SKIPPED = 6
"""Rounds at the beginning that do not count."""
MOST_SITES = 4
"""Simulated; they stand for all."""
TAU_SHARES = (0.25, 0.5, 0.8)
"""Of H, as τ to choose from, besides 5 (which Streaming DiLoCo found safe) and H - 1."""
AS_GOOD = 0.005
"""Utilisation that a shorter τ may cost."""


@dataclass(frozen=True)
class Prediction:
    """What a setting would do: times of a round, and of the run from the initial weights on."""

    candidate: Candidate
    utilisation: float
    """Share of the time in which sites compute; NaN if the run would stop."""
    bytes_per_step: float
    """Of a site, both ways."""
    wall_s: float
    num_bytes: float
    stopped: str = ""
    """Why the run would stop, if it would."""

    @property
    def family(self) -> tuple[str, str]:
        """Strategy and codecs: what differs in H alone is of one."""
        return self.candidate.config.strategy, self.candidate.codec


def predict(chosen: Candidate, question: Question, cache: dict[object, Course]) -> Prediction:
    """What a setting would do, with the shortest τ that serves if that is open."""
    config, h = chosen.config, chosen.strategy.h
    if not chosen.strategy.overlap.tau or "stream.tau" in question.named:
        return _predict(chosen, question, cache)
    taus = sorted({min(5, h - 1), *(max(1, int(share * h)) for share in TAU_SHARES), h - 1})

    def at(tau: int) -> Prediction:
        stream = replace(config.stream, tau=tau)
        return _predict(candidate(replace(config, stream=stream), question), question, cache)

    enough = at(taus[-1]).utilisation - AS_GOOD  # NaN, which nothing reaches, if it would stop
    best = bisect_left(taus, True, hi=len(taus) - 1, key=lambda tau: at(tau).utilisation >= enough)
    return at(taus[best])


def _predict(chosen: Candidate, question: Question, cache: dict[object, Course]) -> Prediction:
    strategy, layout, link = chosen.strategy, question.layout, question.link
    course = _course(chosen, question, cache)
    num_sites = question.config.sites
    up, down = (total / course.num_steps for total in (course.bytes_up, course.bytes_down))
    utilisation = math.nan
    if not course.stopped:
        utilisation = course.utilisation(strategy.h * question.step_s, SKIPPED, ROUNDS - 1)
    first_bytes = global_bytes(layout, question.costs)
    first_s = link.up.transfer_s(first_bytes) + link.up.rtt_s / 2
    num_steps = chosen.config.steps
    return Prediction(
        candidate=chosen,
        utilisation=utilisation,
        bytes_per_step=up + down,
        wall_s=first_s + num_steps * question.step_s / utilisation,
        num_bytes=first_bytes + (up + down) * num_steps * num_sites,
        stopped=course.stopped,
    )


def _course(chosen: Candidate, question: Question, cache: dict[object, Course]) -> Course:
    strategy = chosen.strategy
    key = (
        *(strategy.contributes, strategy.h, strategy.overlap.tau, chosen.num_fragments),
        *(strategy.up.name, strategy.down.name, strategy.policy),
    )
    if key not in cache:
        config = copy.deepcopy(chosen.config)
        count = min(config.sites, MOST_SITES)
        costs = replace(question.costs, stands_for=config.sites / count)
        config.round.quorum = math.ceil(config.round.quorum * count / config.sites)
        config.sites, config.site_names = count, []
        few = candidate(config, question).strategy
        cache[key] = VirtualRun(
            few, question.layout, count, ROUNDS * few.h, question.step_s, question.link, costs
        ).play()
    return cache[key]
