"""Utilisation, bytes, time and cost of a setting, and which to take (docs/plan.md).

A setting is played for a few rounds in virtual time. What is told is the middle of a long run: the
first rounds, in which the lines fill up, and the last one, where nothing overlaps, are left out, as
in `benchmarks/timed.py`.
"""

from __future__ import annotations

import copy
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from fedwan.output.units import aligned, bytes_text, duration_text, sites_text
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
ENOUGH = 0.95
MOST_H = 50
MOST_CORRECTED_H = 20
_UNTRUSTED = "*"
"""Behind the codec of a setting whose quality was not shown, and before the line that says so."""


@dataclass(frozen=True)
class Prediction:
    """What a setting would do: times of a round, and of the run from the initial weights on."""

    candidate: Candidate
    utilisation: float
    """Share of the time in which sites compute; NaN if the run would stop."""
    up_per_step: float
    down_per_step: float
    """Bytes of a site."""
    wall_s: float
    num_bytes: float
    stopped: str = ""
    """Why the run would stop, if it would."""

    @property
    def bytes_per_step(self) -> float:
        """Of a site, both ways."""
        return self.up_per_step + self.down_per_step

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
    num_sites = question.config.num_sites
    up, down = (total / course.num_steps for total in (course.bytes_up, course.bytes_down))
    utilisation = math.nan
    if not course.stopped:
        utilisation = course.utilisation(strategy.h * question.step_s, SKIPPED, ROUNDS - 1)
    first_bytes = global_bytes(layout, question.costs)
    first_s = first_bytes / link.up.bytes_per_s + link.up.rtt_s / 2
    num_steps = chosen.config.steps
    return Prediction(
        candidate=chosen,
        utilisation=utilisation,
        up_per_step=up,
        down_per_step=down,
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
        count = min(config.num_sites, MOST_SITES)
        costs = replace(question.costs, stands_for=config.num_sites / count)
        config.round.quorum = math.ceil(config.round.quorum * count / config.num_sites)
        config.sites = count
        few = candidate(config, question).strategy
        cache[key] = VirtualRun(
            few, question.layout, count, ROUNDS * few.h, question.step_s, question.link, costs
        ).play()
    return cache[key]


def rank(predictions: Sequence[Prediction], question: Question) -> list[Prediction]:
    """Best first; without those that would stop, or whose H is larger than it must be."""
    least_h: dict[tuple[str, str], int] = {}  # that is enough, by strategy and codecs
    for p in sorted(predictions, key=lambda p: p.candidate.strategy.h):
        if p.utilisation >= ENOUGH and "h" not in question.named:
            least_h.setdefault(p.family, p.candidate.strategy.h)
    running = (p for p in predictions if not p.stopped)
    kept = (p for p in running if p.candidate.strategy.h <= least_h.get(p.family, math.inf))
    return sorted(kept, key=lambda p: _order(p, question))


def _order(prediction: Prediction, question: Question) -> tuple[object, ...]:
    strategy, outer = prediction.candidate.strategy, prediction.candidate.config.outer
    is_enough = prediction.utilisation >= ENOUGH
    return (
        not is_enough,
        not _doubts(prediction) <= question.named,
        prediction.bytes_per_step if is_enough else -round(prediction.utilisation, 4),
        *(strategy.overlap.tau, prediction.bytes_per_step),
        # Where nothing else decides: blending updates in was tried more, so were outer optimisers.
        bool(strategy.hook and strategy.overlap.tau),
        not any(step.momentum for step in outer.values()),
    )


def _doubts(prediction: Prediction) -> set[str]:
    """Keys whose values have not shown their quality with this strategy."""
    strategy = prediction.candidate.strategy
    corrects = strategy.hook is not None and not strategy.overlap.tau
    doubts = {"codec.up"} if strategy.up.has_feedback and not corrects else set()
    return doubts | ({"h"} if strategy.h > (MOST_CORRECTED_H if corrects else MOST_H) else set())


def why(ranked: Sequence[Prediction]) -> str:
    """The sentence that recommends the first of them."""
    best = ranked[0]
    take, known = f"take {_setting(best)}", "known to train well "
    if _doubts(best):
        take, known = f"if its quality holds (see docs/plan.md), {take}", ""
    if best.utilisation >= ENOUGH:
        return (
            f"{take}: its sites compute {best.utilisation:.1%} of the time, and of the settings "
            f"{known}that come to {ENOUGH:.0%} it sends the fewest bytes, "
            f"{bytes_text(best.bytes_per_step)} a step and site"
        )
    return (
        f"{take}: no setting {known}has its sites compute {ENOUGH:.0%} of the time, and with it "
        f"they come nearest, {best.utilisation:.1%}"
    )


def _setting(prediction: Prediction) -> str:
    candidate = prediction.candidate
    text = f"{candidate.config.strategy}, {candidate.codec}, H = {candidate.strategy.h}"
    if tau := candidate.strategy.overlap.tau:
        text += f", {candidate.num_fragments} fragments, τ = {tau}"
    return text


def line_of(best: Prediction, question: Question) -> str:
    """What the coordinator's own line must carry: all sites go through it."""
    sites = question.config.num_sites
    pace = 8e-6 * sites * best.utilisation / question.step_s
    into, out = (
        f"{value:,.0f}" if (value := pace * num_bytes) >= 100 else f"{value:.3g}"
        for num_bytes in (best.up_per_step, best.down_per_step)
    )
    return f"{into} Mbit/s in and {out} out on average, of {sites_text(sites)}"


def words_of(best: Prediction, question: Question) -> str:
    """What settles it on a command line; steps, too, where those named make no whole rounds."""
    candidate, strategy = best.candidate, best.candidate.strategy
    words = [f"strategy={candidate.config.strategy}", f"h={strategy.h}"]
    words += [f"codec.up={strategy.up.name}", f"codec.down={strategy.down.name}"]
    if strategy.overlap.tau:
        words += [f"stream.fragments={candidate.num_fragments}"]
        words += [f"stream.tau={strategy.overlap.tau}"]
    if "steps" in question.named and candidate.config.steps != question.num_steps:
        words += [f"steps={candidate.config.steps}"]
    return " ".join(words)


def row_of(prediction: Prediction, question: Question) -> dict[str, Any]:
    """One setting for JSON; `usd` is None where no price was given."""
    candidate, price = prediction.candidate, question.usd_per_gb
    return {
        "strategy": candidate.config.strategy,
        "h": candidate.strategy.h,
        "codec": candidate.codec,
        "fragments": candidate.num_fragments,
        "tau": candidate.strategy.overlap.tau,
        "utilisation": round(prediction.utilisation, 4),
        "bytes_per_step": round(prediction.bytes_per_step),
        "wall_s": round(prediction.wall_s, 1),
        "usd": round(prediction.num_bytes / 1e9 * price, 2) if price else None,
        "is_shown": not _doubts(prediction),
    }


def table_lines(predictions: Sequence[Prediction], question: Question, most: int = 0) -> list[str]:
    """A header and a line per setting, at most so many if `most` says; alike ones share a line."""
    head = ["strategy", "codec", "H", "fragments", "τ", "computing", "bytes/site/hour", "time"]
    names: dict[tuple[str, ...], list[str]] = {}
    for prediction in predictions:
        cells = tuple(_cells(prediction, question))
        names.setdefault(cells, []).append(prediction.candidate.config.strategy)
    found = [[", ".join(strategies), *cells] for cells, strategies in names.items()]
    rows = [head + (["cost"] if question.usd_per_gb else []), *found[: most or None]]
    lines = aligned(rows, left=2)
    if any(_UNTRUSTED in row[1] for row in rows):
        lines.append(f"{_UNTRUSTED} not yet shown to keep the quality: see docs/plan.md")
    if len(found) >= len(rows):
        lines.append(f"{len(found) - len(rows) + 1} more: --all")
    return lines


def _cells(prediction: Prediction, question: Question) -> list[str]:
    row = row_of(prediction, question)
    hourly = prediction.bytes_per_step / question.step_s * prediction.utilisation * 3600
    codec = row["codec"] + ("" if row["is_shown"] else _UNTRUSTED)
    cells = [codec, str(row["h"]), str(row["fragments"]), str(row["tau"] or "–")]
    cells += [f"{prediction.utilisation:.1%}", bytes_text(hourly), duration_text(prediction.wall_s)]
    return cells + ([f"${row['usd']:,.2f}"] if question.usd_per_gb else [])
