"""A site's part in a run, around a training loop that stays the script's own.

    with fedwan.join(networks=…, optimizers=…) as site:      join; take over weights and checkpoint
        for step in site:                                    from where this site stands to the end
            …; loss.backward(); site.reduce(); …             one step
                                                             send what is due; apply what has come
                                                             at the end: answer until told to stop

Every process of a site runs this; rank 0 alone speaks to the coordinator. It knows no strategy and
no workload by name.
"""

from __future__ import annotations

import json
import logging
import sys
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from queue import Empty
from typing import Self

import torch
from torch import Tensor

from fedwan.app import complete, load_strategy, sources
from fedwan.codecs.masked import check_maskable
from fedwan.config import Config, hash_config, site_names
from fedwan.errors import LinkLost, NotJoined, RunStopped, SessionLost, UserError, WireError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Link
from fedwan.link.client import HEARTBEAT_S
from fedwan.link.tls import Identity
from fedwan.site.assignment import Outcome, tell_welcome
from fedwan.site.checkpoint import SiteCheckpoints
from fedwan.site.exchange import Exchange
from fedwan.site.group import Group
from fedwan.site.masker import Masker
from fedwan.site.meter import Meter, Work
from fedwan.site.order import StepOrder
from fedwan.site.place import Place
from fedwan.site.quality import Quality
from fedwan.site.replica import Replica
from fedwan.site.script import (
    DATA_ENDED,
    LEFT_EARLY,
    NOT_JOINED,
    ONCE,
    PAST_END,
    Script,
    scalars,
)
from fedwan.site.stub import CoordinatorStub
from fedwan.state import layout_to_json
from fedwan.strategy import SiteHook, Strategy

log = logging.getLogger(__name__)

ASK_AGAIN_S = (0.02, 0.5)
"""Between two Joins while the sites of a run do not agree yet: at first, doubled, and at most."""


@dataclass(frozen=True)
class Membership:
    """One site in one run, as its service knows it."""

    config: Config
    """Resolved; of a script's own networks as far as it can be without them."""
    run_id: str
    name: str
    """The site's, as its certificate has it."""
    folder: Path
    """For this site's checkpoints of this run."""
    open_link: Callable[[], Link]
    device: torch.device = torch.device("cpu")
    data_path: str = ""
    """Folder of the site's data, in place of the run's `data.path`; empty takes that."""
    show_samples: bool = False
    """Whether samples that are made of the site's own inputs may leave it."""
    strategy: Strategy | None = None
    """The run's, where it is no page that is found by name."""
    error: str = ""
    """How the process before this one ended, for the coordinator to tell."""
    identity: Identity | None = None
    """The site's, which vouches for its masks."""
    home: Path | None = None
    """For what this site keeps from run to run; None if nothing is."""


class Site:
    """One site's part in one run: a context manager, and an iterator over its steps.

    `step` of `num_steps` are complete; `global_sha256` is of the weights that the run ended with.
    """

    def __init__(self, member: Membership, script: Script, group: Group) -> None:
        self.config = config = complete(member.config, script.kinds, script.num_steps)
        self._sources = {} if member.strategy else sources(config)
        self.strategy = strategy = member.strategy or load_strategy(config.strategy).build(config)
        self.name = member.name
        self.step = 0
        self.global_sha256 = ""
        self.num_steps = config.steps if strategy.clock == "versions" else sys.maxsize
        self._is_stopped = False
        self._member = member
        self._script = script
        self._group = group
        self.replica = replica = Replica(
            *(script.networks, script.optimizers, config.inner, config.excluded, group),
            is_mirrored=strategy.is_mirrored,
            half_life=config.steps / 10,
        )
        group.agree("initial weights", replica.initial_sha256)
        asks = (script.num_steps, script.evaluate is not None, script.sample is not None)
        mend = "give fedwan.join the same in every process, for all of them take part in each"
        group.agree("steps=, evaluate= or sample=", str(asks), mend)
        self._order = StepOrder(script, config, replica.inner, strategy)
        hook = strategy.hook(replica) if strategy.hook else SiteHook()
        self._link = link = member.open_link() if group.rank == 0 else None
        self._masker = None
        if strategy.up.mask_bits and link is not None:
            assert member.identity is not None, "a site that has a link has an identity"
            check_maskable(replica.layout)
            names = site_names(config)
            needed = config.round.quorum or len(names)
            self._masker = Masker(member.identity, member.run_id, names, needed, member.folder)
        elif link is not None and Masker.holds(member.folder):
            raise UserError(
                f"this run began under masks, as {member.folder} shows, and would go on with "
                f"codec.up={config.codec.up}, which tells what single sites send; set "
                "codec.up as it was, or begin a new run"
            )
        self._stub = CoordinatorStub(link, member.run_id, replica, self._masker)
        self.meter = Meter(link)
        self._checkpoints = SiteCheckpoints(
            *(member.folder, self.name, replica, hook.state, script.state),
            every=config.checkpoint.every,
            is_beside=strategy.overlap.tau > 0,
        )
        parts = (replica, hook, self._checkpoints, self._stub, self.meter)
        number = site_names(config).index(self.name)
        self._place = Place(strategy, number, self.num_steps, *parts, self._masker)
        self._exchange = Exchange(self._place, self._listen, self._rejoin)
        self._quality = Quality(config, replica, self._stub, self.name, script)
        self._is_inside = False  # whether a step has begun and not ended
        self._has_joined = False

    # The story -----------------------------------------------------------------------------

    def __enter__(self) -> Self:
        """Join the run and find this site's place in it.

        Raises:
            JoinRefused: this site does not belong to the run as it is.
            LinkLost: the coordinator could not be reached for too long.
            SessionLost: another process of this site took over, or the coordinator is a new one.
        """
        if self._has_joined:
            raise UserError(ONCE)
        try:
            welcome = self._introduce(max(self._checkpoints.versions(), default=0))
            if welcome.send_initial:
                self._open_run()
            self.step = self._exchange.begin(list(welcome.versions), welcome.run_step)
            self._has_joined = True
            self.meter.note_step_begins()
        except BaseException as error:
            self._close(error)
            raise
        return self

    def __iter__(self) -> Iterator[int]:
        """Steps of the run, counted from 0; the end of the loop's body ends a step.

        One that was broken off, or never taken, as where `zip` has no more data, does not count.

        Raises:
            RunStopped: the run is ended before its last step.
        """
        if not self._has_joined:
            error = UserError(NOT_JOINED)
            Outcome.leave(error, 0)
            raise error
        if self._is_inside and self._exchange.is_reduced:
            self._end_step()  # it is part of the run already
        elif self._is_inside:
            self._is_inside = False
            self.meter.begin_step(self.config.data.batch, -1)
        while True:
            self._hear()
            if self.is_done:
                return
            self.meter.note_step_begins()
            self._begin_step()
            yield self.step
            if self._is_inside:
                self._end_step()

    def _begin_step(self) -> None:
        if not self._is_inside:
            if self.is_done:
                raise UserError(PAST_END.format(self))
            self._is_inside = True
            self.meter.begin_step(self.config.data.batch)

    def reduce(self) -> None:
        """Exchange gradients, if the strategy does: to be called before optimisers step.

        To follow the backward passes of all networks. Other strategies do nothing here.
        """
        self._begin_step()
        self._exchange.reduce(self.step + 1)
        self._order.note_exchanged(self.step)

    def log(self, /, **losses: Tensor | float) -> None:
        """Note scalars of this step by name; their means go with the next contribution.

        Tensors stay where they are, so that no GPU is waited for.
        """
        # Copies, in a type whose sum stays exact: the script's own may be written to.
        copies = {n: v.to(torch.float32, copy=True) for n, v in scalars(losses).items()}
        self.meter.add_losses(copies)

    def after_step(self) -> None:
        """A step is complete: exchange what is due, and hear the coordinator.

        For a loop that is not over the site: call it once after each step, and stop when `is_done`.
        """
        self._end_step()
        self._hear()
        self.meter.note_step_begins()

    def _end_step(self) -> None:
        self._begin_step()
        self._is_inside = False
        self.meter.end_step()
        step = self.step + 1
        if self._link is not None:
            self._link.heartbeat(step)
        self.step = self._exchange.after_step(step)
        self._order.end_step()

    @property
    def is_done(self) -> bool:
        """Whether there are no more steps to take."""
        return self._is_stopped or self.step >= self.num_steps

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        """Stay for the coordinator's questions until it says stop; then say farewell.

        A `UserError` if the script left before the run's end.
        """
        try:
            if isinstance(error, StopIteration):
                raise UserError(DATA_ENDED.format(self)) from error
            if error is None or (isinstance(error, SystemExit) and not error.code):
                if not self.is_done:
                    raise UserError(LEFT_EARLY.format(self))
                self._exchange.finish()
                self._checkpoints.settle()  # before the farewell: the last one may have failed
                self._stay()
                error = None
        except BaseException as failure:
            error = failure
            raise
        finally:
            self._close(error)

    def _close(self, error: BaseException | None) -> None:
        Outcome.leave(error, self.step)
        self._order.close()
        self._exchange.close()
        self._checkpoints.close()
        if self._link is not None:
            self._link.close()
        if error is None:  # else a process may have died in a collective that would be waited for
            self._group.close()

    # Joining -------------------------------------------------------------------------------

    def _rejoin(self, is_bound: bool) -> list[int]:
        """Join a coordinator that was started again; the versions that it has.

        A `SessionLost` if these are not this site's, and it `is_bound` to them.
        """
        self._group.lead(self._checkpoints.check_claim)
        newest = max(self._checkpoints.versions(), default=0)
        held = self._place.versions
        welcome = self._introduce(max(newest, held[0]), held, is_bound)
        log.info("the coordinator was started again; joined it anew")
        return [] if welcome.send_initial else list(welcome.versions)

    def _introduce(
        self, checkpoint: int, held_versions: Sequence[int] = (), is_bound: bool = False
    ) -> wire.Welcome:
        """Ask to be let in until the sites of the run agree."""
        hello = wire.Hello(
            run_id=self._member.run_id,
            protocol=PROTOCOL,
            site=self.name,
            session=uuid.uuid4().hex,
            layout_json=layout_to_json(self.replica.layout),
            initial_sha256=self.replica.initial_sha256,
            frozen_sha256=self.replica.frozen_sha256,
            checkpoint=checkpoint,
            kinds_json=json.dumps(dict(self._script.kinds), sort_keys=True),
            num_steps=self._script.num_steps,
            sources_json=json.dumps(self._sources, sort_keys=True),
            error="" if self._has_joined else self._member.error,
            card=self._masker.card() if self._masker else None,
            config_sha256=hash_config(self._member.config),
            held_versions=held_versions,
            is_bound=is_bound,
        )
        self._checkpoints.claim(hello.session)
        said, (pause_s, most_s) = "", ASK_AGAIN_S
        while (welcome := self._group.lead_long(lambda: self._stub.link.join(hello))).is_waiting:
            if welcome.text != said:
                said = welcome.text
                log.info("waiting: %s", said)
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, most_s)
        if len(welcome.versions) not in (0, num := len(self._place.versions)):
            raise WireError(
                f"the coordinator has versions of {len(welcome.versions)} fragments, this site has "
                f"{num}; run the same fedwan version at both"
            )
        tell_welcome(welcome.start)
        if self._masker:
            self._masker.meet(welcome.roster, welcome.epoch)
        return welcome

    # The end -------------------------------------------------------------------------------

    def _stay(self) -> None:
        """Answer the coordinator until it says stop; then say farewell."""
        self.global_sha256 = self.replica.global_sha256()
        with self.meter.waiting():
            while not self._is_stopped:
                try:
                    is_stopped = self._listen(wait_s=HEARTBEAT_S)
                    if not is_stopped and self._stub.is_over(self._place.versions[0]):
                        break
                except SessionLost as error:
                    if self._exchange.rejoin(error, self.step) < self.step:
                        raise  # a script that is through takes no step again
                    self.global_sha256 = self.replica.global_sha256()
        work = self.meter.work(self.step, Work(0, 0))
        self._leave(wire.Farewell(global_sha256=self.global_sha256, work=work))

    def _leave(self, farewell: wire.Farewell) -> None:
        try:
            if self._link is not None:
                self._link.leave(farewell)
        except (LinkLost, SessionLost) as error:
            log.warning("the coordinator did not hear this site's farewell: %s", error)

    # What the coordinator asks between steps -----------------------------------------------

    def _hear(self) -> None:
        """Between two steps: act on signals that have arrived."""
        try:
            self._listen()
        except SessionLost as error:
            with self.meter.waiting():
                self.step = self._exchange.rejoin(error, self.step)

    def _listen(self, wait_s: float = 0.0) -> bool:
        """Act on signals that have arrived; whether the run is over.

        Waits up to `wait_s` for the first one; collective.
        """
        kinds = wire.CoordinatorSignal
        while signal := self._group.lead(lambda: self._next_signal(wait_s)):  # noqa: B023
            wait_s = 0.0
            if signal.kind == kinds.EVALUATE:
                with self.meter.aside():
                    self._quality.answer(signal.version)
            elif signal.kind == kinds.SEND_INITIAL:
                self._open_run()
            elif signal.kind == kinds.STOP:
                self._stop(signal)
            elif signal.kind in (kinds.GONE, kinds.NOT_JOINED):
                raise (SessionLost if signal.kind == kinds.GONE else NotJoined)(signal.text)
        return self._is_stopped

    def _next_signal(self, wait_s: float) -> wire.CoordinatorSignal | None:
        try:
            return self._stub.link.signals.get(block=wait_s > 0, timeout=wait_s or None)
        except Empty:
            return None

    def _stop(self, signal: wire.CoordinatorSignal) -> None:
        self._is_stopped = True
        policy = self.strategy.policy
        may_lag = self.strategy.clock == "samples" or policy.quorum < policy.num_sites
        if may_lag and signal.is_complete:
            return  # the others have taken all steps that were wanted
        # What is in flight may have been published: then it lands, or else its flight says why not.
        if self._exchange.expected_step < self.num_steps:
            self._leave(wire.Farewell(work=self.meter.work(0, Work(0, 0)), error=signal.text))
            raise RunStopped(f"the coordinator ended the run: {signal.text}")

    def _open_run(self) -> None:
        """Send the initial weights, and measure them: what training starts from."""
        with self.meter.aside():
            base = self.replica.whole_base()
            self._stub.send_initial(base)
            self._quality.measure(base, 0, time.monotonic())
