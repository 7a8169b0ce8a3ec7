"""Utilisation, bytes, time and cost of a setting: a few rounds of it in virtual time.

What is told is the middle of a long run: the first rounds, in which the lines fill up, and the last
one, where nothing overlaps, are left out, as in `benchmarks/timed.py`. Sites are alike, so that a
few of them stand for many; only what the coordinator merges is as much as for all.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Callable
from dataclasses import dataclass, replace

from fedwan.app import load_strategy
from fedwan.planner.candidates import Candidate, with_tau
from fedwan.planner.costs import global_bytes, loads_of
from fedwan.planner.question import Question
from fedwan.planner.virtual import Course, run_virtually
from fedwan.planner.virtual_site import SiteModel
from fedwan.strategy import Strategy

__all__ = ["Prediction", "predict"]

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
    """What a setting would do."""

    candidate: Candidate
    utilisation: float
    """Share of the time in which sites compute; NaN if the run would stop."""
    round_s: float
    wire_s: float
    """That a round's bytes take on the fuller direction of the link."""
    coordinator_s: float
    """That the coordinator merges and commits in a round; on arrival, in H steps of each site."""
    bytes_per_step: float
    """Per step and site, both ways."""
    wall_s: float
    """Of the steps that were asked for, with the initial weights' way."""
    num_bytes: float
    """Of all sites, in these steps, both ways."""
    stopped: str = ""
    """Why the run would stop, if it would."""


def predict(candidate: Candidate, question: Question, cache: dict[object, Course]) -> Prediction:
    """What a setting would do, with the shortest τ that serves if that is open."""
    if not candidate.is_tau_open:
        return _predict(candidate, question, cache)
    h = candidate.strategy.h
    taus = sorted({min(5, h - 1), *(max(1, int(share * h)) for share in TAU_SHARES), h - 1})

    def at(tau: int) -> Prediction:
        return _predict(with_tau(candidate, question, tau), question, cache)

    longest = at(taus[-1])
    if longest.stopped:
        return longest
    enough = longest.utilisation - AS_GOOD
    is_enough: Callable[[int], bool] = lambda tau: at(tau).utilisation >= enough  # noqa: E731
    return at(taus[bisect_left(taus, True, hi=len(taus) - 1, key=is_enough)])


def _predict(candidate: Candidate, question: Question, cache: dict[object, Course]) -> Prediction:
    strategy, layout = candidate.strategy, question.layout
    course = _course(candidate, question, cache)
    num_sites = question.config.sites
    fragments = strategy.fragments(layout)
    loads = loads_of(strategy, fragments, question.costs)
    up, down = (total / course.num_steps for total in (course.bytes_up, course.bytes_down))
    utilisation = math.nan
    if not course.stopped:
        steps_s = [question.step_s] * len(course.marks)
        utilisation = course.utilisation(steps_s, strategy.h, SKIPPED, ROUNDS - 1)
    first_bytes = global_bytes(layout, question.costs)
    first_s = question.link.up.transfer_s(first_bytes, math.inf) + question.link.up.rtt_s / 2
    num_steps = candidate.config.steps
    commits = 1 if strategy.policy.arrivals_from is None else num_sites
    return Prediction(
        candidate=candidate,
        utilisation=utilisation,
        round_s=strategy.h * question.step_s / utilisation,
        wire_s=strategy.h
        * max(up / question.link.up.bytes_per_s, down / question.link.down.bytes_per_s),
        coordinator_s=sum(num_sites * load.merge_s + commits * load.commit_s for load in loads),
        bytes_per_step=up + down,
        wall_s=first_s + num_steps * question.step_s / utilisation,
        num_bytes=first_bytes + (up + down) * num_steps * num_sites,
        stopped=course.stopped,
    )


def _course(candidate: Candidate, question: Question, cache: dict[object, Course]) -> Course:
    strategy = candidate.strategy
    key = (
        *(strategy.contributes, strategy.h, strategy.overlap.tau, candidate.num_fragments),
        strategy.clock,
        *(strategy.up.name, strategy.down.name, strategy.policy),
    )
    if key not in cache:
        count = min(question.config.sites, MOST_SITES)
        stands_for = question.config.sites / count
        site = SiteModel(question.step_s, question.link)
        cache[key] = run_virtually(
            _of_few_sites(candidate, count),
            question.layout,
            [site] * count,
            ROUNDS * strategy.h,
            replace(question.costs, stands_for=stands_for),
        )
    return cache[key]


def _of_few_sites(candidate: Candidate, count: int) -> Strategy:
    """The same strategy, whose policy knows of so many sites, and has no warm-up."""
    config = copy.deepcopy(candidate.config)
    config.round.quorum = math.ceil(config.round.quorum * count / config.sites)
    config.sites, config.site_names = count, []
    strategy: Strategy = load_strategy(config.strategy).build(config)
    policy = strategy.policy
    if policy.arrivals_from is None:
        return strategy
    return strategy._replace(policy=policy._replace(arrivals_from=0))
