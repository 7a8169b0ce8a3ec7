"""A recipe as a training script: `python -m fedwan.site.recipe`, as a site's service starts it.

It goes through the same calls as a script of one's own; torchrun starts it where `site.processes`
asks for several.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fedwan.app import load_workload, networks_of
from fedwan.config import site_names
from fedwan.data.shard import AnyShard, data_at_site, open_shard
from fedwan.errors import FedwanError, UserError
from fedwan.rng import NamedGenerators, derive_seed, seed_torch
from fedwan.site.assignment import Outcome
from fedwan.site.group import Group, open_group
from fedwan.site.joining import Place, given_place, open_site
from fedwan.site.recalibrate import recalibrate
from fedwan.site.site import Script
from fedwan.site.vitals import Vitals
from fedwan.workloads.base import (
    Batch,
    Following,
    Keeping,
    NetworkKind,
    Workload,
    discloses_inputs,
)
from fedwan.workloads.schedule import set_rates

__all__ = ["take_part", "train"]


def take_part(place: Place, group: Group) -> None:
    """Train the recipe that a run's configuration names.

    Raises:
        FedwanError: see the tree.
    """
    member = place.member
    config = member.config
    names = site_names(config)
    data = data_at_site(config.data, member.name, place.data_path)
    shard = open_shard(data, names.index(member.name), len(names), config.seed)
    recipe = load_workload(config.workload)
    workload = recipe.build(config, member.device)
    train(place, group, workload, shard, networks_of(recipe, config))


def train(
    place: Place,
    group: Group,
    workload: Workload,
    shard: AnyShard,
    kinds: Mapping[str, NetworkKind],
) -> str:
    """Take a workload's steps on a shard to the end of the run.

    Args:
        place: in the federation.
        group: the site's processes.
        workload: freshly built.
        shard: this site's data.
        kinds: by trained network.

    Returns:
        SHA-256 of the weights that this site ended with.
    """
    member = place.member
    config, name = member.config, member.name
    rank = group.rank if config.site.partition != "tensor_parallel" else 0
    seed_torch(derive_seed(config.seed, name, *([rank] if rank else []), "torch"))
    rng = NamedGenerators(config.seed, f"{name}/{rank}" if rank else name)
    order = (rng if not rank else NamedGenerators(config.seed, name))["data"]
    stream = shard.batches(config.data.batch, order, member.device)
    may_show = place.show_samples or shard.public or not discloses_inputs(workload)

    def evaluate(seed: int) -> Mapping[str, Any]:
        figures = dict(workload.evaluate(shard.held_out, seed))
        return figures | ({"real": shard.held_out.x} if shard.public else {})

    script = Script(
        networks=workload.networks,
        optimizers=workload.optimizers,
        kinds=kinds,
        state={"rng": rng, "data": stream, "kept": _Kept(workload)},
        evaluate=evaluate,
        sample=workload.sample if may_show else None,
        recalibrate=lambda: _recalibrate(place, workload, shard),
        on_close=Outcome.leave,
    )
    site = open_site(place, script, group)
    vitals = Vitals(workload, shard, site.strategy.h, config.seed, name)
    try:
        with site:
            for step in site:
                set_rates(workload.optimizers, config.inner, step, config.steps)
                if isinstance(workload, Following):
                    workload.begin(step)
                batch = stream.next_batch()
                site.log(**workload.step(batch, rng, lambda _: site.reduce()))
                with site.meter.waiting():
                    site.meter.set_figures(vitals.after_step(batch))
        return site.global_sha256
    finally:
        stream.close()


class _Kept:
    """A workload's own tensors, for a checkpoint."""

    def __init__(self, workload: Workload) -> None:
        self._kept = workload.kept if isinstance(workload, Keeping) else {}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name in self._kept.keys() & state.keys():
            self._kept[name].copy_(state[name])


def _recalibrate(place: Place, workload: Workload, shard: AnyShard) -> None:
    """Have running statistics fit the weights that the networks hold, if asked to."""
    config = place.member.config
    if not config.eval.recalibrate:
        return
    size = config.data.batch
    some = shard.tell(shard.some(config.eval.recalibrate * size))
    rng = NamedGenerators(derive_seed(config.seed, "recalibrate"), place.member.name)
    order = torch.randperm(len(some.y), generator=rng["data"])
    num = max(1, len(order) // size)  # none but whole ones
    parts = (order[index * size : (index + 1) * size] for index in range(num))
    batches = (Batch(*(values[part].to(place.member.device) for values in some)) for part in parts)
    recalibrate(workload, batches, rng)


def main() -> int:
    """Take part in the run that the service has handed over; the exit status."""
    try:
        if int(os.environ.get("WORLD_SIZE", "1")) > 1:
            torch.distributed.init_process_group()
        place = given_place()
        if place is None:
            raise UserError("a site's service starts this; use `fedwan demo` or `fedwan run`")
        if place.member.device.type == "cuda":
            torch.cuda.set_device(place.member.device)
        take_part(place, open_group())
    except FedwanError as error:
        Outcome.leave(error, 0)
        print(f"fedwan: {error}", file=sys.stderr)
        return error.exit_code
    except BaseException as error:
        Outcome.leave(error, 0)
        raise
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
