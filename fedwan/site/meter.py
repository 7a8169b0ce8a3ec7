"""Where a site's time and bytes go, and how its losses stand: what it tells with a contribution.

Computing is what happens inside a step, reading its data included, less what is spent waiting
there. What the engine does between steps (coding, sending, waiting, applying, checkpoints) counts
as waiting; measuring quality (`aside`) counts as neither, wherever it happens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import NamedTuple

from torch import Tensor

from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.protocol.limits import MOST_FIGURES


class Work(NamedTuple):
    """Steps and samples, of a contribution or of all so far."""

    steps: int
    samples: int

    def since(self, earlier: Work) -> Work:
        """What was done after `earlier`."""
        return Work(self.steps - earlier.steps, self.samples - earlier.samples)


class Meter:
    """Counts what a site does; ranks without a link count no bytes."""

    def __init__(self, link: Link | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.total = Work(0, 0)
        """Since the process began."""
        self.figures: dict[str, Tensor] = {}
        """Of the site's vitals; the latest of each name go with the next contribution."""
        self._link = link
        self._clock = clock
        self._compute_s = self._wait_s = self._aside_s = 0.0
        self._told = (0.0, 0.0, 0, 0)
        self._losses: dict[str, tuple[Tensor, int]] = {}
        self._step_began = (0.0, 0.0)

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Time spent here is waiting, except inside `aside`."""
        began, aside = self._clock(), self._aside_s
        try:
            yield
        finally:
            self._wait_s += self._clock() - began - (self._aside_s - aside)

    @contextmanager
    def aside(self) -> Iterator[None]:
        """Time spent here counts as neither; may lie inside the other two."""
        began = self._clock()
        try:
            yield
        finally:
            self._aside_s += self._clock() - began

    def note_step_begins(self) -> None:
        """The next step's time counts from here."""
        self._step_began = (self._clock(), self._wait_s + self._aside_s)

    def begin_step(self, samples: int, num: int = 1) -> None:
        """A step counts from here on, since its gradients may leave before it ends; -1 drops it."""
        self.total = Work(self.total.steps + num, self.total.samples + num * samples)

    def end_step(self) -> None:
        """It is over: its time, less what was spent waiting or aside in it, was computing."""
        began, other = self._step_began
        self._compute_s += self._clock() - began - (self._wait_s + self._aside_s - other)

    def speed(self) -> float:
        """Steps in a second of computing."""
        return self.total.steps / self._compute_s if self._compute_s else 0.0

    def add_losses(self, losses: Mapping[str, Tensor]) -> None:
        """Losses of a step, summed where they are: no transfer from a GPU.

        Of the first names alone: the coordinator takes no others, and a header holds no more.
        """
        for name, value in losses.items():
            if name not in self._losses and len(self._losses) == MOST_FIGURES:
                continue
            total, count = self._losses.get(name, (None, 0))
            self._losses[name] = (value if total is None else total + value, count + 1)

    def work(self, step: int, done: Work) -> wire.Work:
        """What a contribution after `step` says of itself; times and bytes since the last call."""
        link = self._link
        num_bytes = (0, 0) if link is None else (link.bytes_up, link.bytes_down)
        before, self._told = self._told, (self._compute_s, self._wait_s, *num_bytes)
        since = [now - then for now, then in zip(self._told, before, strict=True)]
        work = wire.Work(
            step=step,
            steps=done.steps,
            samples=done.samples,
            losses={name: float(total) / n for name, (total, n) in self._losses.items()},
            compute_s=since[0],
            wait_s=since[1],
            bytes_up=int(since[2]),
            bytes_down=int(since[3]),
            figures={k: float(v) for k, v in self.figures.items()},
        )
        self.figures, self._losses = {}, {}
        return work
