"""One run of one system on one link: processes in namespaces, and what came out.

Systems whose sites talk to each other have rank 0 at the star's hub and the others at its sites,
so that one link lies between two ranks. Systems with a coordinator have that at the hub, and every
site behind a link of its own.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.fleet import Process, lay_app, load_json, module, run_processes, save_json
from benchmarks.peers.part import Spec
from benchmarks.wan import Place, Star, WanLink
from benchmarks.wan_tun import ip
from fedwan.errors import FedwanError

SAMPLE_S = 0.25


@dataclass(frozen=True)
class Outcome:
    spec: Spec
    emulation: str
    congestion: str
    sites: list[dict[str, Any]]
    """See `part.save_site`; the first also has the curve."""
    traffic: Traffic


class Traffic:
    """Bytes on the links, looked at four times a second while a run lasts.

    A link's own count: every IP packet of the run, headers included.
    """

    def __init__(self, is_star: bool) -> None:
        self._is_star = is_star
        self._times: list[float] = []
        self._bytes: list[list[tuple[int, int]]] = []

    def look(self, star: Star) -> None:
        now = time.monotonic()
        self.add(now, [star.counts(index) for index in range(len(star.sites))])

    def add(self, at: float, counts: list[dict[str, dict[str, int]]]) -> None:
        """Note what each link has carried by now, up and down."""
        self._times.append(at)
        self._bytes.append([(c["up"]["bytes"], c["down"]["bytes"]) for c in counts])

    def between(self, began: Sequence[float], ended: float) -> tuple[int, int]:
        """Bytes that all sites sent and received, from when each began to when all ended."""
        num = len(self._bytes[0])
        since = began if self._is_star else [max(began)] * num
        up, down = (
            sum(self._carried(link, way, since[link], ended) for link in range(num))
            for way in (0, 1)
        )
        if not self._is_star:  # what a rank sends, the other receives
            up = down = up + down
        return round(up), round(down)

    def _carried(self, link: int, way: int, began: float, ended: float) -> float:
        """Bytes between two moments, each on a line between the looks around it."""
        seen = [row[link][way] for row in self._bytes]
        before, after = np.interp([began, ended], self._times, seen)
        return float(after - before)


def _ranks(spec: Spec, folder: Path, star: Star) -> list[Process]:
    # gloo listens on an interface's own address, and the hub's lies on its loopback.
    hub = star.coordinator
    ip("-n", hub.name, "addr", "add", f"{hub.address}/32", "dev", "wan0")
    return [
        Process(f"site{rank}", module(f"peers.{RANKS[spec.system]}", folder, rank), place)
        for rank, place in enumerate([hub, *star.sites])
    ]


def _flower(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers import flower_fedavg as flower

    def service(name: str, place: Place, words: list[str]) -> Process:
        (folder / name).mkdir()
        return Process(name, words, place, True, flower.environment(folder / name))

    submit = module("peers.flower_fedavg", folder, "submit")
    return [
        service("superlink", star.coordinator, flower.superlink_command()),
        *[
            service(f"supernode{site}", place, flower.supernode_command(spec, site, folder))
            for site, place in enumerate(star.sites)
        ],
        Process("submit", submit, star.coordinator),
    ]


def _fedwan(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers.fedwan_run import prepare

    prepare(spec, folder)
    places = {"coordinator": star.coordinator} | {f"{n}": p for n, p in enumerate(star.sites)}
    return [
        Process(who, module("peers.fedwan_run", folder, who), place)
        for who, place in places.items()
    ]


RANKS = {"ddp": "ddp", "torchft": "torchft_diloco"}
"""Systems without a coordinator, and their files."""


def run(spec: Spec, link: WanLink, folder: Path, timeout_s: float, congestion: str) -> Outcome:
    """Run a system to its end; a process that fails, or sites that disagree, are an error.

    Args:
        spec: the run; addresses are filled in here.
        link: of every site, or `BARE`.
        folder: of the run, not there yet; keeps every process's log.
        timeout_s: for all of it.
        congestion: TCP's congestion control of every namespace; a system may choose its own.
    """
    is_star = spec.system not in RANKS
    plan = {"flower": _flower, "fedwan": _fedwan}.get(spec.system, _ranks)
    with Star(spec.sites - (not is_star), link, congestion) as star:
        hosts = (star.coordinator.address, *(place.address for place in star.sites))
        spec = dataclasses.replace(spec, hosts=hosts)
        folder.mkdir(parents=True)
        save_json(folder / "spec.json", dataclasses.asdict(spec))
        lay_app(folder / "app")
        with _watch(star, Traffic(is_star)) as traffic:
            run_processes(plan(spec, folder, star), folder, timeout_s)
        emulation = star.emulation
    if spec.system == "fedwan":
        from benchmarks.peers.fedwan_run import gather

        gather(spec, folder)
    sites = [load_json(folder / f"site{site}.json") for site in range(spec.sites)]
    _check(spec, sites, folder)
    return Outcome(spec, emulation, congestion, sites, traffic)


@contextmanager
def _watch(star: Star, traffic: Traffic) -> Iterator[Traffic]:
    is_over = threading.Event()

    def look() -> None:
        while not is_over.wait(SAMPLE_S):
            traffic.look(star)

    traffic.look(star)
    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield traffic
    finally:
        is_over.set()
        thread.join()
        traffic.look(star)


def _check(spec: Spec, sites: list[dict[str, Any]], folder: Path) -> None:
    """A system that merges wrongly is not measured."""
    ends = [(site["sha256"][:12], len(site["began"])) for site in sites]
    if len({sha256 for sha256, _ in ends}) > 1 or {n for _, n in ends} != {spec.num_steps}:
        raise FedwanError(f"sites ended with weights and steps {ends}; see {folder}")
