"""Runs of fedwan in real processes, for benchmarks: a coordinator and its sites, without Flower.

Data plane, round loop, strategies, workloads and outputs are the product's own, each party in a
process of its own under mutual TLS, on loopback or in the places of an emulated wide area.
"""

from __future__ import annotations

import atexit
import dataclasses
import json
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import chdir, contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.harness.party import ROLE_OF_LIGHT_SITES
from benchmarks.harness.processes import Process, load_json, module, run_processes
from benchmarks.wan import BARE, ROOT, Star, WanLink, available
from fedwan.app import load_run
from fedwan.config import Config, dump, site_names
from fedwan.link import pki


@dataclass(frozen=True)
class FleetRun:
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
def _app() -> Path:
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
    """A star of such links, or loopback with the settings of a shaped link that stands in.

    Yields:
        The star or None, the name of the emulation, and settings for the run.
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
) -> FleetRun:
    """Train a run to its end, all in a folder that is removed afterwards.

    Args:
        words: settings, `key=value`; workloads may be those of `benchmarks/recipes`, too.
        star: where the parties live, coordinator and one place per site; loopback if left out.
        timeout_s: after which all processes are ended.
        has_light_sites: one process plays all sites, see `light_sites.py`; no star then.

    Raises:
        FedwanError: a process failed or took too long; the end of its log is in the text.
    """
    with tempfile.TemporaryDirectory(prefix="fedwan-bench-") as name:
        folder = Path(name)
        host = star.coordinator.address if star else "127.0.0.1"
        (folder / "app").symlink_to(_app())
        with chdir(_app()):
            config = load_run(None, [*words, f"link.listen={host}:0"])
        config = dataclasses.replace(config, out=str(folder / "out"))
        dump(config, folder / "config.yaml")
        names = site_names(config)
        pki.init(folder / "pki", [host])
        for site in names:
            pki.issue(folder / "pki", site)
        roles = ["coordinator", *([ROLE_OF_LIGHT_SITES] if has_light_sites else names)]
        places = [star.coordinator, *star.sites] if star else [None] * len(roles)
        processes = [
            Process(role, _command(role, folder, config.site.processes), place)
            for role, place in zip(roles, places, strict=True)
        ]
        run_processes(processes, folder, timeout_s)
        lines = (folder / "out" / "metrics.jsonl").read_text().splitlines()
        return FleetRun(
            config,
            load_json(folder / "out" / "summary.json"),
            [json.loads(line) for line in lines],
            {role: load_json(folder / f"{role}.json") for role in roles},
        )
