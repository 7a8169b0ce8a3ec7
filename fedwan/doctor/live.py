"""The doctor in a run that goes on: a warning in the log, and a row among the run's events."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import Any

from fedwan.doctor.diagnosis import Doctor
from fedwan.doctor.finding import Finding
from fedwan.output.records import RoundRecord, finite, to_record

__all__ = ["LiveDoctor", "bounded"]

log = logging.getLogger(__name__)

MOST_FIGURES = 64
LONGEST_NAME = 64


class LiveDoctor:
    """Sees the rows of each round before they are recorded.

    A run must not end for its doctor: if it fails it says so once, and looks no more.
    """

    def __init__(self) -> None:
        self._doctor: Doctor | None = Doctor()

    def look(self, rows: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
        """Rows of events, one for each thing that is told for the first time.

        Args:
            rows: of one round, as they are recorded.
        """
        if self._doctor is None:
            return []
        try:
            records = [to_record({"t": 0.0, **finite(row)}) for row in rows]
            findings = self._doctor.take([r for r in records if isinstance(r, RoundRecord)])
        except Exception:
            self._doctor = None
            log.warning("the doctor failed and looks no more; training goes on", exc_info=True)
            return []
        for finding in findings:
            log.log(
                logging.WARNING if finding.is_warning else logging.INFO,
                "round %d: %s",
                finding.version,
                finding.text,
            )
        return [_to_row(finding) for finding in findings]


def _to_row(finding: Finding) -> dict[str, Any]:
    return {
        "kind": "event",
        "event": "finding" if finding.is_warning else "note",
        "site": finding.site,
        "text": f"round {finding.version}: {finding.text}",
        **{k: v for k, v in finding._asdict().items() if k not in ("kind", "site")},
        "finding": finding.kind,
    }


def bounded(figures: Mapping[str, float]) -> dict[str, float]:
    """No more figures of a site than a record should hold, in name order."""
    names = sorted(name for name in figures if len(name) <= LONGEST_NAME)
    return {name: figures[name] for name in names[:MOST_FIGURES]}
