"""What every script of a system shares: its command line, and the file that a site leaves."""

from __future__ import annotations

import argparse
import os
from dataclasses import dataclass
from pathlib import Path

from benchmarks.peers.stopwatch import STOPWATCH

from benchmarks.peers.curve import Curve
from benchmarks.peers.spec import Spec, save_json

__all__ = ["Role", "name_interface", "save_site"]


@dataclass(frozen=True)
class Role:
    """One process's part in a run."""

    spec: Spec
    folder: Path
    """Of the run."""
    site: int
    """Which site, from 0."""
    name: str
    """What this process is, where a system has processes that are no sites."""

    @classmethod
    def from_command_line(cls, doc: str | None) -> Role:
        """Read `--folder RUN [--site N] [--role NAME]`, and go where the app's recipes are."""
        parser = argparse.ArgumentParser(description=(doc or "").splitlines()[0])
        parser.add_argument("--folder", type=Path, required=True, help="of the run")
        parser.add_argument("--site", type=int, default=0, help="which site, from 0")
        parser.add_argument("--role", default="site", help="what this process is")
        args = parser.parse_args()
        folder = args.folder.resolve()
        os.chdir(folder / "app")
        return cls(Spec.load(folder), folder, args.site, args.role)


def save_site(folder: Path, site: int, sha256: str, curve: Curve | None = None) -> None:
    """Write what a site has to say, and what it saw of the global weights; measures quality now."""
    result = STOPWATCH.result() | {"sha256": sha256} | (curve.measure() if curve else {})
    save_json(folder / f"site{site}.json", result)


def name_interface(spec: Spec, site: int) -> None:
    """Tell gloo which network interface to use, `flows` times.

    It opens a connection, and two threads, for each name in its list, and deals operations out to
    them in turn: under a long round trip, several connections carry more than one.
    """
    flows = spec.options.get("flows", 1)
    os.environ["GLOO_SOCKET_IFNAME"] = ",".join([spec.interfaces[site]] * flows)
