"""Which setting to take and why, and the table of all.

The fewest bytes among those whose sites compute 95 % of the time or more; if there is none, the
best utilisation, and what holds it back. Recommended is only what has shown its quality: H up to 50
(docs/results.md, "What coding costs in quality", has 20), and no error feedback, which needs many
more rounds (docs/log.md), unless the user has settled on it; under control variates H up to 20,
with the feedback that they need.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from fedwan.output.units import bytes_text, duration_text
from fedwan.planner.predict import Prediction
from fedwan.planner.question import Question
from fedwan.strategy import Strategy

__all__ = ["ENOUGH", "codec_text", "is_shown", "rank", "row_of", "summary_of", "table_lines", "why"]

ENOUGH = 0.95
MOST_H = 50
MOST_CORRECTED_H = 20
_UNTRUSTED = "*"
"""Behind the codec of a setting whose quality was not shown, and before the line that says so."""


def rank(predictions: Sequence[Prediction], question: Question) -> list[Prediction]:
    """Best first; without those whose H is larger than it must be, and those that would stop."""
    kept = [p for p in predictions if not p.stopped and not _is_needless(p, predictions, question)]
    return sorted(kept, key=lambda p: _order(p, question))


def why(ranked: Sequence[Prediction], question: Question) -> str:
    """The sentence that recommends the first of them."""
    best = ranked[0]
    bytes_ = f"{bytes_text(best.bytes_per_step)} a step and site"
    take = f"take {setting_text(best)}"
    known = "known to train well "
    if not is_shown(best):
        take, known = f"if its quality holds (see docs/plan.md), {take}", ""
    if best.utilisation >= ENOUGH:
        return (
            f"{take}: its sites compute {best.utilisation:.1%} of the time, and of the settings "
            f"{known}that come to {ENOUGH:.0%} it sends the fewest bytes, {bytes_}"
        )
    return (
        f"{take}: no setting {known}has its sites compute {ENOUGH:.0%} of the time, and with it "
        f"they come nearest, {best.utilisation:.1%}; {_limit(best, question)}"
    )


def setting_text(prediction: Prediction) -> str:
    """A setting in words."""
    config, strategy = prediction.candidate.config, prediction.candidate.strategy
    text = f"{config.strategy}, {codec_text(prediction)}, H = {strategy.h}"
    if strategy.overlap.tau:
        text += f", {prediction.candidate.num_fragments} fragments, τ = {strategy.overlap.tau}"
    return text


def codec_text(prediction: Prediction) -> str:
    """The codec, or both."""
    up, down = prediction.candidate.strategy.up.name, prediction.candidate.strategy.down.name
    return up if up == down else f"{up}/{down}"


def is_shown(prediction: Prediction) -> bool:
    """Whether its quality has been shown."""
    strategy = prediction.candidate.strategy
    return _is_codec_shown(strategy) and strategy.h <= _most_h(strategy)


def _is_welcome(prediction: Prediction, question: Question) -> bool:
    """Whether its quality has been shown, or the user settled what has not."""
    strategy = prediction.candidate.strategy
    is_codec = _is_codec_shown(strategy) or "codec.up" in question.named
    return is_codec and (strategy.h <= _most_h(strategy) or "h" in question.named)


def _is_codec_shown(strategy: Strategy) -> bool:
    return _corrects(strategy) or not strategy.up.has_feedback


def _most_h(strategy: Strategy) -> int:
    return MOST_CORRECTED_H if _corrects(strategy) else MOST_H


def _order(prediction: Prediction, question: Question) -> tuple[object, ...]:
    strategy = prediction.candidate.strategy
    is_enough = prediction.utilisation >= ENOUGH
    return (
        not is_enough,
        not _is_welcome(prediction, question),
        prediction.bytes_per_step if is_enough else -round(prediction.utilisation, 4),
        *(strategy.overlap.tau, prediction.bytes_per_step),
        # Where nothing else decides: blending updates in was tried more, so were outer optimisers.
        *(bool(strategy.hook and strategy.overlap.tau), not prediction.candidate.config.outer),
    )


def _is_needless(prediction: Prediction, others: Sequence[Prediction], question: Question) -> bool:
    """Whether a smaller H of the same strategy and codecs is enough already."""
    if "h" in question.named:
        return False
    mine = _family(prediction)
    return any(
        other.utilisation >= ENOUGH
        and other.candidate.strategy.h < prediction.candidate.strategy.h
        and _family(other) == mine
        for other in others
    )


def _family(prediction: Prediction) -> tuple[str, str]:
    return prediction.candidate.config.strategy, codec_text(prediction)


def _limit(best: Prediction, question: Question) -> str:
    strategy = best.candidate.strategy
    steps_s = strategy.h * question.step_s
    rest_s = best.round_s - steps_s
    if best.wire_s >= max(0.9 * best.round_s, best.coordinator_s):
        what = f"the link is full: a round's bytes take {best.wire_s:.3g} s on its fuller way"
    elif best.coordinator_s >= 0.9 * best.round_s:
        what = f"the coordinator is busy: merging a round takes {best.coordinator_s:.3g} s"
    else:
        ways = "" if strategy.overlap.tau else ", those of the other way come after them"
        round_trips = f", round trips of {1e3 * question.link.up.rtt_s:.0f} ms"
        if math.isclose(question.link.up.rtt_s, 0.0):
            round_trips = ""
        what = (
            f"sites wait {rest_s:.3g} s a round: a round's bytes take {best.wire_s:.3g} s on the "
            f"link's fuller way{ways}, merging {best.coordinator_s:.3g} s{round_trips}"
        )
    return f"{what}, its steps {steps_s:.3g} s"


def _corrects(strategy: Strategy) -> bool:
    """Whether a site's steps are corrected by what landed before."""
    return strategy.hook is not None and not strategy.overlap.tau


def row_of(prediction: Prediction, question: Question) -> dict[str, Any]:
    """One setting for JSON; `usd` is None where no price was given."""
    strategy = prediction.candidate.strategy
    return {
        "strategy": prediction.candidate.config.strategy,
        "h": strategy.h,
        "codec": codec_text(prediction),
        "fragments": prediction.candidate.num_fragments,
        "tau": strategy.overlap.tau,
        "utilisation": round(prediction.utilisation, 4),
        "bytes_per_step": round(prediction.bytes_per_step),
        "wall_s": round(prediction.wall_s, 1),
        "usd": round(_usd(prediction, question), 2) if question.usd_per_gb else None,
        "is_shown": is_shown(prediction),
    }


def table_lines(predictions: Sequence[Prediction], question: Question) -> list[str]:
    """A header and a line per setting, in columns; strategies that take the same time share one."""
    head = ["strategy", "codec", "H", "fragments", "τ", "computing", "bytes/site/hour", "time"]
    rows = [head + (["cost"] if question.usd_per_gb else [])]
    names: dict[tuple[str, ...], list[str]] = {}
    for prediction in predictions:
        cells = tuple(_cells(prediction, question))
        names.setdefault(cells, []).append(prediction.candidate.config.strategy)
    rows += [[", ".join(strategies), *cells] for cells, strategies in names.items()]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ["  ".join(_aligned(row, widths)).rstrip() for row in rows]
    if not all(is_shown(prediction) for prediction in predictions):
        lines.append(f"{_UNTRUSTED} not yet shown to keep the quality: see docs/plan.md")
    return lines


def summary_of(prediction: Prediction) -> str:
    """One setting in a line."""
    if prediction.stopped:
        return f"{setting_text(prediction)}: the run would stop, {prediction.stopped}"
    return (
        f"{setting_text(prediction)}: sites compute {prediction.utilisation:.1%} of the time, "
        f"{bytes_text(prediction.bytes_per_step)} a step and site, "
        f"{duration_text(prediction.wall_s)}"
    )


def _cells(prediction: Prediction, question: Question) -> list[str]:
    strategy = prediction.candidate.strategy
    hourly = prediction.bytes_per_step / question.step_s * prediction.utilisation * 3600
    cells = [
        codec_text(prediction) + ("" if is_shown(prediction) else _UNTRUSTED),
        str(strategy.h),
        str(prediction.candidate.num_fragments),
        str(strategy.overlap.tau or "–"),
        f"{prediction.utilisation:.1%}",
        bytes_text(hourly),
        duration_text(prediction.wall_s),
    ]
    return cells + ([f"${_usd(prediction, question):,.2f}"] if question.usd_per_gb else [])


def _aligned(row: Sequence[str], widths: Sequence[int]) -> list[str]:
    """Names to the left, figures to the right."""
    return [
        cell.ljust(width) if place < 2 else cell.rjust(width)
        for place, (cell, width) in enumerate(zip(row, widths, strict=True))
    ]


def _usd(prediction: Prediction, question: Question) -> float:
    return prediction.num_bytes / 1e9 * question.usd_per_gb
