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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.wan import BARE, ROOT, Place, Star, WanLink, available
from fedwan.app import load_run
from fedwan.config import Config, dump, site_names
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.output.journal import JOURNAL

ROLE_OF_LIGHT_SITES = "sites"


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

    The folder gets a log of each, whose end is in the error where one fails or the time is over.
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


# Runs ---------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class FleetRun:
    config: Config
    summary: dict[str, Any]
    """As `summary.json`."""
    records: list[dict[str, Any]]
    """As `metrics.jsonl`."""
    parties: dict[str, dict[str, Any]]
    """By role: `rss_mb`, `cpu_s`, and of sites `began` and `computed`, seconds by step."""
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
    own = [p for p in (ROOT / "benchmarks" / "recipes").glob("*.py") if p.stem != "__init__"]
    for path in (*(ROOT / "sites").glob("*.py"), *own):
        (folder / "sites" / path.name).symlink_to(path)
    return folder


@cache
def app() -> Path:
    """One for all runs of this process, as Python imports a recipe once."""
    folder = Path(tempfile.mkdtemp(prefix="fedwan-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lay_app(folder / "app")


def _command(role: str, folder: Path, processes: int) -> list[str]:
    """A party's, under torchrun where a site has several processes."""
    words = module("harness.party", role, folder)
    if processes == 1 or role == "coordinator":
        return words
    run = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(processes), "-m"]
    return [*words[:2], *run, *words[2:]]


@contextmanager
def linked(sites: int, link: WanLink) -> Iterator[tuple[Star | None, str, list[str]]]:
    """A star of such links or None, the emulation's name, and settings for the run.

    Where this machine cannot emulate a network, a shaped link on loopback stands in.
    """
    if link == BARE:
        yield None, "none", []
    elif available() is None:
        with Star(sites, link) as star:
            yield star, star.emulation, []
    else:
        words = [f"link.rate_mbit={link.rate_mbit:g}", f"link.rtt_ms={link.rtt_ms:g}"]
        yield None, "shaped", words + ([f"link.loss={link.loss:g}"] if link.loss else [])


def run_fleet(
    words: Sequence[str],
    star: Star | None = None,
    timeout_s: float = 3600.0,
    *,
    has_light_sites: bool = False,
    hostile: Mapping[str, Sequence[object]] | None = None,
) -> FleetRun:
    """Train a run to its end, all in a folder that is removed afterwards.

    Args:
        words: settings, `key=value`; workloads may be those of `benchmarks/recipes`, too.
        star: where the parties live, coordinator and one place per site; loopback if left out.
        timeout_s: after which all processes are ended.
        has_light_sites: one process plays all sites, see `light_sites.py`; no star then.
        hostile: sites that `hostile_site.py` plays, and its words; no star then.
    """
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
        hostile = hostile or {}
        honest = [name for name in names if name not in hostile]
        roles = ["coordinator", *([ROLE_OF_LIGHT_SITES] if has_light_sites else honest)]
        places = [star.coordinator, *star.sites] if star else [None] * len(roles)
        processes = [
            Process(role, _command(role, folder, config.site.processes), place)
            for role, place in zip(roles, places, strict=True)
        ]
        for site, given in hostile.items():
            command = module("harness.hostile_site", folder, site, *given)
            processes.append(Process(site, command, is_service=True))
        run_processes(processes, folder, timeout_s)
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
        return FleetRun(
            config,
            load_json(folder / "out" / "summary.json"),
            [json.loads(line) for line in lines],
            {role: load_json(folder / f"{role}.json") for role in (*roles, *hostile)},
            [json.loads(line) for line in (folder / "out" / JOURNAL).read_text().splitlines()],
            (folder / "coordinator.log").read_text(errors="replace"),
        )
