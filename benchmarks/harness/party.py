"""One process of a run of fedwan without Flower: `FOLDER ROLE`, the coordinator or a site.

The very functions that a deployment's processes call, over the data plane under mutual TLS, with
checkpoints and outputs as in any run; only the ticket travels through a file. `FOLDER` is laid out
by `fleet.py`. Leaves `ROLE.json`: peak memory, processor seconds, and when the workload's steps
began.

The only file that knows how the two are called. One observer is put into the engine, and
changes nothing: the clock of a site stops when it has the last update.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

import torch

from benchmarks.harness.fleet import COORDINATOR, load_json, peak_rss_mb, save_json
from benchmarks.harness.stopwatch import STOPWATCH
from fedwan.app import load_workload, sources
from fedwan.config import from_json, hash_config, load
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import PROTOCOL, Ticket
from fedwan.state import layout_to_json
from fedwan.workloads.settings import networks_of

if TYPE_CHECKING:  # a process holds what its own role needs
    from fedwan.site.replica import Replica
    from fedwan.site.site import Site

RUN_ID = "benchmark"
START_S = 120.0


def coordinate(folder: Path) -> None:
    from fedwan.coordinator.service import run_coordinator

    @contextmanager
    def announce(ticket: Ticket, on_failure: object) -> Iterator[None]:
        save_json(folder / "ticket.json", asdict(ticket) | {"pid": os.getpid()})
        yield

    config = load(folder / "config.yaml")
    run_coordinator(config, RUN_ID, folder / "pki" / COORDINATOR, False, announce)


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


def greeting(ticket: dict[str, Any]) -> tuple[wire.Hello, Replica]:
    """What an honest site says in its Join, but for its name and session, and what it trains."""
    from fedwan.site.replica import Replica

    config = from_json(ticket["config"])
    made = load_workload(config.workload)
    workload = made.build(config, "cpu")
    replica = Replica(workload.networks, workload.optimizers, config.inner, config.excluded)
    hello = wire.Hello(
        run_id=ticket["run_id"],
        protocol=PROTOCOL,
        layout_json=layout_to_json(replica.layout),
        initial_sha256=replica.initial_sha256,
        frozen_sha256=replica.frozen_sha256,
        kinds_json=json.dumps(dict(networks_of(made, config)), sort_keys=True),
        sources_json=json.dumps(sources(config), sort_keys=True),
        config_sha256=hash_config(config),
    )
    return hello, replica


def take_part(folder: Path, name: str) -> dict[str, Any]:
    """Be a site; the hash of the weights that it ended with, and what it held between steps."""
    from fedwan.site import recipe
    from fedwan.site.assignment import VARIABLE, Assignment, machine
    from fedwan.site.group import open_group
    from fedwan.site.joining import given_membership
    from fedwan.site.site import Site

    ticket = await_ticket(folder)
    del ticket["pid"], ticket["start"]
    rank = os.environ.get("RANK", "0")
    if "WORLD_SIZE" in os.environ:  # torchrun has started several
        torch.distributed.init_process_group("gloo")
    path = folder / name / f"training{rank}" / "assignment.json"
    Assignment(
        **ticket,
        site=name,
        identity=str(folder / "pki" / name),
        dir=str(folder / name),
        data_path="",
        show_samples=True,
        parent=os.getppid(),
        machine=machine(),
    ).write(path)
    os.environ[VARIABLE] = str(path)
    stay, ended = Site._stay, dict[str, Any]()

    def stay_watched(self: Site) -> None:
        STOPWATCH.end()
        ended.update(_done(self), held_mb=_held_bytes(self) / 1e6)
        stay(self)
        ended["sha256"] = self.global_sha256

    with mock.patch.object(Site, "_stay", stay_watched):
        recipe.take_part(given_membership(), open_group())
    return ended


def _done(site: Any) -> dict[str, float]:
    """Seconds that it computed or waited, and bytes of its link, with the last update's."""
    meter, link = site.meter, site._link
    told = {name: getattr(link, name) for name in ("bytes_up", "bytes_down")} if link else {}
    return told | {"busy_s": meter._compute_s + meter._wait_s}


def _held_bytes(site: Any) -> int:
    """Of weights, gradients and moments, in this process."""
    from fedwan.pieces import local

    params = list(site.replica.inner.params.values())
    states = [s for o in site._script.optimizers.values() for s in o.state.values()]
    moments = [value for state in states for value in state.values()]
    held = [*params, *(p.grad for p in params), *moments]
    return sum(local(tensor.detach()).nbytes for tensor in held if torch.is_tensor(tensor))


def used() -> dict[str, float]:
    """What this process took until now."""
    mine = resource.getrusage(resource.RUSAGE_SELF)
    gpu = torch.cuda.max_memory_allocated() if torch.cuda.is_initialized() else 0
    cpu_s = mine.ru_utime + mine.ru_stime
    return {"rss_mb": peak_rss_mb(), "cpu_s": cpu_s, "gpu_mb": gpu / 1e6}


if __name__ == "__main__":
    folder, role = Path(sys.argv[1]), sys.argv[2]
    os.chdir(folder / "app")
    result: dict[str, Any] = {}
    if role == COORDINATOR:
        coordinate(folder)
    else:
        result = take_part(folder, role) | STOPWATCH.result()
    if os.environ.get("RANK", "0") == "0":
        save_json(folder / f"{role}.json", result | used())
