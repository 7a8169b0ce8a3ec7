"""One run at the coordinator: wait until the sites agree, then train.

It knows no workload: layout, kinds and steps come with Join, the strategy from the configuration.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

from fedwan.app import complete, load_strategy, sources
from fedwan.config import Config, site_names
from fedwan.coordinator.agreement import Agreement, Claim
from fedwan.coordinator.intake import Intake
from fedwan.coordinator.model import GlobalModel, read_meta
from fedwan.coordinator.registry import Registry
from fedwan.coordinator.rounds import Rounds
from fedwan.coordinator.servicer import Servicer
from fedwan.coordinator.totals import Totals
from fedwan.errors import CheckpointError, RunStopped, UserError
from fedwan.link.client import CHUNK_BYTES
from fedwan.strategy import Strategy

__all__ = ["CoordinatedRun"]

TICK_S = 0.5


class CoordinatedRun:
    """Between sites and round loop.

    Args:
        config: resolved; of a script's own networks as far as it can be without them.
        run_id: of the run; the same when it is resumed.
        folder: of the run; checkpoints and large payloads go there.
        record: takes rows of `metrics.jsonl`.
        event: takes (event, site or None, text) for the user.
        on_samples: takes (version, step, safetensors bytes) of generated samples.
        strategy: in place of the one that the configuration names.
        silence_s: a site that was not heard for so long counts as lost.
    """

    def __init__(
        self,
        config: Config,
        run_id: str,
        folder: Path,
        record: Callable[[dict[str, Any]], None],
        event: Callable[[str, str | None, str], None],
        on_samples: Callable[[int, int, bytes], None],
        strategy: Strategy | None = None,
        silence_s: float = 10.0,
    ) -> None:
        self.config = config
        self._folder = folder
        self._record = record
        self._on_samples = on_samples
        self._strategy = strategy
        self._sources = None if strategy else sources(config)
        names = site_names(config)
        self._registry = Registry(names, silence_s, time.monotonic)
        self._agreement = Agreement(names, config.round.quorum or len(names))
        self.hub = Servicer(
            run_id, self._registry, self._agreement, event, CHUNK_BYTES, self._sources
        )
        self._resumed: tuple[GlobalModel, Totals] | None = None
        self._rounds: Rounds | None = None

    @property
    def rounds(self) -> Rounds:
        """The round loop, once the run has begun."""
        assert self._rounds is not None, "sites have agreed"
        return self._rounds

    def share_done(self) -> float:
        """Of the run, 0 to 1."""
        return self._rounds.share_done() if self._rounds else 0.0

    def resume(self) -> int:
        """Go on from the checkpoint in the run's folder; the version that it is of.

        Raises:
            CheckpointError: there is none, or it is not of this run's strategy.
        """
        meta = read_meta(self._folder / "checkpoint")
        try:
            claim = Claim(*meta["claim"])
            totals = Totals(**meta["totals"])
        except (KeyError, TypeError) as error:
            raise CheckpointError(
                f"checkpoint in {self._folder / 'checkpoint'} is of another version of fedwan "
                f"({error}); resume with the one that it began with"
            ) from None
        self._agreement.agreed = claim
        self._settle(claim)
        model = GlobalModel.load(self._folder / "checkpoint", self._built, self.config)
        self._resumed = model, totals
        return model.version

    def train(self, on_agreed: Callable[[Config], None] = lambda _: None) -> GlobalModel:
        """Train to the last version.

        Args:
            on_agreed: gets the configuration with nothing left open.

        Raises:
            UserError: sites do not agree on what they train.
            RunStopped: too few sites for longer than patience allows.
        """
        claim = self._await_agreement()
        self._settle(claim)
        on_agreed(self.config)
        self.hub.start(
            claim,
            Intake(self._built.up, self._folder / "spool"),
            self._built,
        )
        self._rounds = Rounds(
            self.config,
            self._folder / "checkpoint",
            self._built,
            self.hub,
            self._record,
            self._on_samples,
        )
        if self._resumed:
            self._rounds.resume(*self._resumed)
        return self._rounds.run()

    def site_sha256(self) -> dict[str, str]:
        """Hash of the weights that each site ended with."""
        return {name: word.global_sha256 for name, word in self.hub.farewells.items()}

    def _settle(self, claim: Claim) -> None:
        """Build the strategy for what the sites train."""
        self.config = complete(self.config, cast(Any, claim.kinds), claim.num_steps)
        self._built = self._strategy or load_strategy(self.config.strategy).build(self.config)

    def _await_agreement(self) -> Claim:
        deadline = time.monotonic() + self.config.round.patience_s
        hub = self.hub
        while True:
            with hub.changed:
                if self._agreement.agreed is None:
                    hub.changed.wait(TICK_S)
                for name in self._registry.newly_lost():
                    self._agreement.forget(name)
                agreed, dispute = self._agreement.agreed, self._agreement.dispute()
            if agreed is not None:
                return agreed
            if dispute:
                hub.finish(dispute)
                raise UserError(f"the sites do not agree on what they train: {dispute}")
            if hub.stop_text:
                raise RunStopped(hub.stop_text)
            if time.monotonic() > deadline:
                text = (
                    f"{self._agreement.waits_for()}, after {self.config.round.patience_s:g} s; "
                    "check that their services run and can reach the coordinator"
                )
                hub.finish(text)
                raise RunStopped(text)
