"""What must hold while faults come, asserted at the coordinator where it can break first.

Nothing is merged twice, too late or of a site that was ejected; what was accepted is merged; what
was called durable is not lost, and is what sites were told; no more is kept than is wanted; and the
weights of each update are the undisturbed run's. Where nothing has come in between, the control
variates of all sites hold together.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.seeded.kernel import Process
from benchmarks.seeded.scenarios import find
from fedwan.coordinator.model import CHECKPOINT
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.servicer import Servicer
from fedwan.coordinator.snapshots import MOST
from fedwan.link import wire_pb2 as wire
from fedwan.protocol.registry import Verb
from fedwan.protocol.round import Key
from fedwan.site.site import Site
from fedwan.state import State, clone, hash_state, read_tensors, select_prefix

if TYPE_CHECKING:
    from benchmarks.seeded.world import World

Versions = tuple[int, ...]
"""By fragment."""
Place = tuple[int, int]
"""A fragment's index, and a version of it."""
VARIATES = 1e-4
"""What the sum of control variates, in units of weights, may lack for rounding."""


class Invariants:
    """Of one run, over all processes that its coordinator has had."""

    def __init__(self, world: World, undisturbed: Mapping[Versions, str]) -> None:
        self._world = world
        self._undisturbed = undisturbed
        self.has_died = False
        """Whether any process has."""
        self.has_decided = False
        """Whether the operator has decided anything."""
        self.has_lost = False
        """Whether a folder or the newest checkpoints were lost, or the sites are others."""
        self._saved = [0]
        """Versions of the coordinator's last two checkpoints; the older one is called durable."""
        self._promised = 0
        """The latest version that a site was told is durable."""
        self._merged: dict[Key, int] = {}
        self._accepted: set[Key] = set()
        """Contributions that this process of the coordinator has called accepted."""
        self._told: dict[Versions, str] = {}
        """Hash of the weights that sites have, by versions, as updates told them."""
        self._stepping: dict[str, Site] = {}
        """By name, the one that took the last step."""
        self._variates: dict[Place, dict[str, State]] = {}
        """By fragment, version and site, in the steps from there."""
        self._lost: dict[Place, State] = {}
        """What coding has lost of the updates so far, by fragment and version."""
        self._learnt: dict[Place, State] = {}
        """Of this, what sites have taken for their own: of each update their share of all steps."""
        self._begun: dict[Place, None] = {}
        """Where a site may be without what it knew of others, by fragment and version."""
        self._steps: dict[int, int] = {}
        """Between two updates of a fragment."""

    def forget(self, *, is_back: bool = False) -> None:
        """Something was lost for good; `is_back`: what was called durable, too."""
        self.has_lost = True
        if is_back:
            self._promised = 0

    def begin(self, run: CoordinatedRun, version: int, held: Sequence[int]) -> None:
        """A process of the coordinator begins, at these versions of its checkpoint, if any."""
        if version < self._promised:
            self._world.violated(f"version {self._promised} was called durable, and is lost")
        self._merged = {k: v for k, v in self._merged.items() if held and v <= held[k.fragment]}
        self._accepted.clear()
        self._saved = [min(held, default=0)]
        for of in (self._variates, self._lost, self._learnt, self._begun):
            for at in [at for at in of if at[1] > (held[at[0]] if held else 0)]:
                del of[at]  # which is made anew
        self._observe(run)

    def on_durable(self, process: Process, folder: Path) -> None:
        """What was renamed in a folder survives from now on."""
        if process.name == "coordinator" and (folder / CHECKPOINT).exists():
            tensors, meta = read_tensors(folder / CHECKPOINT, "global:")
            versions = meta["versions"]
            sha = hash_state(select_prefix("global", tensors))
            if sha != self._told.get(tuple(versions), sha):
                self._world.violated(f"the checkpoint of {versions} holds other weights")
            if min(versions) != self._saved[-1]:
                self._saved = [self._saved[-1], min(versions)]

    def _observe(self, run: CoordinatedRun) -> None:
        hub = run.hub
        advance, publish, download = hub.advance, hub.publish, hub.download
        close_stripe, decide = hub.close_stripe, hub.decide

        def observed_decide(verb: Verb, site: str, **given: Any) -> None:
            decide(verb, site, **given)
            # With what it had sent, even if it is admitted at once.
            if verb == "eject" or (verb == "drain" and hub.masking):
                self._accepted = {key for key in self._accepted if key.site != site}

        def observed_close_stripe(name: str, header: wire.UploadHeader) -> wire.Receipt:
            receipt = close_stripe(name, header)
            if (receipt.status, header.kind) == (wire.Receipt.ACCEPTED, header.CONTRIBUTION):
                self._accepted.add(Key(header.fragment, header.version, name))
            self._check_kept(hub)
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

        def observed_publish(payload: Any, **given: Any) -> None:
            publish(payload, **given)
            self._compare(hub)
            self._check_accepted(hub)
            self._check_kept(hub)

        def observed_download(name: str, request: Any) -> Any:
            answer = download(name, request)
            for at, anew in zip(enumerate(hub.rounds.versions), hub.rounds.anew_from, strict=True):
                if anew > at[1]:  # a site has lost what it knew, and the next one makes up for it
                    self._begun[at] = None
            self._promised = max(self._promised, answer.header.durable_version)
            if answer.header.durable_version > self._saved[0]:
                self._world.violated(f"version {answer.header.durable_version} is not durable yet")
            return answer

        hub.decide = observed_decide  # type: ignore[method-assign]
        hub.advance = observed_advance  # type: ignore[method-assign]
        hub.close_stripe = observed_close_stripe  # type: ignore[method-assign]
        hub.publish = observed_publish  # type: ignore[method-assign]
        hub.download = observed_download  # type: ignore[method-assign]

    def _compare(self, hub: Servicer) -> None:
        """The weights of an update with the undisturbed run's, where they have to be the same."""
        versions, sha = tuple(hub.model.versions), hash_state(hub.model.state)
        self._world.report.sha[versions] = self._told[versions] = sha
        self._note_lost(hub)
        self._world.note(f"versions {versions} are {sha[:12]}")
        self._world.report.num_updates += 1
        if self._is_bound():
            self._world.report.num_compared += 1
            if sha != self._undisturbed.get(versions):
                text = f"versions {versions} are not those of the undisturbed run"
                self._world.violated(text)

    def _note_lost(self, hub: Servicer) -> None:
        """What coding has lost of the updates of this round's fragment, and sites have learnt."""
        round_, residual = hub.rounds.round, hub.model._residual
        fragment, version = round_.fragment, round_.version
        here, before = (fragment.index, version + 1), (fragment.index, version)
        lost = {n: v for n, v in residual.items() if n in fragment.layout}
        self._lost[here] = lost = clone(lost)
        most = len(self._world.names) * fragment.steps(hub.rounds._strategy.h)
        share = sum(merge.contribution.work.steps for merge in round_.merged) / most
        past, learnt = self._lost.get(before, {}), self._learnt.get(before, {})
        self._learnt[here] = {
            n: learnt.get(n, 0.0) + share * (v - past.get(n, 0.0)) for n, v in lost.items()
        }

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

    def _check_kept(self, hub: Servicer) -> None:
        """No more uploads, contributions, updates and copies of the weights than are of use."""
        rounds, sites = hub.rounds, len(hub.registry.sites)
        wanted = sites * (rounds._policy.max_staleness + 2)
        updates = rounds.updates
        for index, (whole, held) in enumerate(zip(rounds._whole, updates._held, strict=True)):
            fragment_bytes = sum(update.num_bytes for update in held.values())
            self._bound("contributions", len(whole), wanted)
            if len(held) > 1:
                self._bound("bytes of updates", fragment_bytes, updates._most[index])
        # Initial weights may be on their way, too.
        receptions = [*hub.intake._open, *hub.intake._dropped]
        self._bound("receptions", len(receptions), wanted * len(rounds.versions) + sites)
        kept = {id(payload) for payload, _ in hub._snapshots._kept.values()}
        out = map(len, hub._snapshots._out.values())
        self._bound("copies of the weights", len(kept), sites * MOST)
        self._bound("copies for one site", max(out, default=0), MOST)

    def _bound(self, what: str, number: int, most: int) -> None:
        if number > most:
            self._world.violated(f"{number} {what} are kept, of {most} that are wanted")

    # At the sites --------------------------------------------------------------------------

    def on_step(self, site: Site) -> None:
        """A site takes a step."""
        variates = getattr(site._place.hook, "variates", None)
        if variates is None:
            return
        place = site._place
        for at, fragment in zip(enumerate(place.versions), place.fragments, strict=True):
            if self._stepping.get(site.name) is not site:
                self._begun[at] = None
            self._steps[at[0]] = fragment.steps(self._world.config.h)
            mine = {name: value for name, value in variates.items() if name in fragment.layout}
            self._variates.setdefault(at, {})[site.name] = clone(mine)
        self._stepping[site.name] = site

    def check_variates(self) -> None:
        """Sum to 0 over the sites, once all stand at a version at which none has begun.

        But for what the updates' coding has lost since all began anew, which the next one pays;
        where sites took fewer steps than all, they learn of it at that share.
        """
        world = self._world
        is_barrier = find(world.report.scenario).same_bits != "never"
        if not is_barrier or self.has_decided or len(world.names) != world.num_first:
            return
        for at, of in sorted(self._variates.items()):
            index, version = at
            if at in self._begun or len(of) < len(world.names) or not version:
                continue
            for name in next(iter(of.values())):
                values = torch.stack([state[name] for state in of.values()])
                mean = self._steps[index] * values.mean(0) + self._learnt[at].get(name, 0.0)
                begun = [lost[name] for lost in self._learnt.values() if name in lost]
                lacking = min(float((mean - lost).abs().max()) for lost in (0.0, *begun))
                if lacking > VARIATES:
                    world.violated(
                        f"control variates of fragment {index} at version {version} lack "
                        f"{lacking:.2g}"
                    )
                    return

    def _is_bound(self) -> bool:
        """Whether the weights have to be those of the undisturbed run."""
        same = find(self._world.report.scenario).same_bits
        is_bound = same == "always" or (same == "until a death" and not self.has_died)
        is_bound &= not (self.has_decided or self.has_lost)
        return bool(self._world.report.num_faults) and is_bound
