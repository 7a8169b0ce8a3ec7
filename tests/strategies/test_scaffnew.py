"""Variates sum to nothing over the sites, whatever coding loses and whoever comes too late.

On the way up, that is. What is owed on the way down, all sites have in common.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.policy import RoundPolicy
from fedwan.simulation import Absence
from fedwan.site.replica import Replica
from fedwan.state import State
from fedwan.strategy import Landing
from strategies import scaffnew
from strategies.scaffnew import ControlVariates
from tests.planes import eventually
from tests.support import GAN, NET, Ran, WrappedLink, hub_of, run_tiny, same_bits, tiny_config

SITES, H, NUM_VERSIONS = 3, 5, 12
MOMENTUM = {"velocity": 0.5, "generator": 0.5, "discriminator": 0.5}


def is_missed(version: int) -> bool:
    """Whether the round from this version closes without s2."""
    return version in (3, 4, 8)


class TooLate(WrappedLink):
    """Contributions come when their round has closed, where that is to be."""

    def upload(self, header: wire.UploadHeader, payload: Any) -> wire.Receipt:
        if header.kind == wire.UploadHeader.CONTRIBUTION and is_missed(header.version):
            updates = hub_of(self._inner).rounds
            eventually(lambda: updates.versions[0] > header.version, within_s=30.0)
        return self._inner.upload(header, payload)


class Noted(ControlVariates):
    """Counts how often it began anew, and sees that what came too late has paid nothing."""

    num_forgotten = 0
    unpaid: State | None = None

    def on_land(self, fragment: Fragment, landing: Landing) -> bool:
        assert self.unpaid is None or same_bits(landing.residual, self.unpaid)
        self.unpaid = None if landing.is_merged else landing.residual
        return super().on_land(fragment, landing)

    def forget(self, fragment: Fragment) -> None:
        self.num_forgotten += 1
        super().forget(fragment)


def run(
    folder: Path, up: str, every: int = 1, apart: int = 0, **options: Any
) -> tuple[Ran, dict[str, Noted]]:
    """A run, and each site's variates; of its last process. `apart`: a discriminator's H."""
    made: dict[str, Noted] = {}

    def hook(replica: Replica) -> Noted:
        made[threading.current_thread().name] = Noted(MOMENTUM, replica)
        return made[threading.current_thread().name]

    sections = {
        "codec": {"up": up, "down": "fp32"},
        "round": {"quorum": SITES - 1, "patience_s": 30.0},
        "checkpoint": {"every": every},
        "network": {"discriminator": {"h": apart}} if apart else {},
    }
    of_run = {"sites": SITES, "h": H, "steps": NUM_VERSIONS * H, "kind": "regression"}
    config = tiny_config("scaffnew", GAN if apart else NET, **of_run, **sections)
    return run_tiny(folder, config, scaffnew.build(config)._replace(hook=hook), **options), made


def check_sum(made: dict[str, Noted]) -> None:
    assert len(made) == SITES
    for name in made["s1"].variates:
        values = torch.stack([hook.variates[name] for hook in made.values()])
        assert values.abs().max() > 1e-3
        assert values.sum(0).abs().max() < 1e-6
        first, *others = (hook.pushes[name] for hook in made.values())
        assert first.abs().max() > 1e-4
        assert all(torch.equal(first, other) for other in others)


@pytest.mark.parametrize("up", ["fp32", "int4"])
def test_what_all_sites_are_corrected_by_sums_to_nothing(
    up: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def decide(_: RoundPolicy, num_arrived: int, *args: Any) -> str:
        return "close" if num_arrived >= SITES - is_missed(args[2]) else "wait"

    monkeypatch.setattr(RoundPolicy, "decide", decide)
    late, made = run(tmp_path, up, wrap=lambda s, link: TooLate(link) if s == "s2" else link)
    assert late.result.totals.dropped == 3
    check_sum(made)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("up", "options", "num_forgotten"),
    [("fp32", {}, 0), ("fp32", {"every": 100}, 1), ("int4", {"apart": 1}, None)],
    ids=["with its folder", "without", "where networks travel apart"],
)
def test_it_does_after_a_site_came_back_or_all_begin_anew(
    up: str,
    options: dict[str, Any],
    num_forgotten: int | None,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        RoundPolicy, "decide", lambda _, num, *args: "close" if num == SITES else "wait"
    )
    ran, made = run(tmp_path, up, absences={"s2": Absence(1 / 3, 2 / 3)}, **options)
    assert ran.result.totals.rejoins == 1
    if num_forgotten is not None:
        assert {variates.num_forgotten for variates in made.values()} == {num_forgotten}
    check_sum(made)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_variates_are_kept_in_full_and_reach_a_parameter_whose_data_were_replaced(
    dtype: torch.dtype,
) -> None:
    net = torch.nn.Linear(2, 1, dtype=dtype)
    replica = Replica({"net": net}, {"net": torch.optim.SGD(net.parameters())})
    hook = ControlVariates({"net": 0.5}, replica)
    assert {value.dtype for value in hook.state.values()} == {torch.float32}
    hook.variates["net/weight"].fill_(1.0)
    net.weight.data = torch.zeros(1, 2, dtype=dtype)
    hook.after_step()
    assert net.weight.tolist() == [[1.0, 1.0]]
