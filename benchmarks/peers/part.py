"""One process of a run of one system: what it is told, what it trains, and the files it leaves.

The very model, data, batches and inner optimiser are fedwan's. `digits_flow` is the recipe
`sites/flow.py` on its digits, `timed` a workload of pix2pix's size with steps of exactly 0.1 s
(`benchmarks/recipes`). Every system trains what `open_part` gives: the same initial weights, the
same shard, the same batches in the same order, the same noise.
"""

from __future__ import annotations

import os
import statistics
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks.harness.fleet import load_json, save_json
from benchmarks.harness.stopwatch import STOPWATCH, Watched
from fedwan.app import load_run, load_workload
from fedwan.config import Config, site_names
from fedwan.coordinator.model import update_ema
from fedwan.data.loader import Loader
from fedwan.data.shard import Shard, open_shard
from fedwan.errors import FedwanError
from fedwan.rng import NamedGenerators
from fedwan.state import State, clone, hash_state, layout_of, state_of


@dataclass(frozen=True)
class Spec:
    """A run; every process of it gets the folder that this lies in."""

    system: str
    """`ddp`, `torchft`, `flower` or `fedwan`."""
    workload: str
    """A recipe of `benchmarks/recipes`: `digits_flow` or `timed`."""
    steps: int
    """Of the whole training; schedules such as the average's half-life follow from it."""
    h: int
    """Steps between two exchanges; 1 for a system that exchanges gradients."""
    seed: int = 0
    sites: int = 2
    stop_at: int = 0
    """Steps after which this run ends, a multiple of `h`; 0 for `steps`."""
    points: int = 40
    """Looks at the moving average of the weights, evenly over `steps`."""
    step_s: float | None = None
    """What every system's steps count as: seconds of one that nothing disturbs, where known."""
    hosts: tuple[str, ...] = ("127.0.0.1", "127.0.0.1")
    """Address of each rank, for systems whose sites talk to each other; the first is the hub's."""
    words: tuple[str, ...] = ()
    """Settings of fedwan's configuration, `key=value`, for every system."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this system alone."""

    @property
    def num_steps(self) -> int:
        return self.stop_at or self.steps

    @classmethod
    def load(cls, folder: Path) -> Spec:
        values = load_json(folder / "spec.json")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def enter() -> tuple[Spec, Path, str]:
    """A process's part in a run, `FOLDER ROLE` on its command line; goes where the recipes are."""
    folder = Path(sys.argv[1]).resolve()
    os.chdir(folder / "app")
    spec = Spec.load(folder)
    STOPWATCH.nominal_s = spec.step_s
    return spec, folder, sys.argv[2]


WORKLOADS = ("digits_flow", "timed")
PORTS = tuple(range(29500, 29510))
"""Free in a namespace; what they are for is the system's affair."""


@dataclass(frozen=True)
class Part:
    config: Config
    workload: Watched
    shard: Shard
    rng: NamedGenerators
    stream: Loader

    @property
    def state(self) -> State:
        """The live weights, by fedwan's names."""
        return state_of(self.workload.networks)

    def step(self) -> None:
        self.workload.step(next(self.stream), self.rng, lambda: None)


def config_of(spec: Spec) -> Config:
    """The run as fedwan's configuration says it; to be called in the app's folder."""
    words = [f"{key}={getattr(spec, key)}" for key in ("workload", "sites", "steps", "seed")]
    words += ["device=cpu", f"h={spec.h}" if spec.h > 1 else "strategy=sync"]
    return load_run(None, [*words, *spec.words])


def open_part(spec: Spec, site: int, config: Config | None = None) -> Part:
    """A site's part, from 0, with torch on one thread; to be called in the app's folder."""
    torch.set_num_threads(1)
    config = config or config_of(spec)
    workload = load_workload(spec.workload).build(config, "cpu")
    shard = open_shard(config.data, site, spec.sites, spec.seed)
    rng = NamedGenerators(spec.seed, site_names(config)[site])
    stream = shard.loader(config.data.batch, rng["data"])
    return Part(config, workload, shard, rng, stream)


class Curve:
    """Follows the global weights of a run, which begin as those of the part that looks."""

    def __init__(self, part: Part, spec: Spec) -> None:
        self._part, self._spec = part, spec
        self._layout = layout_of(part.workload.networks)
        self._ema = clone(part.state)
        self._step = 0
        self._looks: list[tuple[int, float, State]] = []
        self._hash = ""

    def update(self, step: int, weights: State) -> None:
        """The global weights after so many steps, one outer update later than at the last call."""
        config = self._part.config
        if self._spec.points:
            samples = (step - self._step) * config.data.batch * config.num_sites
            update_ema(self._ema, weights, self._layout, samples, config.half_life)
        self.look(step, self._ema, weights)

    def look(self, step: int, ema: State, weights: State) -> None:
        """The average after so many steps, copied if it is time; and the weights.

        These are hashed at the step at which two runs are to agree.
        """
        every = max(1, self._spec.steps // max(1, self._spec.points))
        if self._spec.points and step // every > self._step // every:
            self._looks.append((step, time.monotonic(), clone(ema)))
        if step == self._spec.options.get("hash_at"):
            self._hash = hash_state(weights)
        self._step = step

    @torch.no_grad()
    def measure(self) -> dict[str, Any]:
        """Quality of every copy, JSON-ready; overwrites the part's weights."""
        part, curve, floor = self._part, [], None
        for step, at, weights in self._looks:
            for name, value in weights.items():
                part.state[name].copy_(value)
            figures = part.workload.evaluate(part.shard.held_out, part.config.seed)
            curve.append({"step": step, "at": at, "fd": figures["fd"]})
            floor = figures["fd_floor"]
        return {"curve": curve, "fd_floor": floor, "hash": self._hash}


def save_site(folder: Path, site: int, sha256: str, curve: Curve | None = None) -> None:
    """Write what a site has to say, and what it saw of the global weights; measures quality now."""
    result = STOPWATCH.result() | {"sha256": sha256} | (curve.measure() if curve else {})
    save_json(folder / f"site{site}.json", result)


class Peer(NamedTuple):
    """A system whose sites talk to each other, as a rank has joined it."""

    step: Callable[[], bool]
    """Takes a step; whether an exchange has ended."""
    weights: Callable[[], State]
    """What all ranks agree on, after the last exchange."""


def run_rank(join: Callable[[Spec, int, Part], AbstractContextManager[Peer]]) -> None:
    """The one loop of such systems: steps, looks at the weights, and the files that are left."""
    spec, folder, who = enter()
    site = int(who)
    # gloo opens a connection, and two threads, for each name in this list, and deals operations
    # out to them in turn: under a long round trip, several connections carry more than one.
    interface = "wan" if site else "wan0"
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([interface] * spec.options.get("flows", 1))
    part = open_part(spec, site)
    curve = Curve(part, spec) if site == 0 else None
    with join(spec, site, part) as peer:
        exchanges = 0
        for number in range(1, spec.num_steps + 1):
            if peer.step():
                exchanges += 1
                if curve is not None:
                    curve.update(number, peer.weights())
        if exchanges != (expected := spec.num_steps // spec.h):
            raise FedwanError(f"{exchanges} of {expected} exchanges were committed; see the log")
        save_site(folder, site, hash_state(peer.weights()), curve)
    sys.stdout.flush()
    os._exit(0)  # everything is written; gloo's threads can hang the interpreter's own way out


STEPS_ALONE = 100


def save_step_s(spec: Spec, folder: Path) -> None:
    """Measure what a step computes while nothing else runs; the first half warms up."""
    part = open_part(spec, 0)
    for _ in range(STEPS_ALONE):
        part.step()
    save_json(folder / "step_s.json", statistics.median(STOPWATCH.computed[STEPS_ALONE // 2 :]))


if __name__ == "__main__":
    save_step_s(*enter()[:2])
