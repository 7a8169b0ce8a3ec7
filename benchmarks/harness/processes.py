"""Processes of a benchmark: started, waited for, and ended together."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.wan import ROOT, Place
from fedwan.errors import FedwanError


@dataclass(frozen=True)
class Process:
    name: str
    words: Sequence[str]
    place: Place | None = None
    """In an emulated wide area; None for this machine."""
    is_service: bool = False
    """It serves until it is ended, and the run is over without it."""
    env: Mapping[str, str] | None = None

    def start(self, **options: Any) -> subprocess.Popen[Any]:
        """Start it, with this checkout in front of whatever is installed."""
        env = {**(self.env or os.environ), "PYTHONPATH": str(ROOT)}
        popen = self.place.popen if self.place else subprocess.Popen
        return popen(list(self.words), env=env, **options)


def module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]


def run_processes(processes: Sequence[Process], folder: Path, timeout_s: float) -> None:
    """Run until all but the services have ended; whatever happens, none is left running.

    Args:
        processes: what to start, in this order.
        folder: gets a log of each.
        timeout_s: for all of it.

    Raises:
        FedwanError: one failed, or the time is over; the end of its log is in the text.
    """
    deadline = time.monotonic() + timeout_s
    children: dict[str, subprocess.Popen[Any]] = {}
    services = {process.name for process in processes if process.is_service}
    left = {process.name for process in processes} - services
    try:
        for process in processes:
            with (folder / f"{process.name}.log").open("wb") as log:
                children[process.name] = process.start(stdout=log, stderr=subprocess.STDOUT)
        while left:
            for name, child in children.items():
                code = child.poll()
                if code == 0 and name not in services:
                    left.discard(name)
                elif code is not None:
                    end = _end_of(folder, name)
                    raise FedwanError(f"{folder.name}: {name} ended with status {code}: {end}")
            if time.monotonic() > deadline:
                ends = "; ".join(f"{name}: {_end_of(folder, name)}" for name in sorted(left))
                raise FedwanError(f"not done in {timeout_s:g} s: {ends}")
            time.sleep(0.05)
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _end_of(folder: Path, name: str) -> str:
    path = folder / f"{name}.log"
    lines = path.read_text(errors="replace").strip().splitlines()[-3:]
    return f"{' | '.join(line.strip() for line in lines)} (see {path})"


def save_json(path: Path, content: object) -> None:
    """Write a file that readers see whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def load_json(path: Path) -> Any:
    return json.loads(path.read_text())


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB (1e6 bytes)."""
    (row,) = [r for r in Path("/proc/self/status").read_text().split("\n") if r[:6] == "VmHWM:"]
    return int(row.split()[1]) * 1024 / 1e6
