"""Sites of two processes, started for real, that share out what `site.partition` says."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import torch
from fedwan.simulate import SimulatedSite, simulate
from fedwan.site.follower import shared
from fedwan.site.holding import HeldBytes
from fedwan.site.sharing import SharedWorkload

from fedwan.app import load_run, load_strategy, load_workload
from fedwan.config import Config
from fedwan.data import open_shard
from fedwan.data.loader import Loader
from fedwan.rng import NamedGenerators
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state
from fedwan.workloads.base import keep_local

CPU = torch.device("cpu")
FLOW = ("workload=flow", "model.width=16", "model.depth=2", "data.batch=8")
GAN = ("workload=gan", "model.width=8", "data.batch=8")
PIX2PIX = ("workload=pix2pix", "data.name=photo_edges", "model.width=4", "model.depth=3")
CLIPPED = ("inner.generator.clip_norm=0.1", "inner.discriminator.clip_norm=0.05")


def asked(partition: str, *words: str) -> Config:
    common = ("device=cpu", "threads=1", "sites=2", "steps=8", "h=4", "site.processes=2")
    return load_run(None, [*common, f"site.partition={partition}", *words])


class Taken(NamedTuple):
    """A site of two processes, between two steps."""

    leader: SharedWorkload
    replica: Replica
    stream: Loader
    rng: NamedGenerators

    def step(self, num: int) -> None:
        for _ in range(num):
            self.leader.step(next(self.stream), self.rng, keep_local)

    def moments(self) -> State:
        holding = self.replica.holding
        return {name: holding.take(name).clone() for name in self.replica.optimizer_state()}

    def sha256(self) -> tuple[str, str]:
        return self.replica.global_sha256(), hash_state(self.moments())

    def num_bytes(self) -> list[HeldBytes]:
        return self.leader.holding.num_bytes()


@contextmanager
def site(config: Config) -> Iterator[Taken]:
    rng = NamedGenerators(0, "s1")
    stream = open_shard(config.data, 0, 2, 0).loader(config.data.batch, rng["data"], CPU)
    with shared(load_workload(config.workload).build(config, CPU), config, CPU) as leader:
        assert isinstance(leader, SharedWorkload)
        yield Taken(leader, Replica(leader, config.inner, config.excluded), stream, rng)
    stream.close()


class Ran(NamedTuple):
    """How a run ended."""

    weights: State
    sites: set[str]
    """Digests of the weights that its sites ended on."""

    @property
    def sha256(self) -> str:
        return hash_state(self.weights)


def run(folder: Path, config: Config) -> Ran:
    """A run of two sites, of which the first has two processes."""
    plain = copy.deepcopy(config)
    plain.site.processes, plain.site.partition = 1, "none"
    recipe = load_workload(config.workload)
    shards = [open_shard(config.data, index, 2, 0) for index in range(2)]
    with shared(recipe.build(config, CPU), config, CPU) as leader:
        ran = simulate(
            {
                "s1": SimulatedSite(leader, shards[0]),
                "s2": SimulatedSite(recipe.build(plain, CPU), shards[1]),
            },
            load_strategy(config.strategy).build(config),
            folder,
            num_steps=config.steps,
            batch=config.data.batch,
            inner=config.inner,
            exclude=config.excluded,
        )
    return Ran(ran.model.state, set(ran.site_sha256.values()))
