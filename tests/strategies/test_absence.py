"""A site dies at a third of the run and returns at two thirds: every strategy bears it."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from fedwan import simulate as simulation
from fedwan.config import Config, NetworkConfig
from fedwan.coordinator import rounds
from fedwan.recipes import resolve_strategy
from fedwan.simulate import Absence, SimulatedSite, simulate
from fedwan.state import hash_state
from strategies import (
    async_diloco,
    diloco,
    eager_diloco,
    local_sgd,
    parameter_server,
    scaffnew,
    sparse_loco,
    streaming_diloco,
    sync,
)
from tests.support import ADAM, TinyWorkload, tiny_shard

NET = {"velocity": ADAM}
APART = {"discriminator": ADAM, "generator": ADAM}
SITES, BATCH, NUM_VERSIONS = 3, 4, 30
RECIPES = {
    "async_diloco": async_diloco,
    "diloco": diloco,
    "diloco, steps by speed": diloco,
    "eager_diloco": eager_diloco,
    "local_sgd": local_sgd,
    "parameter_server": parameter_server,
    "scaffnew": scaffnew,
    "sparse_loco": sparse_loco,
    "streaming_diloco": streaming_diloco,
    "streaming_diloco, networks apart": streaming_diloco,
    "sync": sync,
}
WITHOUT_GRACE = (async_diloco, parameter_server, sync)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "quorum"),
    [(name, quorum) for name in RECIPES for quorum in (2, 3) if (name, quorum) != ("sync", 2)],
)
def test_the_run_ends_and_all_sites_agree(
    name: str, quorum: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rounds, "TICK_S", 0.02)
    monkeypatch.setattr(simulation, "STANDSTILL_S", 0.3)
    recipe: ModuleType = RECIPES[name]
    net = APART if "apart" in name else NET

    def make() -> TinyWorkload:
        return TinyWorkload(net)

    h = 1 if recipe in (parameter_server, sync) else 6
    config = Config(strategy=name, sites=SITES, h=h, steps=NUM_VERSIONS * h, inner=dict(net))
    config.round.quorum = quorum
    config.round.patience_s = 30.0
    if quorum < SITES and recipe not in WITHOUT_GRACE:
        config.round.grace = 3.0
    if recipe in (eager_diloco, streaming_diloco):
        config.stream.fragments = 2
    config.round.least_steps = 1 if "speed" in name else 0
    if net is APART:
        config.network = {"discriminator": NetworkConfig(h=2)}
    resolve_strategy(recipe, config, dict.fromkeys(net, "regression"))
    members = {
        f"s{i + 1}": SimulatedSite(make(), tiny_shard(i), rebuild=make) for i in range(SITES)
    }
    ran = simulate(
        members,
        recipe.build(config),
        tmp_path,
        num_steps=config.steps,
        batch=BATCH,
        absences={"s2": Absence(1 / 3, 2 / 3)},
    )
    assert {hash_state(ran.model.state)} == set(ran.site_sha256.values())
    steps = [row["step"] for row in ran.records if row["kind"] == "round" and row["site"] == "s2"]
    assert steps[-1] >= 0.9 * config.steps or h == 1, "it came back"
    assert ran.totals.rejoins == 1
