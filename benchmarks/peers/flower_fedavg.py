"""Flower's FedAvg through its messages: weights go down, H local steps are taken, weights come up.

As its documentation has it: a SuperLink and a ServerApp with the strategy `FedAvg`, a SuperNode at
each site, a ClientApp for each message, state between rounds (Adam's moments, the place in the
data) in the `Context`. At its best: in the clear, no round of evaluation, eight objects under way
at a time instead of two, and a look for new work every 50 ms instead of every second; that its
SuperNode and its grid look every 3 s cannot be set.
"""

from __future__ import annotations

import io
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch
from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.serverapp import Grid
from flwr.serverapp.strategy import FedAvg

from benchmarks.harness.fleet import Process, load_json, module, save_json
from benchmarks.harness.stopwatch import STOPWATCH
from benchmarks.peers.part import PORTS, Curve, Part, Spec, enter, open_part
from benchmarks.wan import Star
from fedwan.errors import FedwanError
from fedwan.flower.bundle import build_fab
from fedwan.flower.control import Control
from fedwan.flower.processes import flower_environment
from fedwan.state import hash_state

APP = Path(__file__).with_name("flower_app")
ROUND_TIMEOUT_S = 3600.0
MOST_STATE_BYTES = 40_000_000
"""Flower loses a `Context` of more than 50 MB, and says nothing."""
TUNED = {
    "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PUSHES": "8",
    "FLWR_PRIVATE_MAX_CONCURRENT_OBJ_PULLS": "8",
    "FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.05",
}


def processes(spec: Spec, folder: Path, star: Star) -> list[Process]:
    """SuperLink at the hub, its state in memory, a SuperNode at each site, and who submits."""
    link, node = (str(Path(sys.executable).with_name(f"flower-super{n}")) for n in ("link", "node"))
    words = {"superlink": [link, "--host", "0.0.0.0", "--port", str(PORTS[0])]}
    words["superlink"] += ["--insecure", "--disable-runtime-dependency-installation"]
    for site in range(spec.sites):
        own = [node, "--insecure", "--host", "127.0.0.1", "--port", str(PORTS[1 + site])]
        own += ["--superlink", f"{spec.hosts[0]}:{PORTS[0]}"]
        words[f"supernode{site}"] = [*own, "--node-config", f"site={site} folder='{folder}'"]
    found = []
    for name, place in zip(words, [star.coordinator, *star.sites], strict=True):
        (home := folder / name).mkdir()
        found.append(Process(name, words[name], place, True, flower_environment(home) | TUNED))
    submitting = module("peers.flower_fedavg", folder, "submit")
    return [*found, Process("submit", submitting, star.coordinator)]


# At the coordinator -------------------------------------------------------------------------------


def submit(spec: Spec, folder: Path) -> None:
    """Start the run, when SuperLink is up, and wait for its end."""
    fab, deadline = build_fab(APP), time.monotonic() + 60
    run = None
    while run is None:
        try:
            control = Control(f"127.0.0.1:{PORTS[0]}")
            run = control.start_run(fab, {"folder": str(folder)})
        except FedwanError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.2)
    while not (ended := control.failure(run)):
        time.sleep(0.5)
    if not (folder / "coordinator.json").exists():
        raise FedwanError(f"Flower's run ended: {ended}; see the logs beside it")


def serve(grid: Grid, folder_name: str) -> None:
    """The ServerApp: FedAvg from the workload's own initial weights."""
    folder = Path(folder_name)
    os.chdir(folder / "app")
    spec = Spec.load(folder)
    part = open_part(spec, 0)
    curve = Curve(part, spec)

    def look(number: int, arrays: ArrayRecord) -> None:
        if number > 0:
            curve.update(number * spec.h, arrays.to_torch_state_dict())

    strategy = FedAvg(
        fraction_evaluate=0.0, min_train_nodes=spec.sites, min_available_nodes=spec.sites
    )
    result = strategy.start(
        grid,
        ArrayRecord(part.state),
        num_rounds=spec.num_steps // spec.h,
        timeout=ROUND_TIMEOUT_S,
        evaluate_fn=look,
    )
    STOPWATCH.end()
    sha256 = hash_state(result.arrays.to_torch_state_dict())
    ended = {"ended": STOPWATCH.ended, "sha256": sha256}
    save_json(folder / "coordinator.json", ended | curve.measure())


# At a site ----------------------------------------------------------------------------------------


def take_round(message: Message, context: Context) -> Message:
    """The ClientApp: H steps from the weights that came, in a process of its own."""
    site = int(context.node_config["site"])
    folder = Path(str(context.node_config["folder"]))
    os.chdir(folder / "app")
    spec = Spec.load(folder)
    STOPWATCH.nominal_s = spec.step_s
    part = open_part(spec, site)
    for name, value in message.content["arrays"].to_torch_state_dict().items():
        part.state[name].copy_(value)
    restore(part, context)
    for _ in range(spec.h):
        part.step()
    remember(part, context)
    number = int(message.content["config"]["server-round"])
    save_json(folder / f"site{site}-round{number}.json", STOPWATCH.result())
    metrics = MetricRecord({"num-examples": spec.h * part.config.data.batch})
    content = RecordDict({"arrays": ArrayRecord(part.state), "metrics": metrics})
    return Message(content=content, reply_to=message)


def _kept(part: Part) -> dict[str, Any]:
    """What a living process of a site would keep: moments, draws, the place in the data."""
    return {**part.workload.optimizers, "rng": part.rng, "stream": part.stream}


def remember(part: Part, context: Context) -> None:
    buffer = io.BytesIO()
    torch.save({name: one.state_dict() for name, one in _kept(part).items()}, buffer)
    if buffer.tell() > MOST_STATE_BYTES:
        raise FedwanError(f"{buffer.tell()} bytes of state are more than Flower's Context keeps")
    context.state["kept"] = ConfigRecord({"content": buffer.getvalue()})


def restore(part: Part, context: Context) -> None:
    """The inverse of `remember`; nothing in a site's first round."""
    if "kept" in context.state:
        for name, state in torch.load(io.BytesIO(context.state["kept"]["content"])).items():
            _kept(part)[name].load_state_dict(state)


def gather(spec: Spec, folder: Path) -> None:
    """Write what the sites' rounds left as the other systems' sites do."""
    end: dict[str, Any] = load_json(folder / "coordinator.json")
    for site in range(spec.sites):
        numbers = range(1, spec.num_steps // spec.h + 1)
        rounds = [load_json(folder / f"site{site}-round{number}.json") for number in numbers]
        merged = {key: [v for r in rounds for v in r[key]] for key in ("began", "computed")}
        told = {"ended": end["ended"], "sha256": end["sha256"]}
        save_json(folder / f"site{site}.json", merged | told)


if __name__ == "__main__":
    spec, folder, _ = enter()
    submit(spec, folder)
    gather(spec, folder)
