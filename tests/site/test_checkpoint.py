"""A site's checkpoints: which are kept, and what they bring back."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fedwan.errors import CheckpointError
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import Ledger, SiteCheckpoints, Work
from fedwan.site.replica import Replica
from fedwan.workloads.base import keep_local
from tests.runs import BATCH, SameStart, tiny_workload
from tests.support import same_bits, tiny_shard


class Site:
    def __init__(self, folder: Path) -> None:
        self.workload: SameStart = tiny_workload()  # type: ignore[assignment]
        self.replica = Replica(self.workload)
        self.rng = NamedGenerators(0, "s1")
        self.stream = tiny_shard(1).batches(BATCH, self.rng["data"])
        self.checkpoints = SiteCheckpoints(folder, self.replica, self.stream, self.rng)

    def train(self, num_steps: int) -> None:
        for _ in range(num_steps):
            self.workload.step(self.stream.next_batch(), self.rng, keep_local)

    def save(self, version: int, durable: int = 0) -> None:
        owed = {"net/owed": torch.tensor([1.5])}
        residual = {"net/owed": torch.tensor([0.5])}
        self.checkpoints.save(version, durable, Ledger(residual, owed, Work(3, 12), (7,)))


def test_a_site_goes_on_from_a_checkpoint_as_if_nothing_had_happened(tmp_path: Path) -> None:
    first = Site(tmp_path)
    first.train(3)
    first.save(1)
    torch_draw = torch.rand(3)
    first.train(4)

    second = Site(tmp_path)
    restored = second.checkpoints.load(1, with_model=True)
    assert torch.equal(torch.rand(3), torch_draw)
    second.train(4)
    assert same_bits(second.replica.live, first.replica.live)
    assert same_bits(second.replica.optimizer_state(), first.replica.optimizer_state())
    assert restored.residual["net/owed"].tolist() == [0.5]
    assert restored.owed["net/owed"].tolist() == [1.5]
    assert (restored.work, restored.versions) == (Work(3, 12), (7,))


def test_without_the_model_only_the_rest_comes_back(tmp_path: Path) -> None:
    first = Site(tmp_path)
    first.train(3)
    first.save(1)
    second = Site(tmp_path)
    before = {name: value.clone() for name, value in second.replica.live.items()}
    second.checkpoints.load(1, with_model=False)
    assert same_bits(second.replica.live, before)
    assert same_bits(second.replica.optimizer_state(), first.replica.optimizer_state())


def test_all_are_kept_from_the_one_that_the_coordinator_would_resume_from(
    tmp_path: Path,
) -> None:
    site = Site(tmp_path)
    site.train(1)
    for version, durable in ((1, 0), (2, 0), (3, 2), (4, 2), (5, 4)):
        site.save(version, durable)
    assert site.checkpoints.versions() == [4, 5]


def test_versions_that_were_taken_back_go_too(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.train(1)
    site.save(7, 3)
    site.save(4, 3)  # the coordinator resumed at 3
    assert site.checkpoints.versions() == [4]


def test_a_file_half_written_is_no_checkpoint(tmp_path: Path) -> None:
    site = Site(tmp_path)
    site.train(1)
    (tmp_path / "site-00000009.safetensors.tmp").write_bytes(b"half")
    (tmp_path / ".site-00000008.safetensors.1.tmp").write_bytes(b"half")
    assert site.checkpoints.versions() == []
    site.save(1)
    path = tmp_path / "site-00000001.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    with pytest.raises(CheckpointError, match="site-00000001"):
        site.checkpoints.load(1, with_model=True)
