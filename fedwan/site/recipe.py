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

from fedwan.app import load_workload
from fedwan.config import site_names
from fedwan.data import (
    InMemory,
    Shard,
    data_at_site,
    dataset_of,
    first_leaf,
    num_samples_in,
    open_shard,
)
from fedwan.errors import FedwanError, UserError
from fedwan.initial import load_initial
from fedwan.rng import NamedGenerators, derive_seed, seed_torch
from fedwan.site.assignment import Outcome
from fedwan.site.group import Group, open_group
from fedwan.site.joining import Place, given_place, open_site
from fedwan.site.site import Script
from fedwan.site.vitals import Vitals
from fedwan.workloads.base import (
    Following,
    Keeping,
    NetworkKind,
    Workload,
    discloses_inputs,
)
from fedwan.workloads.schedule import set_rates
from fedwan.workloads.settings import networks_of

__all__ = ["take_part", "train"]


def take_part(place: Place, group: Group) -> None:
    """Train the recipe that a run's configuration names."""
    member = place.member
    config = member.config
    names = site_names(config)
    recipe = load_workload(config.workload)
    if hasattr(recipe, "dataset"):
        shard = dataset_of(recipe, config, member.name)
    else:
        data = data_at_site(config.data, member.name, place.data_path)
        shard = open_shard(data, names.index(member.name), len(names), config.seed)
    workload = recipe.build(config, member.device)
    load_initial(workload.networks, config.init, config.excluded)
    train(place, group, workload, shard, networks_of(recipe, config))


def train(
    place: Place,
    group: Group,
    workload: Workload,
    shard: Shard,
    kinds: Mapping[str, NetworkKind],
) -> str:
    """Take a workload's steps on a shard to the end of the run."""
    member = place.member
    config, name = member.config, member.name
    rank = group.rank if config.site.partition != "tensor_parallel" else 0
    seed_torch(derive_seed(config.seed, name, *([rank] if rank else []), "torch"))
    rng = NamedGenerators(config.seed, f"{name}/{rank}" if rank else name)
    order = (rng if not rank else NamedGenerators(config.seed, name))["data"]
    loader = shard.loader(config.data.batch, order, member.device)
    may_show = place.show_samples or shard.public or not discloses_inputs(workload)

    real = shard.held_out
    if config.eval.num and real is not None:
        num = min(config.eval.num, num_samples_in(real))
        real = InMemory(real).take(torch.arange(num))

    def evaluate(seed: int) -> Mapping[str, Any]:
        figures = dict(workload.evaluate(real, seed))
        return figures | ({"real": first_leaf(real)} if shard.public else {})

    script = Script(
        networks=workload.networks,
        optimizers=workload.optimizers,
        kinds=kinds,
        state={"rng": rng, "data": loader, "kept": _Kept(workload)},
        evaluate=None if real is None else evaluate,
        sample=workload.sample if may_show else None,
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
                batch = next(loader)
                site.log(**workload.step(batch, rng, lambda _: site.reduce()))
                with site.meter.waiting():
                    site.meter.set_figures(vitals.after_step(batch))
        return site.global_sha256
    finally:
        loader.close()


class _Kept:
    """A workload's own tensors, for a checkpoint."""

    def __init__(self, workload: Workload) -> None:
        self._kept = workload.kept if isinstance(workload, Keeping) else {}

    def state_dict(self) -> dict[str, Tensor]:
        return dict(self._kept)

    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        for name in self._kept.keys() & state.keys():
            self._kept[name].copy_(state[name])


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
