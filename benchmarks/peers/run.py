"""One run of one system on one link: processes in namespaces, and what came out."""

from __future__ import annotations

import dataclasses
import subprocess
import threading
import time
from collections.abc import Iterator
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
        self._rows: list[tuple[float, int, int]] = []

    def add(self, at: float, counts: list[dict[str, dict[str, int]]]) -> None:
        """Note what all links have carried by now."""
        up = sum(link["up"]["bytes"] for link in counts)
        down = sum(link["down"]["bytes"] for link in counts)
        # Where sites talk to each other, what one sends the other receives.
        self._rows.append((at, up, down) if self._is_star else (at, up + down, up + down))

    def between(self, began: float, ended: float) -> tuple[int, int]:
        """Bytes that sites sent and received, all of them together."""
        first, last = self._at(began), self._at(ended)
        return round(last[0] - first[0]), round(last[1] - first[1])

    def _at(self, moment: float) -> tuple[float, float]:
        before = self._rows[0]
        for row in self._rows:
            if row[0] >= moment:
                share = (moment - before[0]) / (row[0] - before[0]) if row[0] > before[0] else 1.0
                share = min(1.0, max(0.0, share))
                return tuple(b + share * (r - b) for b, r in zip(before, row, strict=True))[1:]
            before = row
        return before[1], before[2]


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
