"""A round's rows for `metrics.jsonl`: what sites told, how that compares, and what is wrong."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from fedwan.coordinator.gathering import Merged
from fedwan.doctor.diagnosis import LiveDoctor
from fedwan.doctor.sampling import Direction, Directions, Sample, bounded
from fedwan.fragments import Fragment

__all__ = ["RoundRows"]

_LOOK_EVERY = 8
"""Rounds between two looks of the doctor."""


class RoundRows:
    """Writes the rows of one run's rounds.

    Args:
        record: takes rows.
        corrects: whether sites correct their steps by what landed, so that a healthy contribution
            may well ask to undo it.
    """

    def __init__(self, record: Callable[[dict[str, Any]], None], *, corrects: bool) -> None:
        self._record = record
        self._corrects = corrects
        self._directions: dict[int, Directions] = {}
        self._doctor = LiveDoctor()
        self._unseen: list[list[dict[str, Any]]] = []
        """Rows of the rounds since the doctor's last look."""

    def add(
        self,
        fragment: Fragment,
        version: int,
        merged: Sequence[Merged],
        before: Sample,
        run_step: int,
        round_s: float,
    ) -> None:
        """A row for each contribution; now and then one for each thing that the doctor finds.

        Args:
            fragment: which.
            version: that the round made.
            merged: what is in it.
            before: of the global weights that it started from.
            run_step: where the run stands.
            round_s: how long the round took.
        """
        directions = self._directions.setdefault(fragment.index, Directions())
        compared = directions.compare({m.contribution.site: m.sample for m in merged}, before)
        shared = {
            "kind": "round",
            "version": version,
            "run_step": run_step,
            "fragment": fragment.index,
            "round_s": round_s,
        }
        rows = [shared | _row(m, compared[m.contribution.site]) for m in merged]
        if self._corrects:
            rows = [row | {"backward": {}} for row in rows]
        for row in rows:
            self._record(row)
        self._unseen.append(rows)
        if len(self._unseen) == _LOOK_EVERY:
            self.look()

    def look(self) -> None:
        """A row for each thing that the doctor finds in the rounds since its last look."""
        rounds, self._unseen = self._unseen, []
        for row in self._doctor.look(rounds):
            self._record(row)


def _row(merged: Merged, direction: Direction) -> dict[str, Any]:
    contribution, work = merged.contribution, merged.contribution.work
    return {
        "site": contribution.site,
        "step": work.step,
        "samples": work.samples,
        "losses": dict(work.losses),
        "compute_s": work.compute_s,
        "wait_s": work.wait_s,
        "bytes_up": work.bytes_up,
        "bytes_down": work.bytes_down,
        "norms": contribution.norms,
        "staleness": merged.staleness,
        "figures": bounded(work.figures),
        **direction,
    }
