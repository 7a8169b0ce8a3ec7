"""Quality over time: the average of the global weights as fedwan keeps it, measured afterwards.

While training runs, the average is copied at some steps, with the time; copies are measured when
training is over, so that measuring costs no training time in any system.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.processes import save_json
from benchmarks.harness.stopwatch import STOPWATCH
from benchmarks.peers.spec import Spec
from benchmarks.peers.workload import Part
from fedwan.coordinator.model import update_ema
from fedwan.state import State, clone, hash_state, layout_of

__all__ = ["Curve", "save_site"]


class Curve:
    """Follows the global weights of a run.

    Args:
        part: of the process that looks; its weights are the initial ones.
        spec: the run.
    """

    def __init__(self, part: Part, spec: Spec) -> None:
        self._part = part
        self._layout = layout_of(part.workload.networks)
        self._ema = clone(part.state)
        self._step = 0
        self._every = max(1, spec.steps // max(1, spec.points))
        self._is_wanted = spec.points > 0
        self._hash_at = spec.options.get("hash_at", 0)
        self._looks: list[tuple[int, float, State]] = []
        self._hash = ""

    def update(self, step: int, weights: State) -> None:
        """The global weights after so many steps, one outer update later than at the last call."""
        if self._is_wanted:
            samples = (step - self._step) * self._part.samples_per_step
            half_life = self._part.config.half_life
            update_ema(self._ema, weights, self._layout, samples, half_life)
            self.look(step, self._ema)
        self.check(step, weights)

    def look(self, step: int, ema: State) -> None:
        """The average after so many steps, where another keeps it; copied if it is time."""
        if self._is_wanted and step // self._every > self._step // self._every:
            self._looks.append((step, time.monotonic(), clone(ema)))
        self._step = step

    def check(self, step: int, weights: State) -> None:
        """Hash the weights if this is the step at which two runs are to agree."""
        if step == self._hash_at:
            self._hash = hash_state(weights)

    def measure(self) -> dict[str, Any]:
        """Quality of every copy, JSON-ready; overwrites the part's weights."""
        rows = []
        for step, at, weights in self._looks:
            figures = self._evaluate(weights)
            rows.append({"step": step, "at": at, "fd": figures["fd"]})
        floor = figures["fd_floor"] if rows else None
        return {"curve": rows, "fd_floor": floor, "hash": self._hash}

    @torch.no_grad()
    def _evaluate(self, weights: State) -> dict[str, Any]:
        live = self._part.state
        for name, value in weights.items():
            live[name].copy_(value)
        held_out, seed = self._part.shard.held_out, self._part.config.seed
        return self._part.workload.evaluate(held_out, seed)


def save_site(folder: Path, site: int, sha256: str, curve: Curve | None = None) -> None:
    """Write what a site has to say, and what it saw of the global weights; measures quality now."""
    result = STOPWATCH.result() | {"sha256": sha256} | (curve.measure() if curve else {})
    save_json(folder / f"site{site}.json", result)
