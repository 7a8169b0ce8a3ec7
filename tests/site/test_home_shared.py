"""What stays at a site whose processes share weights, gradients or moments out."""

from __future__ import annotations

import copy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from fedwan.site.common import same_draws

from fedwan.app import load_workload
from fedwan.config import Config
from fedwan.data import open_shard
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.replica import Replica
from fedwan.state import State, hash_state
from fedwan.workloads.base import keep_local
from tests.teams import CPU, FLOW, Taken, asked, site

ROOT = Path(__file__).resolve().parents[2]
FROZEN = {"velocity/read.weight", "velocity/read.bias", "velocity/blocks.0.first.weight"}
MINE = {"velocity/write.weight", "velocity/write.bias"}
EXCLUDE = ("network.velocity.exclude=[write.*]",)
PARTLY = """

_build = build


def build(config, device):
    flow = _build(config, device)
    velocity = flow.networks["velocity"]
    velocity.read.requires_grad_(False)
    velocity.blocks[0].first.weight.requires_grad_(False)
    return flow
"""


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An app with a recipe whose network is frozen in part."""
    for folder in ("sites", "strategies"):
        shutil.copytree(ROOT / folder, tmp_path / "app" / folder)
    flow = (ROOT / "sites" / "flow.py").read_text()
    (tmp_path / "app" / "sites" / "partly.py").write_text(flow + PARTLY)

    def forget() -> dict[str, object]:
        names = [name for name in sys.modules if name.split(".")[0] in ("sites", "strategies")]
        return {name: sys.modules.pop(name) for name in names}

    others = forget()
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    monkeypatch.chdir(tmp_path / "app")
    yield tmp_path
    forget()
    sys.modules.update(others)  # type: ignore[arg-type]


def asked_partly(partition: str) -> list[str]:
    # Adam would make steps of what rounding leaves of gradients.
    inner = ("name=sgd", "beta1=0.9", "lr=0.1", "state=average")
    words = [f"inner.velocity.{word}" for word in inner]
    return [partition, *FLOW, "workload=partly", *words, *EXCLUDE]


def held(replica: Replica) -> State:
    return {name: replica.take(name).clone() for name in (*replica.live, *sorted(FROZEN | MINE))}


def alone(config: Config, num: int) -> Replica:
    """A site of one process, after the same batches and draws as processes take together."""
    plain = copy.deepcopy(config)
    plain.site.processes, plain.site.partition = 1, "none"
    workload = load_workload(config.workload).build(plain, CPU)
    replica = Replica(workload, config.inner, config.excluded)
    rng = NamedGenerators(0, "s1")
    stream = open_shard(config.data, 0, 2, 0).loader(config.data.batch, rng["data"], CPU)
    for _ in range(num):
        draw = int(torch.randint(1 << 62, (), generator=rng["team"]))
        workload.step(next(stream), same_draws(draw), keep_local)
    stream.close()
    return replica


def check_home(taken: Taken) -> None:
    """Nothing that lands changes what is the site's own, or frozen."""
    replica = taken.replica
    before = held(replica)
    zeros = {name: torch.zeros_like(value) for name, value in replica.base.items()}
    with replica.showing(zeros):
        taken.leader.sample(2, 0)
    after = held(replica)
    for name, value in before.items():
        assert torch.equal(after[name], value), name
    replica.adopt(zeros)
    after = held(replica)
    for name, value in before.items():
        assert torch.equal(after[name], value if name in FROZEN | MINE else torch.zeros_like(value))


@pytest.mark.slow
@pytest.mark.parametrize("partition", ["optimizer", "gradients", "weights", "tensor_parallel"])
def test_what_stays_home_is_the_same_however_a_site_shares_out(app: Path, partition: str) -> None:
    ends: dict[str, State] = {}
    hashes = set()
    for kind in ("none", partition):
        config = asked(*asked_partly(kind))
        with site(config) as taken:
            replica = taken.replica
            start = held(replica)
            assert not (FROZEN | MINE) & (replica.layout.keys() | replica.live.keys())
            hashes.add((replica.initial_sha256, replica.frozen_sha256))
            taken.step(3)
            ends[kind] = held(replica)
            moments = {name.partition("|")[2] for name in replica.optimizer_state()}
            assert not FROZEN & moments and moments >= MINE
            checkpoints = SiteCheckpoints(app / kind, replica, taken.stream, taken.rng)
            checkpoints.save(1, 0, Ledger({}, {}, Work(3, 24), (1,)))
            taken.step(1)
            check_home(taken)
            checkpoints.load(1, with_model=True)
            for name, value in held(replica).items():
                assert torch.equal(value, ends[kind][name]), name
    assert len(hashes) == 1
    for name in FROZEN | MINE:
        assert torch.equal(ends[partition][name], start[name]) is (name in FROZEN), name
    if partition == "tensor_parallel":
        expected = held(alone(config, 3))
        torch.testing.assert_close(ends[partition], expected, rtol=1e-4, atol=1e-6)
    else:
        assert hash_state(ends[partition]) == hash_state(ends["none"])
