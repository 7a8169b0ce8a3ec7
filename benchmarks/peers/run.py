"""One run of one system on one link: processes in namespaces, and what came out.

Systems whose sites talk to each other have rank 0 at the star's hub and the others at its sites,
so that one link lies between two ranks. Systems with a coordinator have that at the hub, and every
site behind a link of its own.
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.harness.fleet import Process, lay_app, load_json, module, run_processes, save_json
from benchmarks.peers.part import Spec
from benchmarks.wan import Star, WanLink, ip
from fedwan.errors import FedwanError
from fedwan.link import pki

TIMEOUT_S = 7200.0
LOOK_S = 0.25
RANKS = {"ddp": "ddp", "torchft": "torchft_diloco"}
"""Systems without a coordinator, and their files."""
CONGESTION = "cubic"
"""TCP's congestion control, for whoever does not choose."""


@dataclass
class Outcome:
    spec: Spec
    emulation: str
    sites: list[dict[str, Any]]
    """See `part.save_site`; the first also has the curve."""
    looks: list[tuple[float, np.ndarray]] = field(default_factory=list)
    """At the links' own counts, some times a second while a run lasts: the time, and the bytes of
    every IP packet of the run, headers included, (links, 2): up and down."""

    def traffic(self) -> tuple[int, int]:
        """Bytes that all sites sent and received, from when each began to when all ended."""
        times, counts = zip(*self.looks, strict=True)
        began, ended = [s["began"][0] for s in self.sites], max(s["ended"] for s in self.sites)
        seen = np.stack(counts)
        has_hub = self.spec.system not in RANKS
        total = np.zeros(2)
        for link in range(seen.shape[1]):
            since = began[link] if has_hub else max(began)
            for way in (0, 1):  # between two looks, on a line
                before, after = np.interp([since, ended], times, seen[:, link, way])
                total[way] += after - before
        up, down = total if has_hub else [total.sum()] * 2  # what a rank sends, the other receives
        return round(up), round(down)


def _ranks(spec: Spec, folder: Path, star: Star) -> list[Process]:
    # gloo listens on an interface's own address, and the hub's lies on its loopback.
    hub = star.coordinator
    ip("-n", hub.name, "addr", "add", f"{hub.address}/32", "dev", "wan0")
    return [
        Process(f"site{rank}", module(f"peers.{RANKS[spec.system]}", folder, rank), place)
        for rank, place in enumerate([hub, *star.sites])
    ]


def _flower(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers import flower_fedavg  # takes Flower

    return flower_fedavg.processes(spec, folder, star)


def _fedwan(spec: Spec, folder: Path, star: Star) -> list[Process]:
    names = [f"s{index + 1}" for index in range(spec.sites)]
    pki.federation(folder / "pki", [spec.hosts[0]], names)
    return [
        Process(who, module("peers.fedwan_run", folder, who), place)
        for who, place in zip(["coordinator", *names], [star.coordinator, *star.sites], strict=True)
    ]


def run(spec: Spec, link: WanLink, folder: Path) -> Outcome:
    """Run a system to its end; a process that fails, or sites that disagree, are an error.

    Args:
        spec: the run; addresses are filled in here.
        link: of every site, or `BARE`.
        folder: of the run, not there yet; keeps every process's log.
    """
    num = spec.sites - (spec.system in RANKS)
    plan = {"flower": _flower, "fedwan": _fedwan}.get(spec.system, _ranks)
    with Star(num, link, CONGESTION) as star:
        hosts = (star.coordinator.address, *(place.address for place in star.sites))
        spec = dataclasses.replace(spec, hosts=hosts)
        lay_app(folder / "app")
        save_json(folder / "spec.json", dataclasses.asdict(spec))
        if spec.workload != "timed":  # whose steps are of fixed length
            alone = Process("step_s", module("peers.part", folder, "step_s"))
            run_processes([alone], folder, TIMEOUT_S)
            spec = dataclasses.replace(spec, step_s=load_json(folder / "step_s.json"))
            save_json(folder / "spec.json", dataclasses.asdict(spec))
        outcome = Outcome(spec, star.emulation, [])

        def look(after_s: float = LOOK_S) -> None:
            # On bare links a look starts a process for each.
            if not outcome.looks or time.monotonic() - outcome.looks[-1][0] >= after_s:
                outcome.looks.append((time.monotonic(), np.array(star.carried())))

        # All parties share the cores: more threads would wait for each other.
        run_processes(plan(spec, folder, star), folder, TIMEOUT_S, look, threads=1)
        look(after_s=0)
    outcome.sites += [load_json(folder / f"site{site}.json") for site in range(spec.sites)]
    if (end := folder / "coordinator.json").exists():
        outcome.sites[0] |= load_json(end)
    # A system that merges wrongly is not measured.
    ends = [(site["sha256"][:12], len(site["began"])) for site in outcome.sites]
    if len(set(ends)) > 1 or ends[0][1] != spec.num_steps:
        raise FedwanError(f"sites ended with weights and steps {ends}; see {folder}")
    return outcome
