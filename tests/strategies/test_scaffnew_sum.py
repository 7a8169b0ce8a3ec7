"""Variates sum to nothing over the sites, whatever coding loses and whoever comes too late.

On the way up, that is. What is owed on the way down, all sites have in common.
"""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan import simulate as simulation
from fedwan.config import CodecConfig, Config
from fedwan.coordinator.policy import RoundPolicy
from fedwan.link import wire_pb2 as wire
from fedwan.recipes import resolve_strategy
from fedwan.simulate import Absence, SimulatedRun, SimulatedSite, simulate
from fedwan.site import delta
from fedwan.site.variates import ControlVariates
from strategies import scaffnew
from tests.support import ADAM, TinyWorkload, tiny_shard

SITES, H, NUM_VERSIONS = 3, 5, 12
NET = {"velocity": ADAM}


def is_missed(version: int) -> bool:
    """Whether the round from this version closes without s2."""
    return version in (3, 4, 8)


class TooLate:
    """A link whose contributions come when their round has closed, where that is to be."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
        deadline = time.monotonic() + 30
        while (
            header.kind == wire.UploadHeader.CONTRIBUTION
            and is_missed(header.version)
            and self._inner._hub.outbox.versions[0] <= header.version
        ):
            assert time.monotonic() < deadline, "the others' round did not close"
            time.sleep(0.01)
        receipt: wire.Receipt = self._inner.upload(header, payload)
        return receipt


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> dict[str, ControlVariates]:
    """Each site's variates, by its name; of its last process."""
    found: dict[str, ControlVariates] = {}

    class Noted(ControlVariates):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            found[threading.current_thread().name] = self

    monkeypatch.setattr(delta, "ControlVariates", Noted)
    return found


def run(folder: Path, up: str = "fp32", **options: Any) -> SimulatedRun:
    config = Config(sites=SITES, h=H, steps=NUM_VERSIONS * H, inner=dict(NET))
    config.strategy, config.codec = "scaffnew", CodecConfig(up, "fp32")
    config.round.quorum, config.round.patience_s = SITES - 1, 30.0
    resolve_strategy(scaffnew, config, dict.fromkeys(NET, "regression"))

    def make() -> TinyWorkload:
        return TinyWorkload(NET)

    sites = {f"s{i + 1}": SimulatedSite(make(), tiny_shard(i), make) for i in range(SITES)}
    strategy = scaffnew.build(config)
    return simulate(sites, strategy, folder, num_steps=config.steps, batch=4, **options)


def check_sum(made: dict[str, ControlVariates]) -> None:
    assert len(made) == SITES
    for name in made["s1"].values:
        values = torch.stack([variates.values[name] for variates in made.values()])
        assert values.abs().max() > 1e-3
        assert values.sum(0).abs().max() < 1e-6


@pytest.mark.parametrize("up", ["fp32", "int4"])
def test_what_all_sites_are_corrected_by_sums_to_nothing(
    up: str, made: dict[str, ControlVariates], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(_: RoundPolicy, num_arrived: int, *args: Any, **kwargs: Any) -> str:
        version = args[2] if len(args) > 2 else kwargs["version"]
        return "close" if num_arrived >= SITES - is_missed(version) else "wait"

    monkeypatch.setattr(RoundPolicy, "decide", decide)
    late = run(tmp_path, up, wrap=lambda name, link: TooLate(link) if name == "s2" else link)
    assert late.totals.dropped == 3
    check_sum(made)


@pytest.mark.parametrize("keeps_folder", [True, False])
def test_it_does_after_a_site_has_lost_its_own_as_all_begin_anew(
    keeps_folder: bool,
    made: dict[str, ControlVariates],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(simulation, "STANDSTILL_S", 0.3)
    monkeypatch.setattr(
        RoundPolicy, "decide", lambda _, num, *args, **kwargs: "close" if num == SITES else "wait"
    )
    absences = {"s2": Absence(1 / 3, 2 / 3)}
    ran = run(tmp_path, absences=absences, checkpoint_every=1 if keeps_folder else 0)
    assert ran.totals.rejoins == 1
    told = [record for record in caplog.records if "begin anew" in record.getMessage()]
    assert len(told) == (0 if keeps_folder else SITES)
    check_sum(made)
