"""A run's gate: one site of four sends what is far too large."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from fedwan.codecs.payload import Source
from fedwan.config import Config
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.model import GlobalModel
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.state import Role
from tests.planes import eventually
from tests.support import Ran, RewritingLink, hub_of, killed_after, run_tiny, tiny_config

ODD, FACTOR = "s3", 1_000_000


class GrowingLink(RewritingLink):
    """Contributions to some versions are much larger in one role than the site computed.

    A hostile site does not heed that they are refused.
    """

    def __init__(
        self,
        inner: Link,
        versions: range,
        role: Role = Role.PARAMETER,
        waits: bool = False,
        is_hostile: bool = False,
    ) -> None:
        super().__init__(inner, self._grow)
        self._waits = waits
        """Until the initial weights are at the coordinator."""
        self._versions = list(versions)
        self._role = role
        self._is_hostile = is_hostile

    def _grow(self, header: wire.UploadHeader, name: str, value: Tensor, role: Role) -> Tensor:
        is_grown = role is self._role and header.version in self._versions
        return value * FACTOR if is_grown else value

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        if self._waits and header.kind == wire.UploadHeader.CONTRIBUTION:
            eventually(lambda: hub_of(self._inner).model is not None)
        receipt = super().upload(header, payload)
        if receipt.status != wire.Receipt.REJECTED:
            return receipt
        if self._is_hostile:
            return wire.Receipt(status=wire.Receipt.ACCEPTED)
        self._versions.remove(header.version)
        return receipt


def ran(folder: Path, config: Config, wrap: Callable[[Link], Link], **words: Any) -> Ran:
    return run_tiny(
        folder,
        config,
        norm=True,
        wrap=lambda name, link: wrap(link) if name == ODD else link,
        **words,
    )


def four_sites(**sections: Any) -> Config:
    return tiny_config(sites=4, h=2, steps=14, kind="regression", **sections)


@pytest.mark.parametrize(
    ("role", "says", "is_killed"),
    [
        (Role.PARAMETER, "velocity's norm", False),
        (Role.PARAMETER, "velocity's norm", True),
        (Role.MEAN, "velocity's norm of running means", False),
        (Role.VARIANCE, "velocity's norm of running variances", False),
        (Role.COUNTER, "velocity's largest counter", False),
    ],
)
def test_what_is_far_too_large_is_refused_once_and_the_site_goes_on(
    role: Role, says: str, is_killed: bool, tmp_path: Path
) -> None:
    """Also by a coordinator that goes on for one that was killed."""
    config = four_sites(checkpoint={"every": 1})
    if is_killed:
        with killed_after(4):
            run_tiny(tmp_path, config, norm=True)
    run = ran(tmp_path, config, lambda link: GrowingLink(link, range(4, 5), role), resume=is_killed)
    assert (run.result.totals.rejected, run.result.totals.contributions) == (1, 28)
    assert len(run.hashes) == 1
    (text,) = run.events("rejected")
    assert text.startswith(f"contribution of {ODD} refused: {says} ")
    assert max(row["norms"]["velocity"] for row in run.rounds()) < 100


@pytest.mark.parametrize("strategy", ["diloco", "streaming_diloco", "scaffnew"])
@pytest.mark.parametrize("role", [Role.PARAMETER, Role.MEAN, Role.VARIANCE])
def test_in_the_first_rounds_what_is_far_above_the_others_is_left_out_and_all_go_on(
    strategy: str, role: Role, tmp_path: Path
) -> None:
    config = tiny_config(strategy, sites=4, h=2, steps=12, kind="regression")
    run = ran(tmp_path, config, lambda link: GrowingLink(link, range(2), role))
    told = run.events("rejected")
    assert len(told) >= 2 and all(text.startswith(f"contribution of {ODD} ") for text in told)
    assert len(told) + run.result.totals.contributions == 24 * len(run.result.model.versions)
    assert max(row["norms"]["velocity"] for row in run.rounds()) < 100
    assert len(run.hashes) == 1
    assert all(value.abs().max() < 100 for value in run.state.values())


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("strategy", ["diloco", "sync", "async_diloco"])
def test_a_counter_beyond_what_steps_can_count_moves_the_global_one_by_no_more(
    strategy: str, is_early: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is refused, or cut where it came before the initial weights."""
    set_model = Federation.set_model

    def late(hub: Federation, model: GlobalModel) -> None:
        eventually(lambda: sum(map(len, hub.rounds._whole)) == 2)
        set_model(hub, model)

    if is_early:
        monkeypatch.setattr(Federation, "set_model", late)
    h = 1 if strategy == "sync" else 2
    config = tiny_config(strategy, sites=2, h=h, steps=6 * h, round={"quorum": 2})

    def wrap(name: str, link: Link) -> Link:
        odd = GrowingLink(link, range(1), Role.COUNTER, waits=not is_early)
        return odd if name == "s2" else link  # type: ignore[return-value]

    run = run_tiny(tmp_path, config, norm=True, wrap=wrap)
    for text in run.events("rejected"):
        assert f"velocity's largest counter {h}e+06 is more than" in text
    assert is_early or len(run.events("rejected")) == 1
    warned = run.events("warning")
    assert warned == [] if not is_early else warned[0].startswith("s2's velocity's largest counter")
    counters = [v for v in run.state.values() if not v.is_floating_point()]
    assert counters and all(int(value) < (13_000 if is_early else 100) for value in counters)


@pytest.mark.slow
def test_a_hostile_site_does_not_end_the_run_of_a_quorum(tmp_path: Path) -> None:
    config = four_sites(round={"quorum": 3, "patience_s": 60.0})
    run = ran(tmp_path, config, lambda link: GrowingLink(link, range(4, 99), is_hostile=True))
    assert run.result.model.versions == [7]
    assert run.result.totals.rejected >= 3
    late = {row["site"] for row in run.rounds() if row["version"] > 5}
    assert late == {"s1", "s2", "s4"}


@pytest.mark.parametrize(
    "config",
    [
        tiny_config("sync", sites=4, h=1, steps=12),  # gradients vary
        four_sites(round={"gate": 0.0}),
    ],
    ids=["gradients", "without a gate"],
)
def test_what_is_not_gated_is_merged_however_large(config: Config, tmp_path: Path) -> None:
    run = ran(tmp_path, config, lambda link: GrowingLink(link, range(4, 5)))
    assert run.result.totals.rejected == 0
