"""Processes of a benchmark, and runs of fedwan in real processes, without Flower.

Data plane, round loop, strategies, workloads and outputs are the product's own, each party in a
process of its own under mutual TLS, on loopback or in the places of an emulated wide area.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import chdir
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.wan import ROOT, Place, Star
from fedwan.app import load_run
from fedwan.config import Config, dump, site_names
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.output.journal import JOURNAL

TIMEOUT_S = 3600.0
COORDINATOR = "coordinator"
ALL_SITES = "sites"
"""The role of a process that plays all of them."""


@dataclass(frozen=True)
class Process:
    name: str
    words: Sequence[str]
    place: Place | None = None
    """In an emulated wide area; None for this machine."""
    is_service: bool = False
    """It serves until it is ended, and the run is over without it."""
    env: Mapping[str, str] | None = None

    def start(self, threads: int = 0, **options: Any) -> subprocess.Popen[Any]:
        """Start it, with this checkout in front of whatever is installed.

        It computes in so many threads; 0 leaves it to torch.
        """
        env = {**(self.env or os.environ)}
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), env.get("PYTHONPATH")]))
        env |= {"OMP_NUM_THREADS": str(threads)} if threads else {}
        popen = self.place.popen if self.place else subprocess.Popen
        return popen(list(self.words), env=env, **options)


def module(name: str, *words: object) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{name}", *map(str, words)]


def run_processes(
    processes: Sequence[Process],
    folder: Path,
    timeout_s: float,
    look: Callable[[], object] = lambda: None,
    threads: int = 0,
) -> None:
    """Run until all but the services have ended; whatever happens, none is left running.

    The folder gets a log of each, whose end is in the error where one fails or the time is over.
    `look` is called some times a second meanwhile; `threads` are each process's.
    """
    deadline = time.monotonic() + timeout_s
    children: dict[str, subprocess.Popen[Any]] = {}
    services = {process.name for process in processes if process.is_service}
    left = {process.name for process in processes} - services
    try:
        for process in processes:
            with (folder / f"{process.name}.log").open("wb") as log:
                children[process.name] = process.start(
                    threads, stdout=log, stderr=subprocess.STDOUT
                )
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
            look()
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


def peak_rss_mb(pid: int | str = "self") -> float:
    """Peak resident memory of a process, in MB (1e6 bytes)."""
    (row,) = [r for r in Path(f"/proc/{pid}/status").read_text().split("\n") if r[:6] == "VmHWM:"]
    return int(row.split()[1]) * 1024 / 1e6


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetRun:
    config: Config
    summary: dict[str, Any]
    """As `summary.json`."""
    records: list[dict[str, Any]]
    """As `metrics.jsonl`."""
    parties: dict[str, dict[str, Any]]
    """By role: `rss_mb`, `cpu_s`, `gpu_mb`; of sites `began` and `computed`, seconds by step, and,
    when the last update has landed, `busy_s`, computing and waiting, `bytes_up`, `bytes_down`."""
    journal: list[dict[str, Any]]
    """As `journal.jsonl`."""
    log: str
    """What the coordinator wrote to its terminal."""

    @property
    def sites(self) -> list[dict[str, Any]]:
        """The sites' parts of `parties`, in site order."""
        return [self.parties[name] for name in site_names(self.config)]

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for record in self.records if record["kind"] == "round"]


def lay_app(folder: Path) -> Path:
    """An app in an empty folder: fedwan's recipes and the benchmarks' own beside them."""
    (folder / "sites").mkdir(parents=True)
    (folder / "strategies").symlink_to(ROOT / "strategies")
    for path in (*(ROOT / "benchmarks/recipes").glob("[a-z]*.py"), *(ROOT / "sites").glob("*.py")):
        (folder / "sites" / path.name).symlink_to(path)
    return folder


@cache
def app() -> Path:
    """One for all runs of this process, as Python imports a recipe once."""
    folder = Path(tempfile.mkdtemp(prefix="fedwan-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lay_app(folder / "app")


def half(which: int, is_apart: bool) -> list[str]:
    """What to put before a command that is to have one half of this machine's processors."""
    mine = sorted(os.sched_getaffinity(0))
    middle = len(mine) // 2
    if not is_apart or middle < 2:
        return []
    return ["taskset", "-c", ",".join(map(str, mine[middle:] if which else mine[:middle]))]


def run_fleet(
    words: Sequence[str],
    star: Star | None = None,
    others: Mapping[str, Sequence[object]] | None = None,
    is_apart: bool = False,
    threads: int = 0,
) -> FleetRun:
    """Train a run to its end, all in a folder that is removed afterwards.

    Args:
        words: settings, `key=value`; workloads may be those of `benchmarks/recipes`, too.
        star: where the parties live, coordinator and one place per site; loopback if left out.
        others: modules of the harness that play these sites, each with words of its own: one site,
            for as long as the run lasts, or `ALL_SITES` to their end. No star then.
        is_apart: the coordinator computes on half of the processors and sites on the other one,
            as on machines of their own, where there are four or more.
        threads: of each process, for torch; 0 leaves it to torch.
    """
    others = others or {}
    with tempfile.TemporaryDirectory(prefix="fedwan-bench-") as name:
        folder = Path(name)
        host = star.coordinator.address if star else "127.0.0.1"
        (folder / "app").symlink_to(app())
        with chdir(app()):
            config = load_run(None, [*words, f"link.listen={host}:0"])
        config = dataclasses.replace(config, out=str(folder / "out"))
        dump(config, folder / "config.yaml")
        names = site_names(config)
        pki.federation(folder / "pki", [host], names)
        honest = [] if ALL_SITES in others else [name for name in names if name not in others]
        places = [star.coordinator, *star.sites] if star else [None] * (1 + len(names))
        command = module("harness.party", folder, COORDINATOR)
        processes = [Process(COORDINATOR, [*half(0, is_apart), *command], places[0])]
        for site, place in zip(honest, places[1:], strict=False):
            command = module("harness.party", folder, site)
            if (num := config.site.processes) > 1:
                run = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num)]
                command[1:1] = run
            processes.append(Process(site, [*half(1, is_apart), *command], place))
        for role, (player, *given) in others.items():
            command = module(player, folder, role, *given)
            processes.append(Process(role, command, is_service=role != ALL_SITES))
        run_processes(processes, folder, TIMEOUT_S, threads=threads)
        out = folder / "out"
        return FleetRun(
            config,
            load_json(out / "summary.json"),
            [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()],
            {process.name: load_json(folder / f"{process.name}.json") for process in processes},
            [json.loads(line) for line in (out / JOURNAL).read_text().splitlines()],
            (folder / f"{COORDINATOR}.log").read_text(errors="replace"),
        )
