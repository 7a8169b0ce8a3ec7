"""Seconds per value, and what a fragment weighs."""

from __future__ import annotations

import math

import pytest

from fedwan.app import load_workload, resolve_workload
from fedwan.codecs import codec_by_name
from fedwan.config import Config, DataConfig, NetworkConfig
from fedwan.errors import ConfigError
from fedwan.fragments import whole
from fedwan.planner import costs
from fedwan.planner.costs import Costs, global_bytes, load_of, speed
from fedwan.recipes import travelling
from tests.planner.models import LAYOUT, strategy_of

WHOLE = whole(LAYOUT)[0]


def test_bytes_are_the_codecs_own_payloads_less_what_packing_saves() -> None:
    assert speed("new") == speed("topk2")  # as slow as the slowest
    for codec, share in (("int4", 0.845), ("bf16", 0.777), ("fp32", 0.924)):
        strategy = strategy_of("diloco", 2, 20, codec)
        packed, raw = (load_of(strategy, WHOLE, Costs(packs=packs)) for packs in (True, False))
        assert raw.up_bytes == codec_by_name(codec).payload_bytes(LAYOUT)
        assert packed.up_bytes == packed.down_bytes == math.ceil(share * raw.up_bytes)
    assert global_bytes(LAYOUT, Costs()) < 0.93 * global_bytes(LAYOUT, Costs(packs=False))


def test_a_site_holds_a_copy_where_it_goes_on_and_stands_for_others_at_the_merge() -> None:
    strategy = strategy_of("diloco", 2, 20)
    one, ten = (load_of(strategy, WHOLE, Costs(stands_for=n)) for n in (1, 10))
    assert ten.merge_s == 10 * one.merge_s and ten._replace(merge_s=one.merge_s) == one
    streaming = strategy_of("streaming_diloco", 2, 20, stream=(2, 5))
    assert load_of(streaming, WHOLE, Costs()).hold_s > 0 == one.hold_s


def test_steps_and_tensors_are_the_workload_s_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    config = resolve_workload(Config(data=DataConfig("ring8"), model={"width": 4}))
    workload = load_workload(config.workload).build(config, "cpu")
    params = [p for network in workload.networks.values() for p in network.parameters()]
    count = sum(param.numel() for param in params)

    def travels() -> dict[str, int]:
        return {name: spec.num_values for name, spec in travelling(config, workload).items()}

    assert sum(travels().values()) == count
    assert 0 < costs.step_seconds(config, workload) < 60
    discriminator = workload.networks["discriminator"].requires_grad_(False)
    *others, (name, last) = discriminator.named_parameters()
    last.requires_grad_(True)
    config.network = {"generator": NetworkConfig(exclude=["*.bias"])}
    assert not any(n.endswith(".bias") for n in travels() if n.startswith("generator/"))
    assert [n for n in travels() if n.startswith("discr")] == [f"discriminator/{name}"] and others


def test_steps_are_timed_on_a_recipe_s_own_data_and_refused_where_these_are_encoded_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(costs, "BUDGET_S", 0.0)
    config = resolve_workload(Config(workload="tests.workloads.pictures"))  # data.name is digits
    workload = load_workload(config.workload).build(config, "cpu")
    assert 0 < costs.step_seconds(config, workload) < 60
    workload.prepare = lambda shard, folder: shard
    with pytest.raises(ConfigError, match="add step_s=SECONDS"):
        costs.step_seconds(config, workload)
