"""What the tests of a site share: a script of a few layers, and sites of real processes."""

from __future__ import annotations

import faulthandler
import functools
import multiprocessing
import os
import subprocess
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch import distributed as dist

import fedwan
from fedwan.app import load_run
from fedwan.config import Config, to_json
from fedwan.coordinator.run import CoordinatedRun
from fedwan.link.loopback import LoopbackLink
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.rng import seeded_init
from fedwan.simulation import RUN_ID, simulate
from fedwan.site.assignment import VARIABLE, Assignment, drop_meeting, machine
from fedwan.site.group import Group
from fedwan.site.joining import as_member
from fedwan.site.script import Script
from fedwan.site.site import Membership, Site
from fedwan.state import State, hash_state

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).with_name("script.py")
BATCH, WIDTH = 8, 16
CUTS = ("ddp", "fsdp", "gradients", "tensor_parallel")
"""Ways of several processes to train one network, besides a plain one on the same batches."""


class Batches:
    """Points and what a network is to make of them; a stream with a place that can be kept."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)

    def __next__(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(BATCH, WIDTH, generator=self._generator)
        return x, x.flip(1).sin()

    def state_dict(self) -> dict[str, Tensor]:
        return {"generator": self._generator.get_state()}

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        self._generator.set_state(state["generator"])


def network(seed: int = 0, *, depth: int = 4, width: int = WIDTH) -> nn.Sequential:
    """Dense layers in pairs, as tensor parallel cuts them."""
    with seeded_init(seed):
        sizes = [WIDTH, *[width] * (depth - 1), WIDTH]
        layers: list[nn.Module] = []
        for before, after in zip(sizes, sizes[1:], strict=False):
            layers += [nn.Linear(before, after), nn.Tanh()]
    return nn.Sequential(*layers[:-1])


def cut(net: nn.Sequential, way: str) -> nn.Module:
    """A network as some way of sharing the work has it."""
    if way == "ddp":
        return nn.parallel.DistributedDataParallel(net)
    if way in ("fsdp", "gradients"):
        from torch.distributed.fsdp import fully_shard

        for layer in (*(m for m in net if isinstance(m, nn.Linear)), net):
            fully_shard(layer, reshard_after_forward=way == "fsdp")
    if way == "tensor_parallel":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.tensor.parallel import (
            ColwiseParallel,
            RowwiseParallel,
            parallelize_module,
        )

        dense = [name for name, m in net.named_children() if isinstance(m, nn.Linear)]
        styles = [ColwiseParallel(), RowwiseParallel()] * (len(dense) // 2)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        parallelize_module(net, mesh, dict(zip(dense, styles, strict=True)))
    return net


class Masters(torch.optim.Optimizer):
    """Keeps the weights in fp32, and copies them into the network at every step."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 0.01) -> None:
        super().__init__(params, {"lr": lr})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for param in group["params"]:
                state, grad = self.state[param], param.grad.float()
                if not state:
                    state |= {"master": param.detach().float().clone(), "sum": grad * 0}
                state["sum"].mul_(0.9).add_(grad)
                state["master"].sub_(state["sum"], alpha=group["lr"])
                param.copy_(state["master"])


class Ended(NamedTuple):
    """How a script ended at one process."""

    sha256: str
    steps: list[int]
    losses: list[float]


def take_steps(
    way: str = "plain",
    *,
    seed: int = 0,
    batches: int = 0,
    stop_at: int = -1,
    keep: Callable[[nn.Module], object] = lambda net: None,
    runs: nn.Module | None = None,
    **options: Any,
) -> Ended:
    """A training script: `batches` is the seed of its data, `keep` gets the network.

    `runs` is one that takes its place.

    At step `stop_at` the coordinator is told to stop; `options` are of `fedwan.join`.
    """
    is_shared = way in ("ddp", "fsdp", "gradients")
    rank, size = (dist.get_rank(), dist.get_world_size()) if is_shared else (0, 1)
    net = runs or cut(network(seed), way)
    keep(net)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2, foreach=False)
    data = Batches(batches)
    ended = Ended("", [], [])
    usual = {"networks": {"net": net}, "optimizers": {"net": optimizer}, "state": {"data": data}}
    with fedwan.join(**(usual | options)) as site:
        assert isinstance(site, Site)
        for step in site:
            x, target = (part.chunk(size)[rank] for part in next(data))
            loss = (net(x) - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            site.reduce()
            optimizer.step()
            site.log(loss=loss)
            ended.steps.append(step)
            ended.losses.append(float(loss.detach()))
            if step == stop_at and isinstance(link := site._link, LoopbackLink):
                link._hub.finish("that is enough")  # type: ignore[attr-defined]
    return ended._replace(sha256=site.global_sha256)


def overflow_once(call: int, keep: Callable[[nn.Module], object] = lambda net: None) -> Ended:
    """A batch that makes weights which are no numbers; `keep` gets the network."""
    left = [call]

    def spoil(_: nn.Module, args: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        left[0] -= 1
        return args if left[0] else tuple(arg * float("nan") for arg in args)

    def spoilt(net: nn.Module) -> None:
        net.register_forward_pre_hook(spoil)
        keep(net)

    return take_steps(keep=spoilt)


@functools.cache
def asked(*words: str) -> Config:
    """A run of scripts; of one site unless asked otherwise."""
    usual = ["workload=command", "device=cpu", "sites=1", "steps=8", "checkpoint.every=1"]
    takes_h = not any(word in ("strategy=sync", "strategy=parameter_server") for word in words)
    inner = ["inner.net.name=adamw", "inner.net.lr=0.01", "inner.net.weight_decay=0.01"]
    return load_run(None, [*usual, *(["h=4"] if takes_h else inner), "eval.every=0", *words])


class Ran(NamedTuple):
    """How a run ended, as one process of its first site knows it."""

    ended: Any
    """What the script returned at this process."""
    state: State
    """The coordinator's final weights; at rank 0, as the next two."""
    sha256: set[str]
    """Of these, and of those that every site ended with."""
    records: list[dict[str, Any]]


def at_site(config: Config, folder: Path, script: Callable[[], Any]) -> Ran:
    """Run a script as the first site of a run; collective. Rank 0 has the coordinator, too.

    Other sites are of one process each, in threads of rank 0.
    """
    ended: list[Any] = []
    if not dist.is_initialized() or dist.get_rank() == 0:

        def train(member: Membership) -> None:
            if member.name == "s1":
                ended.append(script())
            else:
                alone(member)

        run = simulate(config, folder, train=train)
        sha256 = {hash_state(run.model.state), *run.site_sha256.values()}
        return Ran(ended[0], run.model.state, sha256, run.records)

    def no_link() -> Any:
        raise AssertionError("rank 0 alone has a link")

    with as_member(Membership(config, RUN_ID, "s1", folder / "s1", no_link)):
        return Ran(script(), {}, set(), [])


def alone(member: Membership) -> None:
    """Another site, of one process, on its own data."""
    net = network()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    batches = Batches(int(member.name[1:]))
    script = Script({"net": net}, {"net": optimizer}, {"net": "regression"}, {"batches": batches})
    with Site(member, script, Group()) as site:
        for _ in site:
            x, target = next(batches)
            optimizer.zero_grad()
            (net(x) - target).square().mean().backward()
            site.reduce()
            optimizer.step()


class Served:
    """A run of one site behind a real socket, for scripts in processes of their own."""

    def __init__(self, config: Config, folder: Path, identities: Path) -> None:
        self.config, self.folder, self.identities = config, folder, identities
        self.assignment = folder / "assignment.json"
        self.stderr = folder.with_suffix(".stderr")
        self.run = CoordinatedRun(
            *(config, "run-1", folder / "hub", lambda row: None, lambda *_: None),
            silence_s=1.0,
        )
        self.sha256 = ""

    def _train(self) -> None:
        self.sha256 = hash_state(self.run.train().state)

    @contextmanager
    def serving(self) -> Iterator[None]:
        identity = Identity.load(self.identities / "coordinator", "coordinator")
        plane = DataPlane(self.run.hub, identity, self.config)
        plane.start()
        self.address = f"127.0.0.1:{plane.port}"
        thread = threading.Thread(target=self._train)
        thread.start()
        try:
            yield
            thread.join(60)
        finally:
            self.run.hub.finish("the test ended")
            thread.join(10)
            plane.stop(0.1)
            drop_meeting(self.assignment)

    def start(self, *argv: object, site: str = "s1") -> subprocess.Popen[bytes]:
        """The site's script, by this Python."""
        Assignment(
            *(self.address, "run-1", to_json(self.config), site, str(self.identities / site)),
            *(str(self.folder / site), "", False, os.getpid(), machine()),
        ).write(self.assignment)
        return self.also(sys.executable, *argv)

    def also(self, *words: object) -> subprocess.Popen[bytes]:
        """Another process of the script that was started last."""
        env = os.environ | {VARIABLE: str(self.assignment), "PYTHONPATH": str(ROOT)}
        with self.stderr.open("ab") as stderr:
            return subprocess.Popen(list(map(str, words)), cwd=ROOT, env=env, stderr=stderr)


# Processes ---------------------------------------------------------------------------------------


class Processes:
    """Real processes in one process group on gloo, that run functions together."""

    def __init__(self, size: int, folder: Path) -> None:
        self.size = size
        self._folder = folder
        self._pipes: list[Connection] = []
        self._processes: list[Any] = []
        self._starts = 0

    def _start(self) -> None:
        # Each is a copy of one that has imported all of it, which takes seconds.
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__, "torch._dynamo", "torch.distributed.fsdp"])
        self._starts += 1
        store = self._folder / f"store-{self._starts}"
        for rank in range(self.size):
            mine, theirs = context.Pipe()
            process = context.Process(
                target=_serve, args=(rank, self.size, str(store), theirs), daemon=True
            )
            with mock.patch.dict(os.environ, PYTHONPATH=str(ROOT)):
                process.start()
            self._pipes.append(mine)
            self._processes.append(process)

    def run(
        self, call: Callable[..., Any], *args: Any, timeout_s: float = 90.0, **options: Any
    ) -> list[Any]:
        """What a module's function returns at each rank, or the `Failure` that it raised."""
        if not self._processes:
            self._start()
        for pipe in self._pipes:
            pipe.send(functools.partial(call, *args, **options))
        outcomes: list[Any] = [None] * self.size
        deadline = time.monotonic() + timeout_s
        left = dict(zip(self._pipes, range(self.size), strict=True))
        num_failed = 0
        while left and (heard := wait(list(left), max(0.0, deadline - time.monotonic()))):
            for pipe in heard:
                is_fine, outcomes[left[pipe]] = pipe.recv()  # type: ignore[union-attr,index]
                if not is_fine:  # the others may wait for it in vain
                    num_failed, deadline = num_failed + 1, min(deadline, time.monotonic() + 40)
                del left[pipe]  # type: ignore[arg-type]
        if left or 0 < num_failed < self.size:
            self.stop()
        if left and not num_failed:
            raise TimeoutError(f"{call} hangs")
        return outcomes

    def stop(self) -> None:
        """End them."""
        for process in self._processes:
            process.kill()
            process.join()
        self._pipes, self._processes = [], []


class Failure(NamedTuple):
    """What a function raised at one rank."""

    error: str
    """Its class."""
    text: str
    trace: str


def _serve(rank: int, size: int, store: str, pipe: Connection) -> None:
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(size))
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=size)
    while True:
        try:
            call = pipe.recv()
        except EOFError:
            return
        faulthandler.dump_traceback_later(60.0)
        try:
            pipe.send((True, call()))
        except BaseException as error:
            failure = Failure(type(error).__name__, str(error), traceback.format_exc())
            pipe.send((False, failure))
        faulthandler.cancel_dump_traceback_later()
