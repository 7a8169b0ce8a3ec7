"""The doctor's hits and false alarms: nine faults planted at one of four sites, and clean runs.

Whole runs in one process (`fedwan.simulate`) on digits, ten rounds of 20 steps, `diloco`; the
faults are planted from outside, in the data or around the workload, at a site that the seed picks.
What counts are the live findings of the coordinator, as they stand in `journal.jsonl`.
`--quick`: one seed, flow alone.

`named`: the right site, network and kind were told; `within_rounds`: in which round;
`false_alarms`: everything else that was told as wrong. Clean runs have the fault `none`.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import mse_loss, softplus

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.stopwatch import Ungenerative
from benchmarks.harness.table import Row
from fedwan.data import InMemory, Shard
from fedwan.rng import NamedGenerators, derive_seed
from fedwan.workloads.base import Batch, Reduce

NUM_TINY, NUM_LEARNT = 8, 48
"""Images that are left of a shard."""
NUM_COPIES = 10
"""Of each image that is left."""
ROUNDS_BEHIND = 3
EXTRA_STEPS = 4


Data = Callable[[Batch, torch.Generator, int], Batch]
"""(all images of a site, draws, seed) to what the site has instead."""


class Fault(NamedTuple):
    name: str
    kinds: tuple[str, ...]
    """Findings that name it."""
    networks: tuple[str, ...] = ()
    """The networks that it is in, one of which must be named; empty for a site as a whole."""
    workloads: tuple[str, ...] = ("flow", "gan")
    data: Data = lambda batch, draws, seed: batch
    workload: Callable[[Any, int], Any] = lambda workload, _: workload
    """(workload, H) to what the site trains instead."""


class Stepped(Ungenerative):
    """A workload with another step, whose quality is not measured, to save time."""

    def __init__(self, inner: Any, step: Callable[..., dict[str, Tensor]] | None = None) -> None:
        super().__init__(inner.networks, inner.optimizers)
        self.examine = inner.examine
        self.step = step or inner.step


# In the data ---------------------------------------------------------------------------------


def _noise(batch: Batch, draws: torch.Generator, seed: int) -> Batch:
    return batch._replace(x=torch.rand(batch.x.shape, generator=draws) * 2 - 1)


def _range(batch: Batch, draws: torch.Generator, seed: int) -> Batch:
    """Pixels of 0 to 255 or of 0 to 1, as loaders give them that nobody told of -1 to 1."""
    return batch._replace(x=(batch.x + 1) / 2 * (1.0 if seed % 2 else 255.0))


def _first(num: int) -> Data:
    return lambda batch, draws, seed: Batch(batch.x[:num], batch.y[:num])


def _copied(batch: Batch, draws: torch.Generator, seed: int) -> Batch:
    """As large as it was, in no order, but of a tenth of its images."""
    num = len(batch.x)
    chosen = torch.randperm(num, generator=draws) % max(1, num // NUM_COPIES)
    return Batch(batch.x[chosen], batch.y[chosen])


# Around the workload -------------------------------------------------------------------------


def _fast(workload: Any, h: int) -> Any:
    for optimizer in workload.optimizers.values():
        for group in optimizer.param_groups:
            group["lr"] *= 10
    return workload


def _ascending(workload: Any, h: int) -> Any:
    """A generator whose loss has the wrong sign."""

    def flip(optimizer: torch.optim.Optimizer, *_: object) -> None:
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad.neg_()

    workload.optimizers["generator"].register_step_pre_hook(flip)
    return workload


def _with_extra(
    inner: Any, network: str, loss: Callable[[Batch, NamedGenerators], Tensor]
) -> Stepped:
    """Takes further steps of one network, against another loss, after each step of all."""
    params = list(inner.networks[network].parameters())

    def step(batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        losses: dict[str, Tensor] = inner.step(batch, rng, reduce)
        for _ in range(EXTRA_STEPS):
            gradients = torch.autograd.grad(loss(batch, rng), params)
            for param, gradient in zip(params, gradients, strict=True):
                param.grad = gradient
            inner.optimizers[network].step()
        return losses

    return Stepped(inner, step)


def _fakes(workload: Any, batch: Batch, rng: NamedGenerators) -> Tensor:
    latents = torch.randn(len(batch.x), workload.model.latents, generator=rng["extra"])
    images: Tensor = workload.networks["generator"](latents, batch.y)
    return images


def _memorising(workload: Any, h: int) -> Any:
    """A discriminator of many steps and no penalty, on few images."""

    def loss(batch: Batch, rng: NamedGenerators) -> Tensor:
        fake = _fakes(workload, batch, rng).detach()
        discriminator = workload.networks["discriminator"]
        real_logits, fake_logits = discriminator(batch.x, batch.y), discriminator(fake, batch.y)
        return softplus(-real_logits).mean() + softplus(fake_logits).mean()

    workload.model = dataclasses.replace(workload.model, gamma=0.0)
    return _with_extra(workload, "discriminator", loss)


def _collapsing(workload: Any, h: int) -> Any:
    """A generator that is drawn to one image: the mean of what it makes."""

    def loss(batch: Batch, rng: NamedGenerators) -> Tensor:
        fake = _fakes(workload, batch, rng)
        return mse_loss(fake, fake.mean(0, keepdim=True).detach().expand_as(fake))

    return _with_extra(workload, "generator", loss)


def _stale(workload: Any, h: int) -> Any:
    """Begins every round with the weights of some rounds before."""
    past: deque[dict[str, dict[str, Tensor]]] = deque(maxlen=ROUNDS_BEHIND + 1)
    steps = itertools.count()

    def step(*args: Any) -> dict[str, Tensor]:
        if next(steps) % h == 0:
            present = {n: network.state_dict() for n, network in workload.networks.items()}
            past.append(copy.deepcopy(present))
            for name, network in workload.networks.items():
                network.load_state_dict(past[0][name])
        losses: dict[str, Tensor] = workload.step(*args)
        return losses

    return Stepped(workload, step)


GAN = ("gan",)
FAULTS = (
    Fault("noise", ("noise",), data=_noise),
    Fault("range", ("range",), data=_range),
    Fault("tiny_shard", ("small_shard",), data=_first(NUM_TINY)),
    Fault("copies", ("small_shard",), data=_copied),
    Fault("lr_x10", ("learning_rate",), ("velocity", "generator", "discriminator"), workload=_fast),
    Fault(
        *("memorising", ("memorising",), ("discriminator",), GAN),
        data=_first(NUM_LEARNT),
        workload=_memorising,
    ),
    Fault("diverging", ("diverging",), ("generator",), GAN, workload=_ascending),
    Fault("stale", ("stale",), workload=_stale),
    Fault("collapse", ("collapse",), ("generator",), GAN, workload=_collapsing),
)
"""The nine."""

# The table -------------------------------------------------------------------------------------

SITES = 4
H = 20
ROUNDS = 10
SEEDS = 5
NONE = Fault("none", ())
SPLITS = ("iid", "dirichlet:0.3", "by_label")
"""Of clean runs."""


class Case(NamedTuple):
    fault: Fault
    workload: str
    split: str = "iid"


CASES = (
    *(Case(fault, workload) for fault in FAULTS for workload in fault.workloads),
    *(Case(NONE, workload, split) for workload in NONE.workloads for split in SPLITS),
)


def measure_case(args: object, case: Case, seed: int, rounds: int = ROUNDS, h: int = H) -> Row:
    """Train with the fault planted; what was told of it, as a row."""
    words = [f"workload={case.workload}", f"data.split={case.split}", "data.name=digits"]
    words += ["strategy=diloco", f"sites={SITES}", f"h={h}", f"steps={h * rounds}", f"seed={seed}"]
    index = (seed + 1) % SITES

    def plant(site: int, workload: Any, shard: Shard) -> tuple[Any, Shard]:
        if site != index:
            return Stepped(workload), shard
        draws = torch.Generator().manual_seed(derive_seed(seed, case.fault.name))
        data = InMemory(case.fault.data(shard.train.batch, draws, seed))
        planted = Stepped(case.fault.workload(workload, h))
        return planted, dataclasses.replace(shard, train=data)

    run = run_simulated(words, plant)
    fault, site, told = case.fault, f"s{index + 1}", describe(*run)["findings"]
    hits = [
        row
        for row in told
        if row["finding"] in fault.kinds
        and row["site"] == site
        and (row["network"] in fault.networks if fault.networks else row["network"] is None)
    ]
    others = [
        " ".join(str(row[key] or "all") for key in ("site", "network", "finding"))
        + f" in round {row['version']}"
        for row in told
        if row not in hits
    ]
    return {
        "fault": fault.name,
        "workload": case.workload,
        "split": case.split,
        "seed": seed,
        "site": site if fault.kinds else "-",
        "network": ",".join(sorted(str(row["network"] or "all") for row in hits)) or "-",
        "named": bool(hits) if fault.kinds else None,
        "within_rounds": min((row["version"] for row in hits), default=None),
        "false_alarms": "; ".join(others) or "none",
    }


def cases(args: argparse.Namespace) -> Mapping[str, Case]:
    wanted = [case for case in CASES if not args.quick or case.workload == "flow"]
    return {f"{case.fault.name} {case.workload} {case.split}": case for case in wanted}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    named = [row["named"] for row in rows if row["named"] is not None]
    quiet = sum(row["false_alarms"] == "none" for row in rows)
    yield f"{sum(named)} of {len(named)} faults named, {quiet} of {len(rows)} runs quiet"
