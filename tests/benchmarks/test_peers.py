"""The comparison with peers: its workloads and its arithmetic."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.harness.fleet import lay_app
from benchmarks.harness.stopwatch import STOPWATCH, Ungenerative, Watched
from benchmarks.peers import compare
from benchmarks.peers.ddp import with_outer_steps
from benchmarks.peers.part import Curve, Part, Spec, config_of, open_part
from benchmarks.peers.run import Outcome
from benchmarks.wan import BARE, WanLink
from fedwan.coordinator.model import update_ema
from fedwan.data.shard import open_shard
from fedwan.errors import FedwanError
from fedwan.rng import NamedGenerators
from fedwan.state import clone, hash_state, layout_of, state_of
from fedwan.workloads.base import Batch
from tests.support import keep_local

COLUMNS = "system link rate_mbit rtt_ms loss steps h wall_s bytes_up bytes_down utilisation fd"
LINK = WanLink(rate_mbit=200, rtt_ms=100)


@pytest.fixture
def app(no_recipes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The benchmark's app, entered as its processes enter it; nothing of it is left behind."""
    monkeypatch.syspath_prepend(str(folder := lay_app(tmp_path / "app")))
    monkeypatch.chdir(folder)
    yield folder
    STOPWATCH.began.clear()
    STOPWATCH.computed.clear()
    STOPWATCH.nominal_s = None


# The workloads ------------------------------------------------------------------------------------


def test_the_digits_flow_is_fedwans_own_to_the_bit(app: Path) -> None:
    spec = Spec("ddp", "digits_flow", 40, 1, seed=3)
    part = open_part(spec, 1)
    from sites import flow

    own = flow.build(part.config, "cpu")
    rng = NamedGenerators(3, "s2")
    batches = open_shard(part.config.data, 1, 2, 3).loader(part.config.data.batch, rng["data"])
    for _ in range(3):
        part.step()
        own.step(next(batches), rng, keep_local)
    assert hash_state(part.state) == hash_state(state_of(own.networks))
    assert part.config.data.batch == 64 and part.config.inner["velocity"].lr == 5e-4


def test_fedwan_s_synchronous_training_exchanges_in_every_step(app: Path) -> None:
    args: Any = SimpleNamespace(workload="digits_flow", steps=40)
    spec = compare.spec_of("sync-int4", args, seed=0, is_bounded=True)
    config = config_of(spec)
    assert (spec.system, spec.h, spec.num_steps, config.strategy) == ("fedwan", 1, 40, "sync")
    assert (config.codec.up, config.codec.down) == ("int4", "int4")


# The clock and the curve --------------------------------------------------------------------------


class Weighed(Ungenerative):
    """A workload whose quality is the sum of its weights."""

    step = None

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        return {"fd": float(self.networks["net"].weight.sum()), "fd_floor": 0.5}  # type: ignore[union-attr,operator]


def test_the_curve_is_of_the_average_that_fedwan_keeps_and_is_measured_afterwards() -> None:
    config: Any = SimpleNamespace(
        data=SimpleNamespace(batch=8), num_sites=2, half_life=64.0, seed=0
    )
    workload = Watched(Weighed({"net": torch.nn.Linear(2, 2)}, {}))
    nothing: Any = SimpleNamespace(held_out=None)
    part = Part(config, workload, nothing, nothing, nothing)
    spec = Spec("ddp", "digits_flow", 8, 1, points=2, options={"hash_at": 5})
    layout = layout_of(part.workload.networks)
    ema = clone(part.state)
    curve = Curve(part, spec)
    expected, hashes = [], {}
    for step in range(1, 9):
        weights = {name: value + step for name, value in part.state.items()}
        curve.update(step, weights)
        update_ema(ema, weights, layout, 16, 64.0)
        hashes[step] = hash_state(weights)
        if step in (4, 8):
            expected.append((step, float(ema["net/weight"].sum())))
    result = curve.measure()
    assert [(p["step"], p["fd"]) for p in result["curve"]] == expected
    assert result["hash"] == hashes[5] and result["fd_floor"] == 0.5


def test_outer_steps_over_synchronous_ones_are_nesterovs() -> None:
    weights = {"net/w": torch.tensor([1.0])}

    def lower() -> None:
        weights["net/w"] -= 1.0

    step = with_outer_steps(lower, weights, 2, 1.0, 0.5)
    seen = [(step(), float(weights["net/w"]))[1] for _ in range(5)]
    # Moved by 2, of which half is kept: 2 + 0.5 x 2, then 2 + 0.5 x (0.5 x 2 + 2).
    assert seen == [0.0, -2.0, -3.0, -5.5, -6.5]


# From runs to rows --------------------------------------------------------------------------------


def outcome(*, h: int = 2, steps: int = 8, stop_at: int = 0, hash_: str = "aa") -> Outcome:
    """Two sites whose steps compute 1 s; after every H of them they wait 3 s."""
    spec = Spec("fedwan", "digits_flow", steps, h, stop_at=stop_at)
    sites: list[dict[str, Any]] = []
    for late in (0.0, 0.5):
        began = [100 + late + step + 3 * (step // h) for step in range(spec.num_steps)]
        told = {"computed": [1.0] * spec.num_steps, "ended": began[-1] + 4, "sha256": "f"}
        sites.append({"began": began, **told})
    curve = [{"step": 4, "at": 108.5, "fd": 2.0}, {"step": 8, "at": 118.5, "fd": 1.0}]
    sites[0] |= {"curve": curve, "fd_floor": 0.7, "hash": hash_}
    # 10 and 1 bytes a second, on both links.
    looks = [(90.0 + second, np.array([[10, 1], [10, 1]]) * second) for second in range(40)]
    return Outcome(spec, "tun", sites, looks)


def test_a_row_has_times_from_the_last_sites_first_step_and_utilisation_of_whole_rounds() -> None:
    row = compare.make_row("fedwan", outcome(), LINK)
    assert " ".join(row).startswith(COLUMNS)
    assert (row["link"], row["rate_mbit"], row["rtt_ms"], row["loss"]) == ("wan", 200, 100, 0)
    assert row["wall_s"] == 20.0  # from 100.5 to 120.5
    assert row["time_to_fd_s"] == 18.0 and row["fd"] == 1.0 and row["fd_from"] == "itself"
    # On one link from 100 on, on the other from 100.5.
    assert (row["bytes_up"], row["bytes_down"]) == (405, 40)
    assert json.loads(json.dumps(row)) == row
    assert row["utilisation"] == pytest.approx(2 / 5)  # 2 s of steps, 3 s of waiting
    assert row["s_per_step"] == pytest.approx(5 / 2)
    with pytest.raises(FedwanError, match="take 8 or more"):
        compare.make_row("fedwan", outcome(steps=6), LINK)


def test_a_curve_is_borrowed_only_from_the_same_training() -> None:
    fast = compare.make_row("ddp", outcome(steps=10), BARE)
    short = compare.make_row("ddp", outcome(steps=10, stop_at=8), LINK)
    row = compare.borrow_curve(short, fast)
    assert row["fd_from"] == "fast link" and row["steps"] == 8 and row["fd_steps"] == 10
    assert row["time_to_fd_s"] == pytest.approx(8 * short["s_per_step"])
    other = compare.make_row("ddp", outcome(steps=10, hash_="bb"), BARE)
    with pytest.raises(FedwanError, match="no curve can be borrowed"):
        compare.borrow_curve(short, other)
