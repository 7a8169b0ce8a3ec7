"""One process of a run of fedwan without Flower: the coordinator, a site, or many light sites.

    python -m benchmarks.harness.party ROLE FOLDER

The very functions that a deployment's ServerApp and ClientApp call, over the data plane under
mutual TLS, with checkpoints and outputs as in any run; only the ticket travels through a file.
`FOLDER` is laid out by `fleet.py`. Leaves `ROLE.json`: peak memory, processor seconds, and when the
workload's steps began.

The only file that knows how the two services are called. One observer is put into the engine, and
changes nothing: the clock of a site stops when it has the last update.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.harness.processes import load_json, peak_rss_mb, save_json

__all__ = ["ROLE_OF_LIGHT_SITES", "await_ticket", "coordinate", "take_part"]

RUN_ID = "benchmark"
START_S = 120.0
ROLE_OF_LIGHT_SITES = "sites"


def coordinate(folder: Path) -> None:
    """Serve the run and write its outputs."""
    from fedwan.config import load
    from fedwan.coordinator.service import run_coordinator
    from fedwan.link.ticket import Ticket

    @contextmanager
    def announce(ticket: Ticket) -> Iterator[None]:
        save_json(folder / "ticket.json", ticket.to_dict() | {"pid": os.getpid()})
        yield

    config = load(folder / "config.yaml")
    run_coordinator(config, RUN_ID, folder / "pki" / "coordinator", False, announce)


def await_ticket(folder: Path) -> dict[str, Any]:
    """What the coordinator announced, with its process id."""
    path = folder / "ticket.json"
    deadline = time.monotonic() + START_S
    while not path.exists():
        if time.monotonic() > deadline:
            sys.exit(f"the coordinator has not announced itself for {START_S:g} s; see its log")
        time.sleep(0.05)
    found: dict[str, Any] = load_json(path)
    return found


def take_part(folder: Path, name: str) -> str:
    """Be a site; the hash of the weights that it ended with."""
    from benchmarks.harness.stopwatch import STOPWATCH
    from fedwan.link.ticket import Ticket
    from fedwan.site import service
    from fedwan.site.loop import SiteLoop
    from fedwan.site.settings import SiteSettings

    class WatchedLoop(SiteLoop):
        """A loop whose clock stops when training is over, before the last questions."""

        def _stay(self, step: int) -> str:
            STOPWATCH.end()
            return super()._stay(step)

    service.SiteLoop = WatchedLoop  # type: ignore[misc]
    settings = SiteSettings(name, folder / "pki" / name, folder / name)
    return service.run_site(Ticket.from_dict(await_ticket(folder)), settings)


def main(role: str, folder: Path) -> None:
    """Run one role to its end."""
    os.chdir(folder / "app")
    result: dict[str, Any] = {}
    if role == "coordinator":
        coordinate(folder)
    elif role == ROLE_OF_LIGHT_SITES:
        from benchmarks.harness.light_sites import run_sites

        result = run_sites(folder, await_ticket(folder))
    else:
        from benchmarks.harness.stopwatch import STOPWATCH

        result = {"sha256": take_part(folder, role)} | STOPWATCH.result()
    used = resource.getrusage(resource.RUSAGE_SELF)
    result |= {"rss_mb": peak_rss_mb(), "cpu_s": used.ru_utime + used.ru_stime}
    save_json(folder / f"{role}.json", result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
