"""One process of a benchmark's run: the coordinator or a site, as the services run them.

    python benchmarks/party.py ROLE FOLDER APP

The real services (`run_coordinator`, `run_site`) with the ticket handed over in a file instead of
by Flower. `FOLDER` is laid out by `fleet.py`, recipes are those of `APP`. Leaves `ROLE.json`: peak
memory, processor seconds, and when the workload's steps began.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

TICKET = "ticket.json"
RUN_ID = "benchmark"


def save_json(path: Path, content: object) -> None:
    """Write a file that readers see whole or not at all."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(json.dumps(content))
    temporary.rename(path)


def coordinate(folder: Path) -> None:
    """Serve the run and write its outputs."""
    from fedwan.config import load
    from fedwan.coordinator.service import run_coordinator
    from fedwan.link.ticket import Ticket

    @contextmanager
    def announce(ticket: Ticket) -> Iterator[None]:
        save_json(folder / TICKET, ticket.to_dict())
        yield

    config = load(folder / "config.yaml")
    run_coordinator(config, RUN_ID, folder / "pki" / "coordinator", False, announce)


def take_part(folder: Path, name: str) -> dict[str, Any]:
    """Be a site; its stopwatch if the workload has one."""
    from fedwan.site.service import run_site
    from fedwan.site.settings import SiteSettings

    from benchmarks.peers.stopwatch import STOPWATCH
    from fedwan.link.ticket import Ticket

    while not (folder / TICKET).exists():
        time.sleep(0.05)
    ticket = Ticket.from_dict(json.loads((folder / TICKET).read_text()))
    run_site(ticket, SiteSettings(name, folder / "pki" / name, folder / name))
    return STOPWATCH.result()


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB (1e6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmHWM in /proc/self/status")


def main(role: str, folder: Path, app: Path) -> None:
    """Run one role to its end."""
    os.chdir(app)
    result: dict[str, Any] = {}
    if role == "coordinator":
        coordinate(folder)
    else:
        result = take_part(folder, role)
    used = resource.getrusage(resource.RUSAGE_SELF)
    result |= {"rss_mb": peak_rss_mb(), "cpu_s": used.ru_utime + used.ru_stime}
    save_json(folder / f"{role}.json", result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3]))
