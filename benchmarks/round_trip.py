"""Time of a round over the data plane: coordinator and 2 sites, a process each, on loopback.

    python benchmarks/round_trip.py [--quick] [--json PATH]

The real engine at both ends: encode, upload, check, merge, outer Nesterov step, moving average,
encode, download, apply. A round is timed at a site, from the end of one step to the end of the next
(the step itself only moves each weight a little), so that everything a user waits for is in it.

Row: payload_bytes sites round_ms_median round_ms_p95 coordinator_rss_mb site_rss_mb
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

SITES = ("s1", "s2")
SIZES = {1_000: 300, 200_000_000: 12}
"""Payload bytes -> rounds."""
WARM_UP = 3
NUM_TENSORS = 16


def peak_rss_mb() -> float:
    """Peak resident memory of this process, in MB (1e6 bytes)."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / 1e6
    raise AssertionError("no VmHWM in /proc/self/status")


def make_workload(payload_bytes: int) -> Any:
    """A workload of one network of `payload_bytes` fp32 values, whose step moves each a little."""
    import torch
    from torch import Tensor, nn

    from fedwan.rng import NamedGenerators
    from fedwan.workloads.base import Batch, Reduce

    num_values = payload_bytes // 4
    num_tensors = NUM_TENSORS if num_values > 1_000_000 else 1

    class Network(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weights = nn.ParameterList(
                nn.Parameter(torch.zeros(num_values // num_tensors)) for _ in range(num_tensors)
            )

    class Weights:
        def __init__(self) -> None:
            self.networks: Mapping[str, nn.Module] = {"model": Network()}
            params = self.networks["model"].parameters()
            self.optimizers: Mapping[str, torch.optim.Optimizer] = {
                "model": torch.optim.SGD(params, lr=1.0)
            }
            self.finished_at: list[float] = []

        def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
            for parameter in self.networks["model"].parameters():
                parameter.data.add_(1e-3)
            self.finished_at.append(time.monotonic())
            return {}

        def sample(self, num: int, seed: int) -> Tensor:
            return torch.zeros(1, 2)

        def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
            return {"fd": 0.0, "fd_floor": 0.0}  # nothing is generated here

    return Weights()


def make_strategy() -> Any:
    """DiLoCo with a round after every step."""
    from fedwan import outer
    from fedwan.codecs import fp32
    from fedwan.coordinator.policy import barrier
    from fedwan.coordinator.server_step import step_outer
    from fedwan.fragments import whole
    from fedwan.strategy import Strategy

    step = step_outer({"model": outer.nesterov(0.5, 0.5)})
    return Strategy("delta", 1, whole, step, fp32(), fp32(), barrier(len(SITES)))


def run_coordinator(folder: Path, rounds: int) -> dict[str, Any]:
    """Serve a run to its end; the port goes into a file for the sites."""
    from fedwan.coordinator.desk import Desk
    from fedwan.coordinator.plan import Plan

    from fedwan.coordinator.intake import Intake
    from fedwan.coordinator.registry import Registry
    from fedwan.coordinator.rounds import Rounds
    from fedwan.link.server import DataPlane
    from fedwan.link.tls import Identity

    strategy = make_strategy()
    intake = Intake(strategy.up, 0.0, folder / "spool")
    registry = Registry(SITES, 60.0)
    desk = Desk("bench", registry, intake, strategy.fragments, lambda *event: None, 1 << 20)
    identity = Identity.load(folder / "pki" / "coordinator", "coordinator")
    plane = DataPlane(desk, identity, "127.0.0.1", 0, 32, 2.0)
    plane.start()
    (folder / "port.tmp").write_text(str(plane.port))
    (folder / "port.tmp").rename(folder / "port")
    plan = Plan(SITES, rounds, 1, 1e3, rounds + 1, 0, 60.0, folder / "checkpoint")
    loop = Rounds(plan, strategy, desk, lambda row: None, lambda *_: None)
    # The final checkpoint is no part of a round.
    loop.checkpoint = lambda model: None  # type: ignore[method-assign]
    loop.run()
    plane.stop()
    return {"rss_mb": peak_rss_mb()}


def run_site(folder: Path, name: str, payload_bytes: int, rounds: int) -> dict[str, Any]:
    """One site's part."""
    import torch
    from fedwan.site.loop import SiteLoop
    from fedwan.site.plan import SitePlan

    from fedwan.data import InMemory, Shard
    from fedwan.link.client import GrpcLink
    from fedwan.link.tls import Identity
    from fedwan.workloads.base import Batch

    while not (folder / "port").exists():
        time.sleep(0.05)
    address = f"127.0.0.1:{(folder / 'port').read_text()}"
    data = Batch(torch.zeros(1, 2), torch.zeros(1, dtype=torch.int64))
    workload = make_workload(payload_bytes)
    link = GrpcLink(address, Identity.load(folder / "pki" / name))
    plan = SitePlan("bench", name, 0, 1, rounds, 1, rounds + 1, 2.0)
    shard = Shard(InMemory(data), data, 1, True)
    loop = SiteLoop(
        plan, workload, shard, make_strategy(), link, folder / name, torch.device("cpu")
    )
    try:
        loop.run()
    finally:
        link.close()
    ends = workload.finished_at
    times = [1e3 * (b - a) for a, b in zip(ends, ends[1:], strict=False)]
    return {"rss_mb": peak_rss_mb(), "round_ms": times[WARM_UP:]}


def measure(payload_bytes: int, rounds: int) -> dict[str, Any]:
    """One row: a run of its own, in processes of its own."""
    from fedwan.link import pki

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        pki.init(folder / "pki", ["127.0.0.1"])
        for site in SITES:
            pki.issue(folder / "pki", site)
        command = [sys.executable, __file__, "--folder", name, "--rounds", str(rounds)]
        command += ["--payload-bytes", str(payload_bytes), "--role"]
        roles = ("coordinator", *SITES)
        children = [subprocess.Popen([*command, r], stdout=subprocess.PIPE) for r in roles]
        outputs = [child.communicate(timeout=600)[0] for child in children]
        if any(child.returncode for child in children):
            raise SystemExit("a process of the benchmark failed; its error stands above")
    coordinator, *sites = [json.loads(output) for output in outputs]
    times = sorted(t for site in sites for t in site["round_ms"])
    return {
        "payload_bytes": payload_bytes,
        "sites": len(SITES),
        "round_ms_median": round(statistics.median(times), 2),
        "round_ms_p95": round(times[int(0.95 * (len(times) - 1))], 2),
        "coordinator_rss_mb": round(coordinator["rss_mb"]),
        "site_rss_mb": round(max(site["rss_mb"] for site in sites)),
    }


def main() -> None:
    """Measure every size, print a table, write rows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write rows to this file")
    parser.add_argument("--quick", action="store_true", help="fewer rounds")
    parser.add_argument("--folder", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--rounds", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--payload-bytes", type=int, help=argparse.SUPPRESS)
    parser.add_argument("--role", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.role:
        from fedwan.memory import tune_allocator

        tune_allocator()  # as both services do
    if args.role == "coordinator":
        print(json.dumps(run_coordinator(args.folder, args.rounds)))
    elif args.role:
        print(json.dumps(run_site(args.folder, args.role, args.payload_bytes, args.rounds)))
    else:
        rows = []
        for size, rounds in SIZES.items():
            rows.append(measure(size, max(8, rounds // 4) if args.quick else rounds))
            print("  ".join(f"{key}={value}" for key, value in rows[-1].items()), flush=True)
        if args.json:
            args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
