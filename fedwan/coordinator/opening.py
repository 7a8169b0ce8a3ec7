"""How a run begins: the sites agree on what they train, and one of them sends its weights."""

from __future__ import annotations

import time
from pathlib import Path

from fedwan.codecs import fp32
from fedwan.config import Config
from fedwan.coordinator.federation import Federation
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import RunStopped, UserError
from fedwan.fragments import whole
from fedwan.memory import Tidier
from fedwan.protocol.agreement import Claim
from fedwan.state import hash_state
from fedwan.strategy import Strategy

ANOTHER = 0.2
"""Share of the patience after which another site is asked for initial weights, too."""


def await_agreement(hub: Federation, patience_s: float) -> Claim:
    """What the sites agree on; a `UserError` if they never will."""
    agreement, deadline_s = hub.agreement, time.monotonic() + patience_s
    while True:
        with hub.changed:
            if agreement.agreed is None:
                hub.tick()
            agreed, dispute = agreement.agreed, agreement.dispute()
        if agreed is not None:
            return agreed
        if dispute:
            raise UserError(f"the sites do not agree on what they train: {dispute}")
        heed_stop(hub)
        if time.monotonic() > deadline_s:
            raise RunStopped(
                f"{agreement.waits_for(hub.shut_out)}, after {patience_s:g} s; "
                "check that their services run and can reach the coordinator, or raise "
                "round.patience_s"
            )


def await_initial(
    hub: Federation,
    claim: Claim,
    strategy: Strategy,
    config: Config,
    tidier: Tidier,
    folder: Path | None = None,
) -> tuple[str, GlobalModel]:
    """Which site sent the weights that the sites agreed on, and these; see `GlobalModel`."""
    patience_s = config.round.patience_s
    moved_s = asked_s = time.monotonic()
    asked, failed, missing = "", list[str](), dict[str, int]()
    while True:
        with hub.changed:
            if hub.initial is None:
                hub.tick()
            found = hub.initial
        tidier.tidy()
        if found is not None:
            opener, payload = found
            initial = fp32().decode(payload, whole(claim.layout)[0].layout)
            model = GlobalModel(initial, claim.layout, strategy, config.half_life, folder)
            if (sha256 := hash_state(model.state)) == claim.initial_sha256:
                return opener, model
            hub.refuse_initial(
                opener,
                f"the initial weights that {opener} sent hash to {sha256[:12]}, "
                f"those that the sites hold to {claim.initial_sha256[:12]}",
            )
            failed.append(opener)
            missing.pop(opener, None)
        lost, now_s = hub.notice(), time.monotonic()
        for site, left in hub.missing_of_initial().items():
            if left < missing.get(site, left + 1):
                moved_s, missing[site] = now_s, left
        with hub.changed:
            if (first := hub.registry.first) != asked:
                asked, asked_s = first, now_s
            # One may also send a little now and then, for ever.
            is_slow = now_s > moved_s + patience_s * ANOTHER or now_s > asked_s + patience_s
            if is_slow and first and first not in failed:
                failed.append(first)
            hub.registry.replace_first([*lost, *failed], now_s)
        heed_stop(hub)
        if now_s > moved_s + patience_s:
            raise RunStopped(
                f"no site has sent initial weights for {patience_s:g} s; check that the sites' "
                "services run and can reach the coordinator, and hold the same weights"
            )


def heed_stop(hub: Federation) -> None:
    """End the run if the hub was told to, from outside."""
    if hub.stop_text:
        raise RunStopped(hub.stop_text)
