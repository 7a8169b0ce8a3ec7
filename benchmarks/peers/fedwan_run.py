"""fedwan itself, with Flower left out: the coordinator's service and the sites', a process each.

    python benchmarks/peers/fedwan_run.py --folder RUN --role coordinator
    python benchmarks/peers/fedwan_run.py --folder RUN --site N

The very functions that a deployment's ServerApp and ClientApp call, over the data plane under
mutual TLS, with checkpoints and outputs as in any run; only the ticket travels through a file.
Strategy, codecs, the link's channels and all else are words of the configuration
(`Spec.words`, e.g. `strategy=diloco codec.up=fp32`).

Two observers are put around the engine, and change nothing: the coordinator's average is looked at
after each of its updates, and the clock of a site stops when it has the last one.
"""

from __future__ import annotations

import dataclasses
import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from benchmarks.peers.stopwatch import STOPWATCH  # noqa: E402

from benchmarks.peers.curve import Curve  # noqa: E402
from benchmarks.peers.role import Role, save_site  # noqa: E402
from benchmarks.peers.spec import Spec, load_json, save_json  # noqa: E402
from benchmarks.peers.workload import config_of, open_part  # noqa: E402
from fedwan.config import Config, merge, site_names  # noqa: E402
from fedwan.coordinator.model import GlobalModel  # noqa: E402
from fedwan.coordinator.service import run_coordinator  # noqa: E402
from fedwan.link import pki  # noqa: E402
from fedwan.link.ticket import Ticket  # noqa: E402
from fedwan.site import service  # noqa: E402
from fedwan.site.loop import SiteLoop  # noqa: E402
from fedwan.site.settings import SiteSettings  # noqa: E402

RUN_ID = "peers"
START_S = 60.0


def prepare(spec: Spec, folder: Path) -> None:
    """Issue the run's certificates."""
    pki.init(folder / "pki", [spec.hosts[0]])
    for index in range(spec.sites):
        pki.issue(folder / "pki", f"s{index + 1}")


def settle(spec: Spec, folder: Path) -> Config:
    """The run's configuration: where it listens, and no evaluation on the training's time."""
    port = spec.ports[0]
    link = {"host": "0.0.0.0", "port": port, "address": f"{spec.hosts[0]}:{port}"}
    config = merge(config_of(spec), {"out": str(folder / "out"), "eval": {"every": 0}})
    return dataclasses.replace(config, link=dataclasses.replace(config.link, **link))


def coordinate(spec: Spec, folder: Path) -> None:
    """The coordinator's process."""
    config = settle(spec, folder)
    part = open_part(spec, 0, config)
    curve = Curve(part, spec)
    observe(curve, spec.h)

    @contextmanager
    def announce(ticket: Ticket) -> Iterator[None]:
        save_json(folder / "ticket.json", ticket.to_dict())
        yield

    run_coordinator(config, RUN_ID, folder / "pki" / "coordinator", False, announce)
    summary = json.loads((folder / "out" / "summary.json").read_text())
    save_json(folder / "coordinator.json", {"summary": summary} | curve.measure())


def observe(curve: Curve, h: int) -> None:
    """Look at the average after each update that completes a version."""
    commit = GlobalModel.commit

    def commit_and_look(self: GlobalModel, *args: Any, **options: Any) -> Any:
        before = min(self.versions)
        payload = commit(self, *args, **options)
        if (version := min(self.versions)) > before:
            curve.look(version * h, self.ema)
            curve.check(version * h, self.state)
        return payload

    GlobalModel.commit = commit_and_look  # type: ignore[method-assign]


class WatchedLoop(SiteLoop):
    """A site's loop whose clock stops when training is over, before the last questions."""

    def _stay(self, step: int) -> str:
        STOPWATCH.end()
        return super()._stay(step)


def take_part(spec: Spec, site: int, folder: Path) -> None:
    """A site's process."""
    service.SiteLoop = WatchedLoop  # type: ignore[misc]
    path = folder / "ticket.json"
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"the coordinator has not announced itself for {START_S:g} s; see its log")
        time.sleep(0.05)
    name = f"s{site + 1}"
    settings = SiteSettings(name, folder / "pki" / name, folder / name)
    sha256 = service.run_site(Ticket.from_dict(load_json(path)), settings)
    save_site(folder, site, sha256)


def gather(spec: Spec, folder: Path) -> None:
    """Put what the coordinator saw beside what the first site did, as the other systems have it."""
    path = folder / "site0.json"
    save_json(path, load_json(path) | load_json(folder / "coordinator.json"))


if __name__ == "__main__":
    role = Role.from_command_line(__doc__)
    assert site_names(config_of(role.spec))[0] == "s1"
    if role.name == "coordinator":
        coordinate(role.spec, role.folder)
    else:
        take_part(role.spec, role.site, role.folder)
