"""One run of one system: what its processes are told, and the files that they leave."""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

__all__ = ["Spec", "load_json", "save_json"]

_FILE = "spec.json"


@dataclass(frozen=True)
class Spec:
    """A run; every process of it gets the folder that this lies in."""

    system: str
    """`ddp`, `torchft`, `flower` or `fedwan`."""
    workload: str
    """A recipe of `recipes/`: `digits_flow` or `timed`."""
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
        save_json(folder / _FILE, dataclasses.asdict(self))

    @classmethod
    def load(cls, folder: Path) -> Spec:
        """Read what `save` wrote."""
        values = load_json(folder / _FILE)
        return cls(**{k: tuple(v) if isinstance(v, list) else v for k, v in values.items()})


def save_json(path: Path, content: object) -> None:
    """Write a file that readers see whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def load_json(path: Path) -> Any:
    """Read a JSON file."""
    return json.loads(path.read_text())
