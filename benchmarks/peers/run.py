"""One run of one system on one link: processes in namespaces, and what came out."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
import time
from bisect import bisect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.peers.app import lay_app

from benchmarks.peers.spec import Spec, load_json
from benchmarks.peers.systems import SYSTEMS, Process, System
from benchmarks.wan import Star, WanLink
from fedwan.errors import FedwanError

__all__ = ["BARE", "Outcome", "Traffic", "run"]

BARE = WanLink(rate_mbit=0, rtt_ms=0)
"""No wide area: bare links between the same namespaces."""

PORTS = tuple(range(29500, 29510))
SAMPLE_S = 0.25


@dataclass(frozen=True)
class Outcome:
    """What a run left."""

    spec: Spec
    emulation: str
    congestion: str
    sites: list[dict[str, Any]]
    """See `role.save_site`; the first also has the curve."""
    traffic: Traffic


class Traffic:
    """Bytes on the links, looked at four times a second while a run lasts.

    A link's own count: every IP packet of the run, headers included.
    """

    def __init__(self, is_star: bool) -> None:
        self._is_star = is_star
        self._rows: list[tuple[float, list[tuple[int, int]]]] = []

    def add(self, at: float, counts: list[dict[str, dict[str, int]]]) -> None:
        """Note what each link has carried by now, up and down."""
        self._rows.append((at, [(c["up"]["bytes"], c["down"]["bytes"]) for c in counts]))

    def between(self, began: Sequence[float], ended: float) -> tuple[int, int]:
        """Bytes that sites sent and received, all of them together.

        Args:
            began: when each site did; what its link carried earlier does not count.
            ended: for all.
        """
        if not self._is_star:  # what a rank sends, the other receives
            total = sum(
                self._carried(link, way, max(began), ended)
                for link in range(len(self._rows[0][1]))
                for way in (0, 1)
            )
            return round(total), round(total)
        up, down = (
            sum(self._carried(link, way, at, ended) for link, at in enumerate(began))
            for way in (0, 1)
        )
        return round(up), round(down)

    def _carried(self, link: int, way: int, began: float, ended: float) -> float:
        return self._at(link, way, ended) - self._at(link, way, began)

    def _at(self, link: int, way: int, moment: float) -> float:
        """Bytes at a moment, on a line between the looks around it."""
        place = bisect([at for at, _ in self._rows], moment)
        before, after = self._rows[max(0, place - 1)], self._rows[min(place, len(self._rows) - 1)]
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        low, high = before[1][link][way], after[1][link][way]
        return low + max(0.0, share) * (high - low)


def run(spec: Spec, link: WanLink, folder: Path, timeout_s: float, congestion: str) -> Outcome:
    """Run a system to its end.

    Args:
        spec: the run; addresses, interfaces and ports are filled in here.
        link: of every site, or `BARE`.
        folder: of the run, not there yet; keeps every process's log.
        timeout_s: for all of it.
        congestion: TCP's congestion control of every namespace; a system may choose its own.

    Raises:
        WanUnavailable: this machine cannot emulate a network.
        FedwanError: a process failed, the time is over, or sites ended with different weights.
    """
    system = SYSTEMS[spec.system]
    num_links = spec.sites if system.is_star else spec.sites - 1
    emulation = "veth" if link == BARE else None
    with Star(num_links, _halve(link, num_links, system), emulation) as star:
        star.set_congestion(congestion)
        spec = _place(spec, star)
        folder.mkdir(parents=True)
        spec.save(folder)
        lay_app(folder / "app")
        with _watch(star, Traffic(system.is_star)) as traffic:
            _run_processes(system.plan(spec, folder, star), folder, timeout_s)
        emulation = star.emulation
    system.finish(spec, folder)
    sites = [load_json(folder / f"site{site}.json") for site in range(spec.sites)]
    _check(spec, sites, folder)
    return Outcome(spec, emulation, congestion, sites, traffic)


def _halve(link: WanLink, num_links: int, system: System) -> WanLink:
    """Between two ranks at sites lie two links: each has half of the way."""
    if system.is_star or num_links == 1:
        return link
    raise FedwanError(
        "systems without a coordinator are measured with 2 sites, one link between them; "
        f"set sites=2, not {num_links + 1}"
    )


def _place(spec: Spec, star: Star) -> Spec:
    hosts = (star.coordinator.address, *(place.address for place in star.sites))
    interfaces = ("wan0", *("wan" for _ in star.sites))
    return dataclasses.replace(spec, hosts=hosts, interfaces=interfaces, ports=PORTS)


@contextmanager
def _watch(star: Star, traffic: Traffic) -> Iterator[Traffic]:
    is_over = threading.Event()

    def look() -> None:
        while True:
            now = time.monotonic()
            traffic.add(now, [star.counts(index) for index in range(len(star.sites))])
            if is_over.wait(SAMPLE_S):
                return

    thread = threading.Thread(target=look)
    thread.start()
    try:
        yield traffic
    finally:
        is_over.set()
        thread.join()


def _run_processes(processes: list[Process], folder: Path, timeout_s: float) -> None:
    deadline = time.monotonic() + timeout_s
    children: dict[str, subprocess.Popen[bytes]] = {}
    for process in processes:
        with (folder / f"{process.name}.log").open("wb") as log:
            children[process.name] = process.place.popen(
                process.words, env=process.env, stdout=log, stderr=subprocess.STDOUT
            )
    left = {process.name for process in processes if not process.is_service}
    while left:
        for name, child in children.items():
            code = child.poll()
            if code is None or name not in left and code == 0:
                continue
            if code or name not in left:
                raise FedwanError(
                    f"{folder.name}: {name} ended with status {code}: {_tail(folder, name)}"
                )
            left.remove(name)
        if time.monotonic() > deadline:
            raise FedwanError(f"{', '.join(sorted(left))} took over {timeout_s:g} s; see {folder}")
        time.sleep(0.1)


def _tail(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    lines = path.read_text(errors="replace").strip().splitlines()[-3:]
    return f"{' | '.join(line.strip() for line in lines)} (see {path})"


def _check(spec: Spec, sites: list[dict[str, Any]], folder: Path) -> None:
    """A system that merges wrongly is not measured."""
    hashes = [site["sha256"][:12] for site in sites]
    if len(set(hashes)) > 1:
        raise FedwanError(f"sites ended with different weights, {hashes}; see {folder}")
    for site in sites:
        if len(site["began"]) != spec.num_steps:
            raise FedwanError(
                f"a site took {len(site['began'])} of {spec.num_steps} steps; see {folder}"
            )
