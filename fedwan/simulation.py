"""A whole run in one process: coordinator and sites in threads, joined by loopback links.

The real engine, round loop, codecs and strategies, without Flower and without sockets: to test a
workload or a strategy of one's own, or to try it on a shaped link. Threads share torch's global
random generator, so workloads that draw from it are not reproducible here.
"""

from __future__ import annotations

import copy
import math
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedwan.config import Config, site_names
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.run import CoordinatedRun
from fedwan.coordinator.totals import Totals
from fedwan.link.base import Link
from fedwan.link.loopback import LoopbackLink
from fedwan.site.group import Group
from fedwan.site.joining import as_member
from fedwan.site.recipe import take_part
from fedwan.site.site import Membership
from fedwan.strategy import Strategy

__all__ = ["Absence", "SimulatedRun", "simulate"]

RUN_ID = "simulated"
SILENCE_S = 600.0
POLL_S = 0.1
STANDSTILL_S = 2.0


class Absence(NamedTuple):
    """A site's process dies, and a new one takes its place later.

    Where the others wait for it, it returns after two seconds of standstill.
    """

    leaves_at: float
    """Share of the run that is done by then."""
    returns_at: float


@dataclass
class SimulatedRun:
    """How a run went."""

    model: GlobalModel
    totals: Totals
    records: list[dict[str, Any]] = field(default_factory=list)
    """Rows as in `metrics.jsonl`."""
    site_sha256: dict[str, str] = field(default_factory=dict)
    """Hash of the weights that each site ended with."""


def simulate(
    config: Config,
    folder: Path,
    *,
    train: Callable[[Membership], object] | None = None,
    strategy: Strategy | None = None,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
    absences: Mapping[str, Absence] | None = None,
) -> SimulatedRun:
    """Train to the end.

    Args:
        config: resolved, as `fedwan.app.load_run` gives it.
        folder: for checkpoints.
        train: a site's part, called in its thread: a function that uses `fedwan.join`, or another
            of its own. The recipe that `config` names if not given.
        strategy: in place of the one that `config` names.
        wrap: gets a site's name and link, and returns the link to use, e.g. a `ShapedLink`.
        absences: by site.

    Returns:
        The run's end, all in memory.

    Raises:
        FedwanError: the first that any party raised.
    """
    records: list[dict[str, Any]] = []

    def event(event: str, site: str | None, text: str) -> None:
        records.append({"kind": "event", "event": event, "site": site, "text": text})

    config = copy.deepcopy(config)
    config.checkpoint.every = config.checkpoint.every or max(1, config.steps)
    run = CoordinatedRun(
        config, RUN_ID, folder, records.append, event, lambda *_: None, strategy, SILENCE_S
    )
    parties = _Parties(config, run, folder, train or _train_recipe, strategy, wrap)
    for name in site_names(config):
        parties.start(name, (absences or {}).get(name))
    try:
        model = run.train()
    except BaseException as error:
        parties.errors.append(error)
    run.hub.finish("the simulation ended")
    parties.join()
    if parties.errors:
        raise parties.errors[0]
    return SimulatedRun(model, run.rounds.totals, records, run.site_sha256())


def _train_recipe(member: Membership) -> None:
    take_part(member, Group())


class _Left(BaseException):
    """A site's process dies."""


class _Parties:
    """The sites' threads.

    Args:
        config: resolved.
        run: at the coordinator.
        folder: for checkpoints.
        train: a site's part.
        strategy: the run's, where no page names it.
        wrap: see `simulate`.
    """

    def __init__(
        self,
        config: Config,
        run: CoordinatedRun,
        folder: Path,
        train: Callable[[Membership], object],
        strategy: Strategy | None,
        wrap: Callable[[str, Link], Link],
    ) -> None:
        self.errors: list[BaseException] = []
        self._config = config
        self._run = run
        self._folder = folder
        self._train = train
        self._strategy = strategy
        self._wrap = wrap
        self._num_threads = torch.get_num_threads()
        self._threads: list[threading.Thread] = []

    def start(self, name: str, absence: Absence | None) -> None:
        """Let a site live."""
        thread = threading.Thread(target=self._live, args=(name, absence), name=name)
        thread.start()
        self._threads.append(thread)

    def join(self) -> None:
        """Wait for all of them."""
        for thread in self._threads:
            thread.join()

    def _live(self, name: str, absence: Absence | None) -> None:
        # A new thread would take over what another one has set for as long as it evaluates.
        torch.set_num_threads(self._num_threads)
        run = self._run

        def open_link() -> Link:
            link = self._wrap(name, LoopbackLink(run.hub, name))
            if absence is None:
                return link
            return _Leaving(link, lambda: run.share_done() >= absence.leaves_at)

        member = Membership(
            self._config, RUN_ID, name, self._folder / name, open_link, strategy=self._strategy
        )
        try:
            with as_member(member):
                self._train(member)
        except _Left:
            self._return(name, absence)
        except BaseException as error:
            self.errors.append(error)
            with run.hub.changed:  # no other process will take its place: nobody waits for it
                run.hub.registry.sites[name].has_left = True
            run.hub.finish(f"{name} failed: {error}")

    def _return(self, name: str, absence: Absence | None) -> None:
        assert absence is not None
        hub, run = self._run.hub, self._run
        with hub.changed:
            entry = hub.registry.sites[name]
            entry.heard_s = -math.inf  # as after the silence that a dead process leaves
            done, since = -1.0, time.monotonic()
            while not hub.stop_text and done < absence.returns_at:
                if run.share_done() > done:
                    done, since = run.share_done(), time.monotonic()
                elif time.monotonic() - since > STANDSTILL_S:
                    break  # the others wait for it
                hub.changed.wait(POLL_S)
        self._live(name, None)


class _Leaving:
    """A link whose site dies between two steps."""

    def __init__(self, inner: Link, is_due: Callable[[], bool]) -> None:
        self._inner = inner
        self._is_due = is_due

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def heartbeat(self, step: int) -> None:
        self._inner.heartbeat(step)
        if self._is_due():
            raise _Left
