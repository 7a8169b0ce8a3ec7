"""What a recipe's site measures by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.simulation import Absence
from fedwan.site.site import Membership
from fedwan.workloads.base import Batch
from tests.support import NET, TinyWorkload, run_tiny, take_part, tiny_config, tiny_shard


class Judge(TinyWorkload):
    """Keeps the labels that it was measured by."""

    def __init__(self) -> None:
        super().__init__(NET)
        self.labels: set[int] = set()

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        self.labels |= set(real.y.tolist())
        return super().evaluate(real, seed)


@pytest.mark.parametrize(("split", "labels"), [("own", {1}), ("iid", {0})])
def test_its_number_stands_beside_its_own_data_and_classes_beside_common_ones(
    split: str, labels: set[int], tmp_path: Path
) -> None:
    judges: list[Judge] = []

    def part(member: Membership, workload: Any) -> None:
        judges.append(workload)
        take_part(member, workload, dataclasses.replace(tiny_shard(0), told=1))

    config = tiny_config(sites=1)
    config.data.split = split
    run_tiny(tmp_path, config, make=Judge, part=part)
    assert judges[0].labels == labels


def test_under_sync_a_site_that_comes_back_draws_no_sample_of_merged_steps_again(
    tmp_path: Path,
) -> None:
    taken: list[list[Any]] = []

    def part(member: Membership, workload: Any) -> None:
        if member.name == "s2":
            taken.append(workload.batches)
        take_part(member, workload)

    def run(name: str, **options: Any) -> list[Any]:
        taken.clear()
        config = tiny_config("sync", h=0, steps=16, checkpoint={"every": 4})
        run_tiny(tmp_path / name, config, part=part, **options)
        return list(taken)

    (whole,) = run("whole")
    before, after = run("killed", absences={"s2": Absence(0.6, 0.6)})
    assert 4 < len(before) < 16 and (len(before) - 1) % 4, "not at a checkpoint"
    for batches, there in ((before, whole[: len(before)]), (after, whole[-len(after) :])):
        assert all(map(torch.equal, batches, there))
    assert len(before) + len(after) in (16, 17), "at most the step in which it died"
