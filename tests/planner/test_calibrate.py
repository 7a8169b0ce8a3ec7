"""A short calibration of a real workload."""

from __future__ import annotations

import pytest

from fedwan.app import resolve_workload
from fedwan.codecs import codec_by_name
from fedwan.config import Config, DataConfig
from fedwan.planner import calibrate
from fedwan.planner.candidates import synthetic_layout
from fedwan.planner.costs import CODECS


def test_steps_and_tensors_are_the_workload_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "BUDGET_S", 0.0)
    config = resolve_workload(Config(data=DataConfig("ring8"), model={"width": 4}))
    workload = calibrate.open_workload(config)
    layout = calibrate.trained_layout(workload, config.inner)
    params = [p for network in workload.networks.values() for p in network.parameters()]
    count = sum(param.numel() for param in params)
    assert sum(spec.num_values for spec in layout.values()) == count
    for inner in config.inner.values():
        inner.state = "average"
    layout = calibrate.trained_layout(workload, config.inner)
    # Second moments and steps; with beta1 = 0 no first ones.
    assert {inner.beta1 for inner in config.inner.values()} == {0.0}
    assert sum(spec.num_values for spec in layout.values()) == 2 * count + len(params)
    assert 0 < calibrate.step_seconds(config, workload) < 60


@pytest.mark.parametrize("name", ["fp32", "int4", "topk2"])
def test_codecs_are_timed_both_ways(name: str) -> None:
    speed = calibrate.coding_speed(codec_by_name(name), synthetic_layout(50_000))
    assert 0 < speed.encode_s < 1e-3 and 0 < speed.add_s < 1e-3


def test_no_more_is_coded_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(calibrate, "SAMPLE_VALUES", 10_000)
    assert calibrate.coding_costs(synthetic_layout(400_000)).keys() == CODECS.keys()


def test_what_stays_at_sites_is_not_planned_for() -> None:
    config = resolve_workload(Config(data=DataConfig("ring8"), model={"width": 4}))
    workload = calibrate.open_workload(config)
    workload.networks["discriminator"].requires_grad_(False)
    params = dict(workload.networks["discriminator"].named_parameters())
    *others, (name, last) = params.items()
    last.requires_grad_(True)
    layout = calibrate.trained_layout(workload, config.inner, {"generator": ["*.bias"]})
    assert not any(n.endswith(".bias") for n in layout if n.startswith("generator/"))
    assert [n for n in layout if n.startswith("discr")] == [f"discriminator/{name}"] and others
