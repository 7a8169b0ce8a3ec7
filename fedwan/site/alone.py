"""A federation of one: the script trains as it stands, without coordinator or network."""

from __future__ import annotations

import time
from collections.abc import Iterator
from types import TracebackType
from typing import Self

from torch import Tensor

from fedwan.errors import UserError

__all__ = ["Alone"]

SAY_EVERY_S = 10.0


class Alone:
    """What `fedwan.join` gives a script that nobody started for a run; the same face as `Site`."""

    name = "alone"

    def __init__(self, num_steps: int) -> None:
        if num_steps < 1:
            raise UserError(
                f"steps = {num_steps}: a script that trains alone has no run to take its length "
                "from; give fedwan.join(..., steps=2000), or start it with `fedwan launch`"
            )
        self.step = 0
        self.num_steps = num_steps
        self._losses: dict[str, Tensor | float] = {}
        self._said_at = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if error is None:
            self._say()

    def __iter__(self) -> Iterator[int]:
        """Steps, counted from 0."""
        while not self.is_done:
            step = self.step
            yield step
            if self.step == step:
                self.after_step()

    def reduce(self) -> None:
        """Nothing: there is nobody to exchange gradients with."""

    def log(self, **losses: Tensor | float) -> None:
        """Note scalars of this step; they are printed every ten seconds."""
        self._losses |= {n: v.detach() if isinstance(v, Tensor) else v for n, v in losses.items()}

    def after_step(self) -> None:
        """A step is complete."""
        self.step += 1
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._say()

    @property
    def is_done(self) -> bool:
        """Whether there are no more steps to take."""
        return self.step >= self.num_steps

    def _say(self) -> None:
        self._said_at = time.monotonic()
        shown = ", ".join(f"{name} {float(value):.4g}" for name, value in self._losses.items())
        print(f"step {self.step} of {self.num_steps}: {shown}", flush=True)
