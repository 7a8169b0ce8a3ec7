"""How each system is started: which processes, where, and which of them end the run.

Systems whose sites talk to each other have rank 0 at the star's hub and the others at its sites,
so that one link lies between two ranks. Systems with a coordinator have that at the hub, and every
site behind a link of its own.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.wan_spaces import ip

from benchmarks.peers.spec import Spec
from benchmarks.wan import Place, Star

__all__ = ["SYSTEMS", "Process", "System"]

FOLDER = Path(__file__).parent


@dataclass(frozen=True)
class Process:
    """One process of a run."""

    name: str
    place: Place
    words: list[str]
    is_service: bool = False
    """It serves until it is ended, and the run is over without it."""
    env: Mapping[str, str] | None = None


@dataclass(frozen=True)
class System:
    """One of those compared."""

    plan: Callable[[Spec, Path, Star], list[Process]]
    """What to start."""
    exchanges: str = "weights"
    """`weights` after H steps, or `gradients` in each."""
    is_star: bool = False
    """Whether it has a coordinator besides its sites."""
    finish: Callable[[Spec, Path], None] = field(default=lambda spec, folder: None)
    """Brings what its processes left into the form of `role.save_site`."""


def _script(name: str, folder: Path, **words: Any) -> list[str]:
    options = [word for key, value in words.items() for word in (f"--{key}", str(value))]
    return [sys.executable, str(FOLDER / name), "--folder", str(folder), *options]


def _ranks(script: str) -> Callable[[Spec, Path, Star], list[Process]]:
    def plan(spec: Spec, folder: Path, star: Star) -> list[Process]:
        # gloo listens on an interface's own address, and the hub's lies on its loopback.
        hub = star.coordinator
        ip("-n", hub.name, "addr", "add", f"{hub.address}/32", "dev", spec.interfaces[0])
        places = [hub, *star.sites]
        return [
            Process(f"site{rank}", place, _script(script, folder, site=rank))
            for rank, place in enumerate(places)
        ]

    return plan


def _flower(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers import flower_fedavg as flower

    def service(name: str, place: Place, words: list[str]) -> Process:
        (folder / name).mkdir()
        return Process(name, place, words, True, flower.environment(folder / name))

    return [
        service("superlink", star.coordinator, flower.superlink_command(spec)),
        *[
            service(f"supernode{site}", place, flower.supernode_command(spec, site, folder))
            for site, place in enumerate(star.sites)
        ],
        Process("submit", star.coordinator, _script("flower_fedavg.py", folder, role="submit")),
    ]


def _finish_flower(spec: Spec, folder: Path) -> None:
    from benchmarks.peers import flower_fedavg

    flower_fedavg.gather(spec, folder)


def _fedwan(spec: Spec, folder: Path, star: Star) -> list[Process]:
    from benchmarks.peers import fedwan_run

    fedwan_run.prepare(spec, folder)
    script = "fedwan_run.py"
    return [
        Process("coordinator", star.coordinator, _script(script, folder, role="coordinator")),
        *[
            Process(f"site{site}", place, _script(script, folder, site=site))
            for site, place in enumerate(star.sites)
        ],
    ]


def _finish_fedwan(spec: Spec, folder: Path) -> None:
    from benchmarks.peers import fedwan_run

    fedwan_run.gather(spec, folder)


SYSTEMS = {
    "ddp": System(_ranks("ddp.py"), exchanges="gradients"),
    "torchft": System(_ranks("torchft_diloco.py")),
    "flower": System(_flower, is_star=True, finish=_finish_flower),
    "fedwan": System(_fedwan, is_star=True, finish=_finish_fedwan),
}
