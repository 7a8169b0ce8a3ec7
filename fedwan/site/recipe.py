"""A recipe as a training script: `python -m fedwan.site.recipe`, as a site's service starts it.

It goes through the same calls as a script of one's own; torchrun starts it where `site.processes`
asks for several.
"""

from __future__ import annotations

import dataclasses
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from fedwan.app import load_workload
from fedwan.config import site_names
from fedwan.data import InMemory, Shard, data_at_site, dataset_of, first_leaf, open_shard
from fedwan.errors import UserError
from fedwan.metrics.network import load_network
from fedwan.models.experts import train_own
from fedwan.rng import NamedGenerators, derive_seed, seed_all
from fedwan.site.assignment import VARIABLE, meeting_folder
from fedwan.site.checkpoint import Stateful
from fedwan.site.group import Group, open_group
from fedwan.site.joining import end_in_a_line, given_membership
from fedwan.site.script import Script
from fedwan.site.site import Membership, Site
from fedwan.site.vitals import Vitals
from fedwan.weights import load_initial
from fedwan.workloads.base import NetworkKind
from fedwan.workloads.optim import set_rates
from fedwan.workloads.privacy import Privacy
from fedwan.workloads.settings import networks_of

if TYPE_CHECKING:
    from fedwan.workloads.descent import Descent


def take_part(member: Membership, group: Group) -> None:
    """Train the recipe that a run's configuration names."""
    name = member.name
    data = data_at_site(member.config.data, name, member.data_path)
    config = dataclasses.replace(member.config, data=data)
    recipe, names = load_workload(config.workload), site_names(config)
    if hasattr(recipe, "dataset"):
        shard = dataset_of(recipe, config, name)
    else:
        captions = getattr(recipe, "CAPTIONS", False)
        # A sample that stood in for another would be in a batch twice.
        given = {"captions": captions, "exact": config.privacy.is_of("sample")}
        shard = open_shard(data, names.index(name), len(names), config.seed, **given)
    if config.eval.features:
        load_network(config.eval.features, torch.device(member.device))  # before any step
    workload = recipe.build(config, member.device)
    if prepare := getattr(workload, "prepare", None):
        shard = prepare(shard, member.home or member.folder)
    load_initial(workload.networks, config)
    train(member, group, workload, shard, networks_of(recipe, config))


def train(
    member: Membership,
    group: Group,
    workload: Descent,
    shard: Shard,
    kinds: Mapping[str, NetworkKind],
) -> str:
    """Take a workload's steps on a shard to the end of the run."""
    config, name, rank = member.config, member.name, group.rank
    is_private = config.privacy.is_of("sample")
    privacy = Privacy(config, shard.num_samples, member.folder) if is_private else None
    seed = config.seed if privacy is None else privacy.seed()
    seed_all(derive_seed(seed, name, *([rank] if rank else []), "torch"))
    rng = NamedGenerators(seed, f"{name}/{rank}" if rank else name)
    order = (rng if not rank else NamedGenerators(seed, name))["data"]
    places = None if privacy is None else privacy.places
    loader = shard.loader(config.data.batch, order, member.device, places, part=(group.size, rank))
    train_own(workload.networks.values(), site_names(config).index(name), shard.count)
    workload.privacy = privacy
    script = _script(member, workload, shard, kinds, {"rng": rng, "data": loader})
    site = Site(member, script, group)
    h = site.strategy.h
    figures = privacy or Vitals(workload, shard, h, config.data.batch, config.seed, name)
    try:
        with site:
            if site.strategy.is_mirrored:  # the steps since its checkpoint are part of the run
                loader.skip_to(site.step)
            for step in site:
                if privacy is not None and step % h == 0:
                    privacy.begin_round(step, h, site.replica.global_sha256(), loader.taken)
                set_rates(workload.optimizers, config.inner, step, config.steps)
                batch = next(loader)
                site.log(**workload.step(batch, rng, site.reduce))
                with site.meter.waiting():
                    site.meter.figures |= figures.after_step(batch, step + 1)
        return site.global_sha256
    finally:
        loader.close()


def _script(
    member: Membership,
    workload: Descent,
    shard: Shard,
    kinds: Mapping[str, NetworkKind],
    state: dict[str, Stateful],
) -> Script:
    """What a script of one's own would hand to `join`."""
    config = member.config
    real = _held_out(shard, config.eval.num or 0)

    def evaluate(seed: int) -> Mapping[str, Any]:
        # What the site trained by; common data are of all sites.
        told = shard.tell(real) if config.data.split == "own" else real
        figures = dict(workload.evaluate(told, seed))
        return figures | ({"real": first_leaf(real)} if shard.public else {})

    # Of samples that other sites do not know, nothing leaves that was not made private.
    is_secret = config.privacy.is_of("sample") and config.data.split == "own"
    is_of_inputs = getattr(workload, "samples_from_inputs", False)
    may_show = member.show_samples or shard.public or not is_of_inputs
    if scaler := getattr(workload, "scaler", None):
        state["scaler"] = scaler
    return Script(
        networks=workload.networks,
        optimizers=workload.optimizers,
        kinds=kinds,
        state=state,
        evaluate=None if real is None or is_secret else evaluate,
        sample=workload.sample if may_show else None,
    )


def _held_out(shard: Shard, most: int) -> Any:
    """All that quality is measured on, or the first of it; None if there is nothing."""
    if not most or shard.held_out is None:
        return shard.held_out
    held_out = InMemory(shard.held_out)
    return held_out.take(torch.arange(min(most, len(held_out))))


def _meet(folder: Path) -> None:
    """Form the group of the processes that torchrun started, all on this machine."""
    if sys.platform == "linux":  # elsewhere loopback has other names
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        os.environ.setdefault("NCCL_SOCKET_IFNAME", "lo")
    rank, size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    path = str(folder / "processes")
    store = torch.distributed.FileStore(path, size)  # type: ignore[attr-defined]
    torch.distributed.init_process_group(store=store, rank=rank, world_size=size)


def main() -> None:
    """Take part in the run that the service has handed over."""
    end_in_a_line()
    assignment = os.environ.get(VARIABLE)
    if assignment is None:
        raise UserError("a site's service starts this; use `fedwan demo` or `fedwan run`")
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        _meet(meeting_folder(Path(assignment)))
    member = given_membership()
    assert member is not None
    if member.device.type == "cuda":
        torch.cuda.set_device(member.device)
    take_part(member, open_group(member.config.round.patience_s))
    if torch.distributed.is_available() and torch.distributed.is_initialized():
        torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main()
