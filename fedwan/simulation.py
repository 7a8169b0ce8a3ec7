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
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch

from fedwan.config import MASKED, Config, dump, site_names
from fedwan.coordinator.model import GlobalModel
from fedwan.coordinator.records import Totals
from fedwan.coordinator.run import CoordinatedRun
from fedwan.link.base import Link
from fedwan.link.loopback import LoopbackLink
from fedwan.link.pki import federation
from fedwan.link.tls import Identity
from fedwan.output.records import Recorder
from fedwan.site.group import Group
from fedwan.site.joining import as_member
from fedwan.site.recipe import take_part
from fedwan.site.site import Membership
from fedwan.strategy import Strategy

RUN_ID = "simulated"
SILENCE_S = 600.0
POLL_S = 0.1
STANDSTILL_S = 2.0


class Absence(NamedTuple):
    """A site's process dies, and a new one takes its place later, by shares of the run done.

    Where the others wait for it, it returns after two seconds of standstill.
    """

    leaves_at: float
    returns_at: float


@dataclass
class SimulatedRun:
    """How a run went."""

    model: GlobalModel
    totals: Totals
    records: list[dict[str, Any]] = field(repr=False)
    """Rows as in `metrics.jsonl` and `journal.jsonl`."""
    site_sha256: dict[str, str]
    """Hash of the weights that each site ended with."""


def simulate(
    config: Config,
    folder: Path,
    *,
    train: Callable[[Membership], object] | None = None,
    strategy: Strategy | None = None,
    wrap: Callable[[str, Link], Link] = lambda _, link: link,
    absences: Mapping[str, Absence] | None = None,
    resume: bool = False,
) -> SimulatedRun:
    """Train to the end, in threads of this process.

    Args:
        config: resolved, as `fedwan.app.load_run` gives it.
        folder: for what a run keeps, as `out` elsewhere.
        train: a site's part, called in its thread: a function that uses `fedwan.join`, or another
            of its own. The recipe that `config` names if not given. Sites are threads that share
            torch's global generators: build networks under `fedwan.rng.seeded_init`.
        strategy: in place of the one that `config` names.
        wrap: gets a site's name and link, and returns the link to use, e.g. a `ShapedLink`.
        absences: by site.
        resume: go on from the folder's checkpoint.

    Raises:
        FedwanError: the first that any party raised.
    """
    records: list[dict[str, Any]] = []

    def record(row: dict[str, Any]) -> None:
        records.append(row)
        recorder.write(row)

    config, folder = copy.deepcopy(config), Path(folder)
    run = CoordinatedRun(config, RUN_ID, folder, record, lambda *_: None, strategy, SILENCE_S)
    resumed, _ = run.resume() if resume else (None, "")
    dump(config, folder / "config.yaml")
    is_masked, authority = config.codec.up in MASKED, folder / "pki"
    if is_masked and not authority.exists():
        federation(authority, (), site_names(config))
    recorder = Recorder(folder, resumed)
    record(run.opening())

    def member(name: str, absence: Absence | None) -> Membership:
        def open_link() -> Link:
            link = wrap(name, LoopbackLink(run.hub, name))
            return link if absence is None else _LeavingLink(link, run, absence)

        identity = Identity.load(authority / name) if is_masked else None
        given = (config, RUN_ID, name, folder / name, open_link)
        return Membership(*given, strategy=strategy, identity=identity)

    sites = _Sites(run, member, train or (lambda member: take_part(member, Group())))
    # A new thread would take over what another one has set for as long as it evaluates.
    as_here = torch.set_num_threads, (torch.get_num_threads(),)
    with ThreadPoolExecutor(config.num_sites, "site", *as_here) as threads:
        for name in site_names(config):
            threads.submit(sites.live, name, (absences or {}).get(name))
        try:
            model = run.train()
        except BaseException as error:
            sites.errors.append(error)
        run.hub.finish("the simulation ended")
    recorder.close()
    if sites.errors:
        raise sites.errors[0]
    return SimulatedRun(model, run.totals, records, run.site_sha256())


class _Left(BaseException):
    """A site's process dies."""


@dataclass
class _Sites:
    """What the sites' threads share."""

    run: CoordinatedRun
    member: Callable[[str, Absence | None], Membership]
    train: Callable[[Membership], object]
    errors: list[BaseException] = field(default_factory=list)

    def live(self, name: str, absence: Absence | None) -> None:
        """A site's process, and the one that takes its place."""
        threading.current_thread().name = name
        hub = self.run.hub
        try:
            member = self.member(name, absence)
            with as_member(member):
                self.train(member)
        except _Left:
            assert absence is not None
            self._await_return(name, absence)
            self.live(name, None)
        except BaseException as error:
            self.errors.append(error)
            with hub.changed:  # no other process will take its place: nobody waits for it
                hub.registry.sites[name].has_left = True
            hub.finish(f"{name} failed: {error}")

    def _await_return(self, name: str, absence: Absence) -> None:
        hub, run = self.run.hub, self.run
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


@dataclass
class _LeavingLink:
    """A link whose site dies between two steps."""

    inner: Link
    run: CoordinatedRun
    absence: Absence

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def heartbeat(self, step: int) -> None:
        self.inner.heartbeat(step)
        if self.run.share_done() >= self.absence.leaves_at:
            raise _Left
