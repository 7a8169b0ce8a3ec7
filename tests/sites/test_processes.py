"""Recipes over two processes of a site."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import distributed as dist

from fedwan.app import load_run
from fedwan.config import Config
from fedwan.simulation import RUN_ID, simulate
from fedwan.site.group import Group, open_group
from fedwan.site.recipe import take_part
from fedwan.site.site import Membership
from fedwan.state import State, hash_state
from tests.site.support import Processes

pytestmark = pytest.mark.slow

FLOW = "workload=flow data.name=ring8 model.width=16 model.depth=2 data.batch=8"
GAN = "workload=gan data.name=ring8 model.width=4 data.batch=8"
CASES = [
    (f"{FLOW} site.precision=bf16-mixed", ("weights",)),
    (f"{GAN} inner.discriminator.clip_norm=0.05", ("gradients", "weights")),
    (f"{GAN} site.accumulate=2 site.precision=16-mixed strategy=sync", ("gradients",)),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    processes = Processes(2, tmp_path_factory.mktemp("pair"))
    yield processes
    processes.stop()


def asked(words: str, processes: int = 2) -> Config:
    usual = ["sites=1", "steps=4", "eval.every=0", "device=cpu", "checkpoint.every=1"]
    takes_h = [] if "sync" in words else ["h=2"]
    return load_run(None, [*usual, *takes_h, f"site.processes={processes}", *words.split()])


def train(config: Config, folder: Path) -> tuple[State, set[str]]:
    """The recipe's run; the final weights at rank 0, and the digests that parties ended with."""
    if not dist.is_initialized():
        ran = simulate(config, folder, train=lambda member: take_part(member, Group()))
    elif dist.get_rank() == 0:
        ran = simulate(config, folder, train=lambda member: take_part(member, open_group()))
    else:
        member = Membership(config, RUN_ID, "s1", folder / "s1", lambda: None)  # type: ignore[arg-type,return-value]
        take_part(member, open_group())
        return {}, set()
    return ran.model.state, {hash_state(ran.model.state), *ran.site_sha256.values()}


def both(pair: Processes, words: str, folder: Path) -> State:
    ran: list[Any] = pair.run(train, asked(words), folder)
    assert all(isinstance(one, tuple) and not hasattr(one, "error") for one in ran), ran
    state, sha256 = ran[0]
    assert len(sha256) == 1
    return state  # type: ignore[no-any-return]


def distance(a: State, b: State) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(("words", "partitions"), CASES)
def test_a_recipe_cut_any_way_trains_as_it_does_whole(
    words: str, partitions: tuple[str, ...], pair: Processes, tmp_path: Path
) -> None:
    whole = both(pair, words, tmp_path / "none")
    for partition in partitions:
        cut = both(pair, f"{words} site.partition={partition}", tmp_path / partition)
        assert distance(whole, cut) < (1e-2 if "precision" in words else 1e-5)


def test_tensor_parallel_trains_as_one_process_does(pair: Processes, tmp_path: Path) -> None:
    one, _ = train(asked(FLOW, processes=1), tmp_path / "one")
    cut = both(pair, f"{FLOW} site.partition=tensor_parallel", tmp_path / "two")
    assert 0 < distance(one, cut) < 1e-5
