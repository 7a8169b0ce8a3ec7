"""A plan as rows for programs, and as a table for people."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fedwan.output.units import bytes_text, duration_text
from fedwan.planner.predict import Prediction
from fedwan.planner.question import Question
from fedwan.planner.recommend import codec_text, is_shown, setting_text

__all__ = ["row_of", "summary_of", "table_lines"]

_UNTRUSTED = "*"
"""Behind the codec of a setting whose quality was not shown, and before the line that says so."""


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
