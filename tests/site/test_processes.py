"""A site of several processes, which all run its script or its recipe (SPMD).

All here share two processes, which are dear to start.
"""

from __future__ import annotations

import copy
import itertools
import os
import re
import sys
import time
from collections.abc import Callable, Iterable
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.utils.parametrizations import spectral_norm
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedwan
from fedwan.app import load_run
from fedwan.config import Config
from fedwan.errors import NotJoined, UserError
from fedwan.link.loopback import LoopbackLink
from fedwan.optim_state import NamedOptimizers
from fedwan.pieces import local, whole
from fedwan.site import group
from fedwan.site.assignment import read_outcome
from fedwan.site.group import open_group
from fedwan.site.joining import given_membership
from fedwan.site.recipe import take_part
from fedwan.site.replica import Replica
from fedwan.site.site import Site
from fedwan.site.stub import CoordinatorStub
from fedwan.state import State, spectral_norms
from tests.flower.fleet import free_port
from tests.site.support import (
    CUTS,
    SCRIPT,
    WIDTH,
    Batches,
    Ended,
    Failure,
    Masters,
    Processes,
    Ran,
    Served,
    asked,
    at_site,
    cut,
    network,
    overflow_once,
    take_steps,
)

pytestmark = pytest.mark.slow  # each starts processes of its own, or waits for some

STRATEGIES = [
    "strategy=local_sgd codec.up=topk2",
    "strategy=diloco",
    "strategy=streaming_diloco stream.tau=2 codec.up=int4",
    "strategy=eager_diloco stream.tau=2 outer.net.momentum=0.5",
    "strategy=scaffnew sites=2 codec.up=int4",
    "strategy=sparse_loco",
    "strategy=async_diloco codec.up=topk2",
    "strategy=sync sites=2 codec.up=bf16",
    "strategy=parameter_server",
]


def together(
    pair: Processes,
    folder: Path,
    words: str | Config,
    script: Callable[[], Any] = take_steps,
    **options: float,
) -> list[Ran]:
    config = asked(*words.split()) if isinstance(words, str) else words
    ran = pair.run(at_site, config, folder, script, **options)
    assert all(isinstance(one, Ran) for one in ran), ran
    return ran


def apart(folder: Path, words: str) -> Ran:
    return at_site(asked(*words.split()), folder, take_steps)


def distance(a: State, b: State) -> float:
    return max(float((a[name] - b[name]).abs().max()) for name in a)


@pytest.mark.parametrize(
    ("words", "way"),
    [
        *zip(STRATEGIES, itertools.cycle(CUTS), strict=False),
        ("strategy=diloco", "gradients"),
        ("strategy=diloco inner.net.state=ema", "fsdp"),
        ("strategy=sync inner.net.clip_norm=0.1", "fsdp"),
    ],
)
def test_processes_that_take_the_same_steps_end_on_the_bits_of_one_and_cut_ones_on_the_same(
    words: str, way: str, pair: Processes, tmp_path: Path
) -> None:
    one = apart(tmp_path / "one", words)
    first, second = together(pair, tmp_path / "two", words)
    assert first.sha256 == one.sha256 == {second.ended.sha256}
    first, second = together(pair, tmp_path / "cut", words, partial(take_steps, way))
    assert first.sha256 == {second.ended.sha256}
    assert "codec" in words or "sparse" in words or distance(first.state, one.state) < 1e-6


def on_a_mesh(is_cut: bool) -> str:
    """Two networks on a mesh of 2 by 2: replicas of shards, and shards of a tensor parallel one."""
    nets = {"replicated": network(1), "parallel": network(2)}
    share = dict.fromkeys(nets, (1, 0))
    if is_cut:
        share = {"replicated": (4, dist.get_rank()), "parallel": (2, dist.get_rank() // 2)}
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("outer", "inner"))
        dense = [name for name, m in nets["parallel"].named_children() if isinstance(m, nn.Linear)]
        styles = itertools.cycle((ColwiseParallel(), RowwiseParallel()))
        parallelize_module(nets["parallel"], mesh["inner"], dict(zip(dense, styles, strict=False)))
        for net, of in ((nets["replicated"], mesh), (nets["parallel"], mesh["outer"])):
            for layer in (*(m for m in net if isinstance(m, nn.Linear)), net):
                fully_shard(layer, mesh=of)
    optimizers = {n: torch.optim.AdamW(net.parameters(), lr=1e-2) for n, net in nets.items()}
    data = Batches()
    with fedwan.join(networks=nets, optimizers=optimizers, state={"data": data}) as site:
        for _ in site:
            x, target = next(data)
            for name, net in nets.items():
                num, mine = share[name]
                part, wanted = (whole.chunk(num)[mine] for whole in (x, target))
                (net(part) - wanted).square().mean().backward()
                optimizers[name].step()
                optimizers[name].zero_grad()
    return site.global_sha256


def test_networks_on_a_mesh_of_two_dimensions_train_as_whole_ones(tmp_path: Path) -> None:
    config = asked("strategy=diloco")
    whole = at_site(config, tmp_path / "whole", partial(on_a_mesh, False))
    four = Processes(4, tmp_path)
    try:
        ran = four.run(at_site, config, tmp_path / "cut", partial(on_a_mesh, True))
    finally:
        four.stop()
    assert all(isinstance(one, Ran) and {one.ended} == ran[0].sha256 for one in ran), ran
    assert distance(ran[0].state, whole.state) < 1e-6


# What they must have alike -----------------------------------------------------------------------


def other_weights() -> Ended:
    return take_steps(seed=dist.get_rank())


def other_layers() -> Ended:
    net = network(depth=4 + dist.get_rank())
    return take_steps(networks={"net": net}, optimizers={"net": torch.optim.SGD(net.parameters())})


def other_data() -> Ended:
    """Gradients that nobody averages."""
    return take_steps(batches=dist.get_rank())


@pytest.mark.parametrize(
    ("script", "text", "strategy"),
    [
        (other_weights, "initial weights differ between processes", "diloco"),
        (other_layers, "networks differ between processes", "diloco"),
        (other_data, "weights differ between processes", "diloco"),  # at the next checkpoint
        (other_data, "gradients differ between processes", "sync"),
    ],
)
def test_processes_that_differ_are_refused_with_both_hashes(
    script: Any, text: str, strategy: str, pair: Processes, tmp_path: Path
) -> None:
    for outcome in pair.run(at_site, asked(f"strategy={strategy}"), tmp_path, script):
        assert isinstance(outcome, Failure) and outcome.error == "UserError", outcome
        assert text in outcome.text and "\n" not in outcome.text
        assert len(set(re.findall(r"\b[0-9a-f]{16}\b", outcome.text))) == 2


def measured_by_one() -> Ended:
    """As many write it."""
    return take_steps(evaluate=None if dist.get_rank() else lambda seed: {"fd": 1.0})


def of_unequal_shards() -> Ended:
    return take_steps(steps=8 - 4 * dist.get_rank())


@pytest.mark.parametrize("script", [measured_by_one, of_unequal_shards])
def test_processes_that_ask_for_different_things_do_not_wait_for_one_another(
    script: Any, pair: Processes, tmp_path: Path
) -> None:
    text = "steps=, evaluate= or sample= differ between processes of this site: rank 0 has ("
    for outcome in pair.run(at_site, asked(), tmp_path, script):
        assert isinstance(outcome, Failure) and outcome.error == "UserError", outcome
        assert text in outcome.text and "give fedwan.join the same" in outcome.text


class Seeing(nn.Sequential):
    """With a statistic that takes another tensor's place in each step."""

    def __init__(self, *layers: nn.Module) -> None:
        super().__init__(*layers)
        self.register_buffer("seen", torch.zeros(WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        self.seen = 0.9 * self.seen + 0.1 * x.mean(0)
        return super().forward(x)  # type: ignore[no-any-return]


def seeing() -> list[float]:
    net = cut(Seeing(*network()), "fsdp")
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-2)
    take_steps("fsdp", networks={"net": net}, optimizers={"net": optimizer}, runs=net)
    return net.seen.tolist()  # type: ignore[no-any-return,operator,union-attr]


def test_a_buffer_that_takes_another_one_s_place_travels_where_parameters_are_cut(
    pair: Processes, tmp_path: Path
) -> None:
    first, second = together(pair, tmp_path, "strategy=diloco", seeing)
    assert first.ended == second.ended == first.state["net/seen"].tolist() != [0.0] * WIDTH


def land_on_masters() -> list[bool]:
    net = cut(network().bfloat16(), "fsdp")
    optimizer = Masters(net.parameters())
    replica = Replica({"net": net}, {"net": optimizer}, group=open_group())
    net(torch.ones(2, WIDTH, dtype=torch.bfloat16)).square().mean().backward()
    optimizer.step()
    for value in replica.base.values():
        value.mul_(0.7)
    replica.adopt()
    masters = [state["master"].to_local().bfloat16() for state in optimizer.state.values()]
    landed = [param.to_local() for param in net.parameters()]  # type: ignore[operator]
    return [torch.equal(*both) for both in zip(masters, landed, strict=True)]


def test_pieces_of_masters_follow_what_lands(pair: Processes) -> None:
    assert all(len(equal) == 8 and all(equal) for equal in pair.run(land_on_masters))


def take_over_moments() -> list[bool]:
    net = cut(network(), "fsdp")
    optimizer = torch.optim.AdamW(net.parameters())
    replica = Replica({"net": net}, {"net": optimizer}, group=open_group())
    net(torch.ones(2, WIDTH)).square().mean().backward()
    optimizer.step()
    theirs = {name: 3 * whole(value) for name, value in replica.inner.state().items()}
    replica.load_optimizers(theirs, is_whole=True)
    return [torch.equal(whole(v), theirs[name]) for name, v in replica.inner.state().items()]


def test_pieces_of_moments_are_of_the_whole_ones_that_the_coordinator_has(pair: Processes) -> None:
    assert all(len(equal) == 24 and all(equal) for equal in pair.run(take_over_moments))


# What the coordinator asks -----------------------------------------------------------------------


def measured() -> tuple[Ended, list[float]]:
    """A script whose evaluation and samples need every process."""
    seen: list[float] = []
    nets: list[nn.Module] = []

    def evaluate(seed: int) -> dict[str, float]:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        seen.append(float(nets[0](x).square().mean()))
        return {"fd": seen[-1], "fd_floor": 0.0}

    def sample(num: int, seed: int) -> torch.Tensor:
        return nets[0](torch.zeros(num, 16)).view(num, 1, 4, 4)

    return take_steps("fsdp", evaluate=evaluate, sample=sample, keep=nets.append), seen


def test_all_processes_measure_and_go_on_as_if_they_had_not(
    pair: Processes, tmp_path: Path
) -> None:
    words = "strategy=diloco h=2"
    plain = together(pair, tmp_path / "a", words, partial(take_steps, "fsdp"))
    ran = together(pair, tmp_path / "b", f"{words} eval.every=2", measured)
    figures = [one.ended[1] for one in ran]
    assert len(figures[0]) >= 3 and figures[0] == figures[1]
    rows = [row["fd"] for row in ran[0].records if row["kind"] == "quality"]
    assert rows == figures[0]
    assert ran[0].ended[0].sha256 == plain[0].ended.sha256


def forgotten_at(call: str) -> Any:
    """The coordinator was started again, as rank 0 hears when it calls for the second time."""
    target = LoopbackLink if call == "report" else CoordinatorStub
    real, times = getattr(target, call), itertools.count(1)

    def told(self: Any, *args: Any) -> Any:
        if next(times) == 2:
            raise NotJoined("site 's1' has not joined this run; join first")
        return real(self, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(target, call, told)
        return take_steps("fsdp", evaluate=lambda seed: {"fd": 1.0})


@pytest.mark.parametrize(
    ("words", "call"),
    [
        ("diloco h=2", "report"),
        ("diloco h=2", "upload"),
        ("streaming_diloco h=4 stream.tau=1", "fetch_update"),
    ],
)
def test_processes_join_a_coordinator_that_was_started_again_together(
    words: str, call: str, pair: Processes, tmp_path: Path
) -> None:
    words = f"strategy={words} eval.every=4 steps=16"
    plain = together(pair, tmp_path / "a", words, partial(take_steps, "fsdp"))
    ran = together(pair, tmp_path / "b", words, partial(forgotten_at, call))
    events = [row["event"] for row in ran[0].records if row["kind"] == "event"]
    assert events.count("rejoin") == 1
    if "streaming" not in words:
        assert ran[0].ended.sha256 == plain[0].ended.sha256


def test_a_stop_ends_all_processes(pair: Processes, tmp_path: Path) -> None:
    stopped = partial(take_steps, stop_at=3)
    outcomes = pair.run(at_site, asked("steps=400"), tmp_path, stopped)
    assert [outcome.error for outcome in outcomes] == ["RunStopped"] * 2
    assert all("enough" in outcome.text for outcome in outcomes)


# Checkpoints -------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_processes_is_refused_by_another_number(
    pair: Processes, tmp_path: Path
) -> None:
    together(pair, tmp_path, "strategy=diloco", partial(take_steps, "fsdp"))
    with pytest.raises(UserError, match=r"of 2 processes, this site has 1; start as many"):
        apart(tmp_path, "strategy=diloco")


def wide(way: str) -> Ended:
    return take_steps(way, runs=cut(network(depth=DEPTH, width=WIDE), way))


@pytest.mark.parametrize(("way", "least", "most"), [("ddp", 0.0, 0.05), ("fsdp", 0.9, 1.1)])
def test_what_processes_have_alike_is_written_once(
    way: str, least: float, most: float, pair: Processes, tmp_path: Path
) -> None:
    together(pair, tmp_path, "strategy=diloco", partial(wide, way))
    folder = tmp_path / "s1"
    first, second = (
        sum(path.stat().st_size for path in folder.glob(f"*-00000002{ending}"))
        for ending in (".safetensors", ".rank1.safetensors")
    )
    trained = num_bytes(network(depth=DEPTH, width=WIDE).parameters())
    assert first > 1.5 * trained, "weights, moments and global weights, if only the half of each"
    assert least * first < second < most * first


# torchrun -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("way", ["fsdp", "ddp"])
def test_a_rank_that_is_killed_or_fails_ends_the_others_and_the_next_start_ends_on_the_same_bits(
    way: str, pair: Processes, identities: Path, tmp_path: Path
) -> None:
    """By torchrun, as a site's service starts them, and over a data plane under mutual TLS."""
    config = asked("h=2", "round.patience_s=150")
    undisturbed, _ = pair.run(at_site, config, tmp_path / "pair", partial(take_steps, way))
    served = Served(config, tmp_path / "run", identities)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT)
    with served.serving():
        assert served.start(*torchrun, "rank_0_dies", way).wait(120) != 0
        assert read_outcome(served.assignment)[0] is None, "the other one knows no more than gloo"
        if way == "fsdp":
            assert served.start(*torchrun, "rank_1_fails").wait(120) != 0
            told = read_outcome(served.assignment)[0]
            assert told is not None
            assert (told.error, told.text[:13]) == ("ValueError", "its own fault")
        assert served.start(*torchrun, "", way).wait(120) == 0, served.stderr.read_text()
    outcome, has_joined = read_outcome(served.assignment)
    assert has_joined and outcome is not None and not outcome.error
    assert served.run.site_sha256() == {"s1": served.sha256}
    assert undisturbed.sha256 == {served.sha256}


def test_all_processes_go_on_with_the_moments_that_the_coordinator_has(
    identities: Path, tmp_path: Path
) -> None:
    """Their own checkpoint is of an earlier version."""
    config = asked("strategy=sync", "steps=12", "checkpoint.every=4", "round.patience_s=150")
    served = Served(config, tmp_path / "run", identities)
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", SCRIPT)
    with served.serving():
        assert served.start(*torchrun, "rank_0_dies").wait(120) != 0
        assert served.start(*torchrun).wait(120) == 0, served.stderr.read_text()
    assert served.run.site_sha256() == {"s1": served.sha256}


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can make a namespace of process ids")
def test_a_site_of_two_machines_trains_as_one_of_two_processes(
    pair: Processes, identities: Path, tmp_path: Path
) -> None:
    """On the second machine the service's process is not to be seen."""
    config = asked("h=2", "round.patience_s=150")
    alike, _ = pair.run(at_site, config, tmp_path / "pair", partial(take_steps, "fsdp"))
    served = Served(config, tmp_path / "run", identities)
    elsewhere = ("unshare", "--pid", "--fork", "--mount-proc", "--kill-child", sys.executable)

    def node(rank: int) -> tuple[object, ...]:
        words = ("--nnodes", "2", "--node-rank", rank, "--nproc-per-node", "1")
        meeting = ("--master-addr", "127.0.0.1", "--master-port", port)
        return ("-m", "torch.distributed.run", *words, *meeting, SCRIPT, "two_machines")

    port = free_port()
    with served.serving():
        nodes = [served.start(*node(0)), served.also(*elsewhere, *node(1))]
        assert [each.wait(120) for each in nodes] == [0, 0], served.stderr.read_text()
    assert alike.sha256 == {served.sha256}


# Recipes ------------------------------------------------------------------------------------------

FLOW = "workload=flow data.name=ring8 model.width=16 model.depth=2 data.batch=8"
GAN = "workload=gan data.name=ring8 model.width=4 data.batch=8"
CASES = [
    (f"{FLOW} site.precision=bf16-mixed", ("weights",)),
    (f"{GAN} inner.discriminator.clip_norm=0.05", ("gradients", "weights")),
    (f"{GAN} site.accumulate=2 site.precision=16-mixed strategy=sync", ("gradients",)),
]


def recipe_of(words: str) -> Config:
    usual = ["sites=1", "steps=4", "eval.every=0", "device=cpu", "checkpoint.every=1"]
    takes_h = [] if "sync" in words else ["h=2"]
    return load_run(None, [*usual, *takes_h, "site.processes=2", *words.split()])


def follow_recipe() -> None:
    member = given_membership()
    assert member is not None
    take_part(member, open_group())


def both(pair: Processes, words: str, folder: Path) -> State:
    first, _ = together(pair, folder, recipe_of(words), follow_recipe)
    assert len(first.sha256) == 1
    return first.state


@pytest.mark.parametrize(("words", "partitions"), CASES)
def test_a_recipe_cut_any_way_trains_as_it_does_whole(
    words: str, partitions: tuple[str, ...], pair: Processes, tmp_path: Path
) -> None:
    whole = both(pair, words, tmp_path / "none")
    for partition in partitions:
        shared = both(pair, f"{words} site.partition={partition}", tmp_path / partition)
        assert distance(whole, shared) < (1e-2 if "precision" in words else 1e-5)


# What each process holds under FSDP2 --------------------------------------------------------------

DEPTH, WIDE = 8, 192
WORDS = "strategy=streaming_diloco h=4 stream.fragments=4 stream.tau=0"


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages under this process's pieces, each once."""
    storages = [local(t.detach()).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Watch(TorchDispatchMode):
    """The most bytes that tensors have at once, besides those that are known."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {local(t.detach()).untyped_storage().data_ptr() for t in known}
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, out)):
            if type(value) in (Tensor, nn.Parameter):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        alive = (torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in self._seen.values())
        self.most = max(self.most, sum(s.nbytes() for s in alive if s is not None))
        return out


def held(way: str) -> tuple[int, int, int]:
    """Bytes of one process: global weights; weights, gradients and moments; the most that passes.

    The last is what a round takes beside what stays, of three rounds the least: gloo's threads let
    go of what FSDP2 gathered when they come to it.
    """
    net = cut(network(depth=DEPTH, width=WIDE), way)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    watches: list[Watch] = []
    trained = 0
    with fedwan.join(networks={"net": net}, optimizers={"net": optimizer}) as site:
        assert isinstance(site, Site)
        base = list(site.replica.base.values())
        for step in site:
            if step % 4 == 0 and watches:
                watches[-1].__exit__(None, None, None)
            if step % 4 == 0 and step >= 4:  # after a round, with all there is
                own = [*net.parameters(), *tree_leaves(dict(optimizer.state))]
                own += [p.grad for p in net.parameters()]
                own = [t for t in own if isinstance(t, Tensor) and t.dim()]
                trained = num_bytes(own)
                watches.append(Watch([*base, *own]))
                watches[-1].__enter__()
            net(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    watches[-1].__exit__(None, None, None)
    return num_bytes(base), trained, min(watch.most for watch in watches)


@pytest.mark.parametrize("way", ["fsdp", "gradients"])
def test_a_process_holds_its_half_of_everything_and_no_more_than_a_fragment_passes(
    way: str, pair: Processes, tmp_path: Path
) -> None:
    net = network(depth=DEPTH, width=WIDE)
    whole = num_bytes(net.parameters())
    layer = max(num_bytes(m.parameters()) for m in net if isinstance(m, nn.Linear))
    fragment = whole // 4 + layer
    ran = together(pair, tmp_path, f"{WORDS} steps=16", partial(held, way))
    # Of layers, FSDP2 gathers one while it computes another; `gradients` leaves them gathered.
    most = fragment + (2 * layer if way == "fsdp" else whole)
    for base, trained, passing in (one.ended for one in ran):
        assert base <= whole / 2 and trained <= 4 * whole / 2 and passing <= most


# What lies or lasts otherwise than in most scripts ----------------------------------------------


class Halves(nn.Module):
    """Of two layers, the second is used in every other step."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor, takes_both: bool) -> Tensor:
        h = self.first(x)
        return self.second(h) if takes_both else h


def use_half(way: str = "plain") -> str:
    """The norm's gradients are sums that are still to be taken, under tensor parallel."""
    net = nn.ModuleDict({"halves": Halves(), "norm": nn.LayerNorm(WIDTH)})
    if way == "fsdp":
        for module in (net["halves"].first, net["halves"].second, net["halves"], net["norm"]):
            fully_shard(module)
    if way == "sequence":
        mesh = init_device_mesh("cpu", (2,))
        parallelize_module(net, mesh, {"norm": SequenceParallel()})
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with fedwan.join(networks={"net": net}, optimizers={"net": optimizer}) as site:
        assert isinstance(site, Site)
        for step in site:
            optimizer.zero_grad()
            x = net["halves"](torch.ones(1, 2, WIDTH), step % 2 == 0)
            out = net["norm"](x)
            out = out.full_tensor() if hasattr(out, "full_tensor") else out
            (out * torch.arange(WIDTH)).square().mean().backward()
            site.reduce()
            optimizer.step()
    return site.global_sha256


@pytest.mark.parametrize("way", ["plain", "fsdp", "sequence"])
def test_a_mean_gradient_takes_the_place_of_whatever_lay_there(
    way: str, pair: Processes, tmp_path: Path
) -> None:
    words = "strategy=sync inner.net.name=sgd inner.net.lr=0.1"
    words += " inner.net.beta1=0 inner.net.weight_decay=0"
    first, second = together(pair, tmp_path, words, partial(use_half, way))
    assert first.sha256 == {first.ended} == {second.ended}


def upload_slowly() -> Ended:
    upload = LoopbackLink.upload

    def slow(self: Any, header: Any, payload: Any) -> Any:
        time.sleep(2.0 * (header.kind == header.CONTRIBUTION))
        return upload(self, header, payload)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(group, "TIMEOUT", timedelta(seconds=1))
        patch.setattr(group, "WAKE_S", 0.2)
        patch.setattr(LoopbackLink, "upload", slow)
        return take_steps("ddp")


def test_an_upload_may_take_longer_than_a_collective(pair: Processes, tmp_path: Path) -> None:
    first, second = together(pair, tmp_path, "strategy=diloco steps=4", upload_slowly)
    assert first.sha256 == {second.ended.sha256}


def spread(dtype: torch.dtype) -> list[int]:
    value = torch.arange(3, dtype=dtype) if dist.get_rank() == 0 else None
    told: list[int] = open_group().spread(value, (3,), dtype).tolist()
    return told


def test_tensors_of_any_dtype_that_travels_reach_all_processes(pair: Processes) -> None:
    assert pair.run(spread, torch.int16) == [[0, 1, 2]] * 2  # which gloo does not know


@pytest.mark.parametrize("words", ["strategy=diloco", "strategy=streaming_diloco stream.tau=2"])
def test_processes_begin_anew_together_after_a_contribution_was_refused(
    words: str, pair: Processes, tmp_path: Path
) -> None:
    spoilt = partial(overflow_once, 8)
    first, second = together(pair, tmp_path, f"steps=16 {words}", spoilt, timeout_s=40)
    assert first.sha256 == {second.ended.sha256}


def refresh_cut(form: Callable[[nn.Module], nn.Module]) -> list[bool]:
    torch.manual_seed(0)
    whole = form(nn.Linear(6, 4))
    pieces = copy.deepcopy(whole)
    fully_shard(pieces)
    for each in (whole, pieces):
        (refresh,) = spectral_norms({"d": each})
        refresh()
    return [torch.equal(*both) for both in zip(whole.buffers(), pieces.buffers(), strict=True)]


@pytest.mark.parametrize("form", [spectral_norm, torch.nn.utils.spectral_norm])
def test_singular_vectors_of_a_weight_in_pieces_are_those_of_the_whole(
    form: Callable[[nn.Module], nn.Module], pair: Processes
) -> None:
    assert pair.run(refresh_cut, form) == [[True, True]] * 2


def join_with(what: str) -> None:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    net: nn.Module = nn.Linear(2, 2)
    if what == "FullyShardedDataParallel":
        net = FullyShardedDataParallel(net, device_id=torch.device("cpu"))
        optimizer: torch.optim.Optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    else:
        optimizer = ZeroRedundancyOptimizer(net.parameters(), torch.optim.SGD, lr=0.1)
    fedwan.join(networks={"net": net}, optimizers={"net": optimizer}, steps=1)
    NamedOptimizers.of({"net": net}, {"net": optimizer})


@pytest.mark.parametrize("what", ["FullyShardedDataParallel", "ZeroRedundancyOptimizer"])
def test_what_hides_its_parameters_or_moments_is_refused_by_name(
    what: str, pair: Processes
) -> None:
    for failure in pair.run(join_with, what):
        assert isinstance(failure, Failure), failure
        assert what in failure.text and "fully_shard" in failure.text
