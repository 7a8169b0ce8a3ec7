"""One process of a run of fedwan without Flower: the coordinator, a site, or many light sites.

    python -m benchmarks.harness.party ROLE FOLDER

The very functions that a deployment's processes call, over the data plane under
mutual TLS, with checkpoints and outputs as in any run; only the ticket travels through a file.
`FOLDER` is laid out by `fleet.py`. Leaves `ROLE.json`: peak memory, processor seconds, and when the
workload's steps began.

The only file that knows how the two are called. One observer is put into the engine, and
changes nothing: the clock of a site stops when it has the last update.
"""

from __future__ import annotations

import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.harness.fleet import ROLE_OF_LIGHT_SITES, load_json, peak_rss_mb, save_json

RUN_ID = "benchmark"
START_S = 120.0


def coordinate(folder: Path) -> None:
    from fedwan.config import load
    from fedwan.coordinator.service import run_coordinator
    from fedwan.link.base import Ticket

    @contextmanager
    def announce(ticket: Ticket) -> Iterator[None]:
        save_json(folder / "ticket.json", asdict(ticket) | {"pid": os.getpid()})
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


def take_part(folder: Path, name: str) -> dict[str, Any]:
    """Be a site; the hash of the weights that it ended with, and what it held between steps."""
    from benchmarks.harness.stopwatch import STOPWATCH
    from fedwan.site import recipe
    from fedwan.site.assignment import VARIABLE, Assignment
    from fedwan.site.group import open_group
    from fedwan.site.joining import given_membership
    from fedwan.site.site import Site

    ticket = await_ticket(folder)
    rank = os.environ.get("RANK", "0")
    if "WORLD_SIZE" in os.environ:  # torchrun has started several
        torch.distributed.init_process_group("gloo")
    path = folder / name / f"training{rank}" / "assignment.json"
    Assignment(
        address=ticket["address"],
        run_id=ticket["run_id"],
        config=ticket["config"],
        site=name,
        identity=str(folder / "pki" / name),
        dir=str(folder / name),
        data_path="",
        show_samples=True,
        parent=os.getppid(),
    ).write(path)
    os.environ[VARIABLE] = str(path)
    stay, ended = Site._stay, dict[str, Any]()

    def stay_watched(self: Site) -> None:
        STOPWATCH.end()
        ended["held_mb"] = _held_bytes(self) / 1e6
        stay(self)
        ended["sha256"] = self.global_sha256

    Site._stay = stay_watched  # type: ignore[method-assign]
    member = given_membership()
    assert member is not None
    recipe.take_part(member, open_group())
    return ended


def _held_bytes(site: Any) -> int:
    """Of weights, gradients and moments, in this process."""
    from fedwan.site.group import local

    params = list(site.replica.inner.params.values())
    states = [s for o in site._script.optimizers.values() for s in o.state.values()]
    moments = [value for state in states for value in state.values()]
    held = [*params, *(p.grad for p in params), *moments]
    return sum(local(tensor.detach()).nbytes for tensor in held if torch.is_tensor(tensor))


def main(role: str, folder: Path) -> None:
    os.chdir(folder / "app")
    result: dict[str, Any] = {}
    if role == "coordinator":
        coordinate(folder)
    elif role == ROLE_OF_LIGHT_SITES:
        from benchmarks.harness.light_sites import run_sites

        result = run_sites(folder, await_ticket(folder))
    else:
        from benchmarks.harness.stopwatch import STOPWATCH

        result = take_part(folder, role) | STOPWATCH.result()
    used = resource.getrusage(resource.RUSAGE_SELF)
    result |= {"rss_mb": peak_rss_mb(), "cpu_s": used.ru_utime + used.ru_stime}
    if os.environ.get("RANK", "0") == "0":
        save_json(folder / f"{role}.json", result)


if __name__ == "__main__":
    main(sys.argv[1], Path(sys.argv[2]))
