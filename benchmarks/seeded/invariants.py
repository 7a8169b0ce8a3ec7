"""What must hold while faults come, asserted at the coordinator where it can break first.

Nothing is merged twice, too late or of a site that was ejected; what was accepted is merged; what
was called durable is not lost; and the weights of each update are the undisturbed run's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.seeded.kernel import Process
from benchmarks.seeded.scenarios import find
from fedwan.coordinator.model import CHECKPOINT
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.servicer import Servicer
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.registry import Verb
from fedwan.protocol.round import Key
from fedwan.state import hash_state, read_tensors_meta

if TYPE_CHECKING:
    from benchmarks.seeded.world import World

Versions = tuple[int, ...]
"""By fragment."""


class Invariants:
    """Of one run, over all processes that its coordinator has had."""

    def __init__(self, world: World, undisturbed: Mapping[Versions, str]) -> None:
        self._world = world
        self._undisturbed = undisturbed
        self.has_died = False
        """Whether any process has."""
        self.has_decided = False
        """Whether the operator has decided anything."""
        self._saved = [0]
        """Versions of the coordinator's last two checkpoints; the older one is called durable."""
        self._promised = 0
        """The latest version that a site was told is durable."""
        self._merged: dict[Key, int] = {}
        self._accepted: set[Key] = set()
        """Contributions that this process of the coordinator has called accepted."""

    def begin(self, run: CoordinatedRun, version: int, held: Sequence[int]) -> None:
        """A process of the coordinator begins, at these versions of its checkpoint, if any."""
        if version < self._promised:
            self._world.violated(f"version {self._promised} was called durable, and is lost")
        self._merged = {k: v for k, v in self._merged.items() if held and v <= held[k.fragment]}
        self._accepted.clear()
        self._saved = [min(held, default=0)]
        self._observe(run)

    def on_durable(self, process: Process, folder: Path) -> None:
        """What was renamed in a folder survives from now on."""
        if process.name == "coordinator" and (folder / CHECKPOINT).exists():
            versions = read_tensors_meta(folder / CHECKPOINT)["versions"]
            if min(versions) != self._saved[-1]:
                self._saved = [self._saved[-1], min(versions)]

    def _observe(self, run: CoordinatedRun) -> None:
        hub = run.hub
        advance, publish, download = hub.advance, hub.publish, hub.download
        close_stripe, decide = hub.close_stripe, hub.decide

        def observed_decide(verb: Verb, site: str, **given: Any) -> None:
            decide(verb, site, **given)
            if verb == "eject":  # with what it had sent, even if it is admitted at once
                self._accepted = {key for key in self._accepted if key.site != site}

        def observed_close_stripe(name: str, header: wire.UploadHeader) -> wire.Receipt:
            receipt = close_stripe(name, header)
            if (receipt.status, header.kind) == (wire.Receipt.ACCEPTED, header.CONTRIBUTION):
                self._accepted.add(Key(header.fragment, header.version, name))
            return receipt

        def observed_advance() -> Any:
            ejected = [n for n, s in hub.registry.sites.items() if s.standing == "ejected"]
            verdict, merges = advance()
            for merge in merges:
                if merge.key.site in ejected:
                    self._world.violated(
                        f"{merge.key} was merged, of a site that was ejected before"
                    )
                into = hub.rounds.round.version + 1
                if merge.key in self._merged:
                    self._world.violated(f"{merge.key} was merged twice")
                late = into - 1 - merge.key.version
                if not 0 <= late <= run._strategy.policy.max_staleness:
                    self._world.violated(f"{merge.key} was merged into version {into}")
                self._merged[merge.key] = into
            return verdict, merges

        def observed_publish(payload: Any, *, is_own: bool = False) -> None:
            publish(payload, is_own=is_own)
            versions, sha = tuple(hub.model.versions), hash_state(hub.model.state)
            self._world.report.sha[versions] = sha
            self._world.note(f"versions {versions} are {sha[:12]}")
            if self._is_bound() and sha != self._undisturbed.get(versions):
                self._world.violated(f"versions {versions} are not those of the undisturbed run")
            self._check_accepted(hub)

        def observed_download(name: str, request: Any) -> Any:
            answer = download(name, request)
            self._promised = max(self._promised, answer.header.durable_version)
            if answer.header.durable_version > self._saved[0]:
                self._world.violated(f"version {answer.header.durable_version} is not durable yet")
            return answer

        hub.decide = observed_decide  # type: ignore[method-assign]
        hub.advance = observed_advance  # type: ignore[method-assign]
        hub.close_stripe = observed_close_stripe  # type: ignore[method-assign]
        hub.publish = observed_publish  # type: ignore[method-assign]
        hub.download = observed_download  # type: ignore[method-assign]

    def _check_accepted(self, hub: Servicer) -> None:
        """What was accepted is merged once its round is over, if its site still takes part.

        Where one contribution makes an update, the others may become too old while they wait.
        """
        fragment, least = hub.rounds.least_wanted()
        over = {key for key in self._accepted if key.fragment == fragment and key.version < least}
        self._accepted -= over
        if hub.rounds.round.is_on_arrival:
            return
        for key in sorted(over - self._merged.keys()):
            if hub.registry.sites[key.site].standing == "in":
                self._world.violated(f"{key} was accepted, and is not merged")

    def _is_bound(self) -> bool:
        """Whether the weights have to be those of the undisturbed run."""
        same = find(self._world.report.scenario).same_bits
        is_bound = same == "always" or (same == "until a death" and not self.has_died)
        return bool(self._world.report.num_faults) and is_bound and not self.has_decided
