"""One run of one system: what its processes are told, and the files that they leave."""

from __future__ import annotations

import dataclasses
import os
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import load_json, save_json

__all__ = ["Spec", "enter", "name_interface"]


@dataclass(frozen=True)
class Spec:
    """A run; every process of it gets the folder that this lies in."""

    system: str
    """`ddp`, `torchft`, `flower` or `fedwan`."""
    workload: str
    """A recipe of `benchmarks/recipes`: `digits_flow` or `timed`."""
    steps: int
    """Of the whole training; schedules such as the average's half-life follow from it."""
    h: int
    """Steps between two exchanges; 1 for a system that exchanges gradients."""
    seed: int = 0
    sites: int = 2
    stop_at: int = 0
    """Steps after which this run ends, a multiple of `h`; 0 for `steps`."""
    points: int = 40
    """Looks at the moving average of the weights, evenly over `steps`."""
    hosts: tuple[str, ...] = ("127.0.0.1", "127.0.0.1")
    """Address of each rank, for systems whose sites talk to each other; the first is the hub's."""
    interfaces: tuple[str, ...] = ("lo", "lo")
    """Network interface of each rank, towards the others."""
    ports: tuple[int, ...] = ()
    """Free ports; what they are for is the system's affair."""
    words: tuple[str, ...] = ()
    """Settings of fedwan's configuration, `key=value`, for every system."""
    options: dict[str, Any] = field(default_factory=dict)
    """Settings of this system alone."""

    @property
    def num_steps(self) -> int:
        """Steps that this run takes."""
        return self.stop_at or self.steps

    def save(self, folder: Path) -> None:
        """Write it where the run's processes look."""
        save_json(folder / "spec.json", dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Read what `save` wrote."""
        values = load_json(folder / "spec.json")
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def enter() -> tuple[Spec, Path, str]:
    """A process's part in a run, `FOLDER ROLE` on its command line; goes where the recipes are."""
    folder = Path(sys.argv[1]).resolve()
    os.chdir(folder / "app")
    return Spec.load(folder), folder, sys.argv[2]


def name_interface(spec: Spec, site: int) -> None:
    """Tell gloo which network interface to use, `flows` times.

    It opens a connection, and two threads, for each name in its list, and deals operations out to
    them in turn: under a long round trip, several connections carry more than one.
    """
    flows = spec.options.get("flows", 1)
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([spec.interfaces[site]] * flows)
