"""Runs of fedwan in real processes, for benchmarks: a coordinator and its sites, without Flower.

Data plane, round loop, strategies, workloads and outputs are the product's own, each party in a
process of its own under mutual TLS, on loopback or in the places of an emulated wide area.
"""

from __future__ import annotations

import atexit
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from contextlib import chdir
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.peers.app import lay_app
from benchmarks.wan import Star
from fedwan.app import load_run
from fedwan.config import Config, dump, site_names
from fedwan.errors import UserError
from fedwan.link import pki

__all__ = ["FleetRun", "run_fleet"]

PARTY = Path(__file__).with_name("party.py")
LOOPBACK = "127.0.0.1"


@dataclass(frozen=True)
class FleetRun:
    """What a run left."""

    config: Config
    summary: dict[str, Any]
    """As `summary.json`."""
    records: list[dict[str, Any]]
    """As `metrics.jsonl`."""
    parties: dict[str, dict[str, Any]]
    """By role: `rss_mb`, `cpu_s`, and of sites `began` and `computed`, seconds by step."""

    @property
    def sites(self) -> list[dict[str, Any]]:
        """The sites' parts of `parties`, in site order."""
        return [self.parties[name] for name in site_names(self.config)]


def run_fleet(
    words: Sequence[str], star: Star | None = None, timeout_s: float = 3600.0
) -> FleetRun:
    """Train a run to its end, all in a folder that is removed afterwards.

    Args:
        words: settings, `key=value`; workloads may be those of `benchmarks/peers/recipes`, too.
        star: where the parties live, coordinator and one place per site; loopback if left out.
        timeout_s: after which all processes are ended.

    Raises:
        UserError: a process failed or took too long; its output's end is in the text.
    """
    with tempfile.TemporaryDirectory(prefix="fedwan-bench-") as name:
        folder = Path(name)
        host = star.coordinator_address() if star else LOOPBACK
        config = _lay_out(folder, words, host)
        _run_processes(folder, site_names(config), star, timeout_s)
        return _collect(folder, config)


def _lay_out(folder: Path, words: Sequence[str], host: str) -> Config:
    with chdir(_app()):
        config = load_run(None, [*words, f"link.host={host}"])
    config = replace(config, out=str(folder / "out"))
    dump(config, folder / "config.yaml")
    pki.init(folder / "pki", [host])
    for site in site_names(config):
        pki.issue(folder / "pki", site)
    return config


@cache
def _app() -> Path:
    """One for all runs of this process, as Python imports a recipe once."""
    folder = Path(tempfile.mkdtemp(prefix="fedwan-bench-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return lay_app(folder / "app")


def _run_processes(folder: Path, names: list[str], star: Star | None, timeout_s: float) -> None:
    environment = {**os.environ, "PYTHONPATH": str(PARTY.parents[1])}
    places = [None, *[None for _ in names]] if star is None else [star.coordinator, *star.sites]
    children: dict[str, subprocess.Popen[Any]] = {}
    deadline = time.monotonic() + timeout_s
    try:
        for role, place in zip(["coordinator", *names], places, strict=False):
            words = [sys.executable, str(PARTY), role, str(folder), str(_app())]
            log = (folder / f"{role}.log").open("w")
            start = subprocess.Popen if place is None else place.popen
            children[role] = start(
                words, stdout=log, stderr=subprocess.STDOUT, env=environment, cwd=folder
            )
            log.close()
        _await_all(folder, children, deadline)
    finally:
        for child in children.values():
            child.kill()
            child.wait()


def _await_all(folder: Path, children: dict[str, subprocess.Popen[Any]], deadline: float) -> None:
    waiting = dict(children)
    while waiting:
        for role, child in list(waiting.items()):
            code = child.poll()
            if code:
                raise UserError(f"{role} failed with code {code}: {_end_of(folder, role)}")
            if code == 0:
                del waiting[role]
        if time.monotonic() > deadline:
            texts = "; ".join(f"{role}: {_end_of(folder, role)}" for role in waiting)
            raise UserError(f"not done in time: {texts}")
        time.sleep(0.1)


def _end_of(folder: Path, role: str) -> str:
    return (folder / f"{role}.log").read_text()[-2000:]


def _collect(folder: Path, config: Config) -> FleetRun:
    out = folder / "out"
    lines = (out / "metrics.jsonl").read_text().splitlines()
    return FleetRun(
        config,
        json.loads((out / "summary.json").read_text()),
        [json.loads(line) for line in lines],
        {
            role: json.loads((folder / f"{role}.json").read_text())
            for role in ("coordinator", *site_names(config))
        },
    )
