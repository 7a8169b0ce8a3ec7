"""A script that nobody started for a run: a federation of one, without coordinator or network."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping
from typing import Any, Self

import torch
from torch import Tensor

from fedwan.errors import UserError
from fedwan.optim_state import NamedOptimizers
from fedwan.rng import lent_generators
from fedwan.site.quality import figures_of, samples_of
from fedwan.site.replica import check_trainable, evaluating
from fedwan.site.script import DATA_ENDED, LEFT_EARLY, NOT_JOINED, PAST_END, Script, scalars

SAY_EVERY_S = 10.0
MOST_ASKED = 10_000
"""How often a loop may ask in one step whether all is done."""


class Alone:
    """What `fedwan.join` gives a script that trains alone; the same face as `Site`."""

    name = "alone"
    global_sha256 = ""

    def __init__(self, script: Script) -> None:
        if script.num_steps < 1:
            raise UserError(
                f"steps = {script.num_steps}: a script that trains alone has no run to take its "
                "length from; give fedwan.join(..., steps=2000), or start it with `fedwan launch`"
            )
        check_trainable(script.networks)  # refuse what no run can take
        NamedOptimizers.of(script.networks, script.optimizers)
        self.step = 0
        self.num_steps = script.num_steps
        self._script = script
        self._asked = 0
        self._has_joined = self._has_warned = False
        self._losses: dict[str, Tensor] = {}
        self._said_at, self._said_step = time.monotonic(), -1

    def __enter__(self) -> Self:
        self._has_joined = True
        self._measure()
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, StopIteration):
            raise UserError(DATA_ENDED.format(self)) from error
        if error is not None:
            return
        if self._said_step < self.step:
            self._say()
        self._measure()
        if self.step < self.num_steps:
            _tell(f"in a run this would end the site: {LEFT_EARLY.format(self)}")

    def __iter__(self) -> Iterator[int]:
        """Steps, counted from 0."""
        if not self._has_joined:
            raise UserError(NOT_JOINED)
        while not self.is_done:
            step = self.step
            yield step
            if self.step == step:
                self.after_step()

    def reduce(self) -> None:
        """Nothing: there is nobody to exchange gradients with."""

    def log(self, /, **losses: Tensor | float) -> None:
        """Note scalars of this step; they are printed every ten seconds."""
        found = scalars(losses)
        self._losses |= found
        # To ask a GPU is to wait for it: only where its values are printed.
        self._warn({name: value for name, value in found.items() if not value.is_cuda})

    def after_step(self) -> None:
        """A step is complete."""
        if self.step >= self.num_steps:
            raise UserError(PAST_END.format(self))
        self.step, self._asked = self.step + 1, 0
        if time.monotonic() - self._said_at > SAY_EVERY_S:
            self._say()

    @property
    def is_done(self) -> bool:
        """Whether there are no more steps to take."""
        self._asked += 1
        if self._asked > MOST_ASKED and self.step < self.num_steps:
            raise UserError(
                f"site.is_done was asked {MOST_ASKED:,} times at step {self.step}; call "
                "site.after_step() once after each step, or iterate over `site`"
            )
        return self.step >= self.num_steps

    def _say(self) -> None:
        self._said_at, self._said_step = time.monotonic(), self.step
        self._warn(self._losses)
        self._print(self._losses)

    def _warn(self, losses: Mapping[str, Tensor]) -> None:
        """Say once what is not finite: the loop itself goes on as if nothing had happened."""
        for name, value in losses.items():
            if self._has_warned or math.isfinite(float(value)):
                continue
            self._has_warned = True
            _tell(
                f"warning: {name} is {float(value)} at step {self.step} of {self.num_steps}; "
                "in a run the coordinator refuses weights that are not finite"
            )

    def _print(self, values: Mapping[str, Any]) -> None:
        shown = ", ".join(
            f"{k} {float(v):.4g}" for k, v in values.items() if isinstance(v, Tensor | float | int)
        )
        _tell(f"step {self.step} of {self.num_steps}{shown and f': {shown}'}")

    def _measure(self) -> None:
        """As in a run, at its beginning and its end: what fails there fails here."""
        script, networks = self._script, self._script.networks.values()
        gpus = {p.device for network in networks for p in network.parameters() if p.is_cuda}
        with evaluating(networks), torch.no_grad(), lent_generators([*gpus]):
            if script.evaluate is not None:
                self._print(figures_of(script.evaluate, 0)[0])
            if script.sample is not None:
                samples_of(script.sample, 1, 0)


def _tell(text: str) -> None:
    """Print a line, once where torchrun started several processes."""
    if os.environ.get("RANK", "0") == "0":
        print(text, flush=True)
