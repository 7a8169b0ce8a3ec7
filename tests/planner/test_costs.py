"""Seconds per value, and what a fragment weighs."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from fedwan.app import load_workload, resolve_workload
from fedwan.codecs import codec_by_name
from fedwan.config import Config, DataConfig, NetworkConfig
from fedwan.fragments import whole
from fedwan.planner import costs
from fedwan.planner.candidates import synthetic_layout
from fedwan.planner.costs import CODECS, Costs, global_bytes, load_of
from fedwan.recipes import travelling
from tests.planner.models import LAYOUT, strategy_of

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "results.md"


def test_the_defaults_are_those_of_the_published_table() -> None:
    table = RESULTS.read_text().split("| codec | bits a value")[1]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[2:8]]
    assert len(rows) == len(Costs().codecs)
    for name, _, encode_mb, add_mb, _ in rows:
        speed = Costs().speed(name)
        assert speed.encode_s == pytest.approx(4e-6 / float(encode_mb.replace(",", "")))
        assert speed.add_s == pytest.approx(4e-6 / float(add_mb.replace(",", "")))


def test_a_codec_that_nobody_timed_is_as_slow_as_the_slowest() -> None:
    assert Costs().speed("new") == Costs().speed("topk2")


def test_bytes_are_those_of_the_codec_s_own_payloads() -> None:
    strategy = strategy_of("streaming_diloco", 2, 20, "int4", stream=(5, 10))
    fragments, unpacked = strategy.fragments(LAYOUT), Costs(packs=False)
    loads = [load_of(strategy, fragment, unpacked) for fragment in fragments]
    assert [load.up_bytes for load in loads] == [
        codec_by_name("int4").payload_bytes(fragment.layout) for fragment in fragments
    ]
    assert sum(load.up_bytes for load in loads) * 7 < global_bytes(LAYOUT, unpacked)


def test_what_is_packed_weighs_less_by_what_its_codec_leaves() -> None:
    for codec, share in (("int4", 0.845), ("bf16", 0.777), ("fp32", 0.924)):
        strategy = strategy_of("diloco", 2, 20, codec)
        packed, raw = (
            load_of(strategy, whole(LAYOUT)[0], Costs(packs=packs)) for packs in (True, False)
        )
        assert packed.up_bytes == packed.down_bytes == math.ceil(share * raw.up_bytes)
    assert global_bytes(LAYOUT, Costs()) < 0.93 * global_bytes(LAYOUT, Costs(packs=False))


def test_a_site_holds_a_copy_only_where_it_goes_on_meanwhile() -> None:
    for name, stream, holds in (("streaming_diloco", (2, 5), True), ("diloco", None, False)):
        strategy = strategy_of(name, 2, 20, stream=stream)
        load = load_of(strategy, whole(LAYOUT)[0], Costs())
        assert (load.hold_s > 0) is holds


def test_sites_that_are_not_simulated_are_merged_all_the_same() -> None:
    strategy = strategy_of("diloco", 2, 20)
    one, ten = (load_of(strategy, whole(LAYOUT)[0], Costs(stands_for=n)) for n in (1, 10))
    assert ten.merge_s == 10 * one.merge_s and ten._replace(merge_s=one.merge_s) == one


def test_steps_and_tensors_are_the_workload_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    config = resolve_workload(Config(data=DataConfig("ring8"), model={"width": 4}))
    workload = load_workload(config.workload).build(config, "cpu")
    layout = travelling(config, workload)
    params = [p for network in workload.networks.values() for p in network.parameters()]
    count = sum(param.numel() for param in params)
    assert sum(spec.num_values for spec in layout.values()) == count
    for inner in config.inner.values():
        inner.state = "average"
    layout = travelling(config, workload)
    # Second moments and steps; with beta1 = 0 no first ones.
    assert {inner.beta1 for inner in config.inner.values()} == {0.0}
    assert sum(spec.num_values for spec in layout.values()) == 2 * count + len(params)
    assert 0 < costs.step_seconds(config, workload) < 60


@pytest.mark.parametrize("name", ["fp32", "int4", "topk2"])
def test_codecs_are_timed_both_ways(name: str) -> None:
    speed = costs.coding_speed(codec_by_name(name), 50_000)
    assert 0 < speed.encode_s < 1e-3 and 0 < speed.add_s < 1e-3


def test_no_more_is_coded_than_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "SAMPLE_VALUES", 10_000)
    assert costs.coding_costs(synthetic_layout(400_000)).keys() == CODECS.keys()


def test_what_stays_at_sites_is_not_planned_for() -> None:
    config = resolve_workload(Config(data=DataConfig("ring8"), model={"width": 4}))
    workload = load_workload(config.workload).build(config, "cpu")
    workload.networks["discriminator"].requires_grad_(False)
    params = dict(workload.networks["discriminator"].named_parameters())
    *others, (name, last) = params.items()
    last.requires_grad_(True)
    config.network = {"generator": NetworkConfig(exclude=["*.bias"])}
    layout = travelling(config, workload)
    assert not any(n.endswith(".bias") for n in layout if n.startswith("generator/"))
    assert [n for n in layout if n.startswith("discr")] == [f"discriminator/{name}"] and others
