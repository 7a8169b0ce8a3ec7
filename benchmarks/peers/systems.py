"""How each system is started: which processes, where, and which of them end the run.

Systems whose sites talk to each other have rank 0 at the star's hub and the others at its sites,
so that one link lies between two ranks. Systems with a coordinator have that at the hub, and every
site behind a link of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from benchmarks.harness.processes import Process, module
from benchmarks.peers.spec import Spec
from benchmarks.wan import Place, Star
from benchmarks.wan_tun import ip

__all__ = ["SYSTEMS", "System"]


@dataclass(frozen=True)
class System:
    """One of those compared."""

    plan: Callable[[Spec, Path, Star], list[Process]]
    """What to start."""
    exchanges: str = "weights"
    """`weights` after H steps, or `gradients` in each."""
    is_star: bool = False
    """Whether it has a coordinator besides its sites."""


def _ranks(name: str) -> Callable[[Spec, Path, Star], list[Process]]:
    def plan(spec: Spec, folder: Path, star: Star) -> list[Process]:
        # gloo listens on an interface's own address, and the hub's lies on its loopback.
        hub = star.coordinator
        ip("-n", hub.name, "addr", "add", f"{hub.address}/32", "dev", spec.interfaces[0])
        return [
            Process(f"site{rank}", module(name, folder, rank), place)
            for rank, place in enumerate([hub, *star.sites])
        ]

    return plan


def _flower(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers import flower_fedavg as flower

    def service(name: str, place: Place, words: list[str]) -> Process:
        (folder / name).mkdir()
        return Process(name, words, place, True, flower.environment(folder / name))

    submit = module("peers.flower_fedavg", folder, "submit")
    return [
        service("superlink", star.coordinator, flower.superlink_command(spec)),
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


SYSTEMS = {
    "ddp": System(_ranks("peers.ddp"), exchanges="gradients"),
    "torchft": System(_ranks("peers.torchft_diloco")),
    "flower": System(_flower, is_star=True),
    "fedwan": System(_fedwan, is_star=True),
}
