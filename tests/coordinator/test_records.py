"""What is told of a round's contributions."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from fedwan.coordinator.records import RoundRows, Totals, VersionLines
from fedwan.link import wire_pb2 as wire
from fedwan.privacy import EPSILON
from fedwan.protocol.round import Key, Merge


def test_of_a_site_that_also_sent_one_late_the_fresh_one_is_compared() -> None:
    def merge(site: str, version: int, staleness: int) -> Any:
        sent: Any = SimpleNamespace(
            work=wire.Work(step=2 * version, samples=1), measures=SimpleNamespace(norms={})
        )
        return Merge(Key(0, version, site), sent, staleness, 1.0)

    rows: list[dict[str, Any]] = []
    merged = [merge("s1", 3, 0), merge("s2", 3, 0), merge("s2", 2, 1)]
    samples = [{"net": torch.tensor([value, 0.0])} for value in (1.0, 1.0, -1.0)]
    round_: Any = SimpleNamespace(fragment=SimpleNamespace(index=0), merged=merged, version=3)
    RoundRows(rows.append).add(round_, samples, {"net": torch.zeros(2)}, 8, 1.0)
    assert [row["cosines"] for row in rows] == [{"net": 1.0}, {"net": 1.0}, {}]


def test_of_all_sites_the_most_that_one_has_spent_of_its_privacy_counts() -> None:
    totals = Totals()
    for site, spent in (("s1", 0.5), ("s2", 3.0), ("s1", 2.0)):
        sent: Any = SimpleNamespace(work=wire.Work(figures={EPSILON: spent}))
        totals.add_round([Merge(Key(0, 0, site), sent, 0, 1.0)])
    assert totals.epsilon == 3.0


def test_what_was_told_before_a_version_stands_before_it() -> None:
    """A contribution is checked by the certificate of the line that tells of it."""
    lines: list[str] = []
    model: Any = SimpleNamespace(versions=[1], hash_of=lambda fragment: "")
    told = VersionLines(lambda row: lines.append(row["event"]), lambda: lines.append("renewed"))
    told.add(model, SimpleNamespace(index=0), [{"event": "contribution"}])  # type: ignore[arg-type]
    told.wait()
    assert lines == ["renewed", "contribution", "version"]
