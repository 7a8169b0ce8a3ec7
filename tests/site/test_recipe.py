"""What a recipe's site measures by."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

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
