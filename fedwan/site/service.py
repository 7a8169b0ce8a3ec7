"""A site's part in a run, from a ticket to a farewell."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedwan.app import load_strategy, load_workload
from fedwan.config import Config, LinkConfig, from_json, site_names
from fedwan.data.shard import data_at_site, open_shard
from fedwan.data.splits import has_own_data
from fedwan.errors import ConfigError, IdentityError
from fedwan.link.base import Link
from fedwan.link.client import HEARTBEAT_S, GrpcLink
from fedwan.link.shaped import ShapedLink
from fedwan.link.ticket import Ticket
from fedwan.link.tls import Identity
from fedwan.memory import tune_allocator
from fedwan.site.follower import shared
from fedwan.site.loop import SiteLoop
from fedwan.site.plan import SitePlan
from fedwan.site.settings import SiteSettings

__all__ = ["run_site"]

log = logging.getLogger(__name__)


def run_site(ticket: Ticket, settings: SiteSettings) -> str:
    """Take part in the run that a ticket is for.

    Args:
        ticket: where the coordinator is, and the run's configuration.
        settings: this site's own.

    Returns:
        SHA-256 of the weights that this site ended with.

    Raises:
        FedwanError: see the tree.
    """
    tune_allocator()
    config = from_json(ticket.config)
    if config.threads:
        torch.set_num_threads(config.threads)
    names = site_names(config)
    if settings.name not in names:
        raise ConfigError(
            f"site {settings.name!r} is not in this run, which has {', '.join(names)}; "
            "add it to site_names"
        )
    identity = Identity.load(settings.identity)
    if identity.name != settings.name:
        raise IdentityError(
            f"the certificate in {settings.identity} is of {identity.name!r}, this site is "
            f"{settings.name!r}; use the identity folder that was issued for it"
        )
    device = choose_device(config.device)
    config.data = data_at_site(config.data, settings.name, settings.data_path)
    check_gpus(config.site.processes, device)
    shard = open_shard(config.data, names.index(settings.name), len(names), config.seed)
    workload = load_workload(config.workload).build(config, device)
    strategy = load_strategy(config.strategy).build(config)
    plan = _plan(config, ticket.run_id, settings)
    with (
        shared(workload, config, device) as workload,
        _open_link(config.link, ticket.address, identity, config.round.patience_s) as link,
    ):
        folder = settings.dir / "checkpoints" / ticket.run_id
        return SiteLoop(plan, workload, shard, strategy, link, Path(folder), device).run()


def choose_device(name: str) -> torch.device:
    """`auto` takes a GPU where there is one.

    Raises:
        ConfigError: `cuda` is asked for and there is none.
    """
    has_cuda = torch.cuda.is_available()
    if name == "cuda" and not has_cuda:
        raise ConfigError("device is 'cuda' but this site has no CUDA GPU; set device=auto or cpu")
    return torch.device("cuda" if has_cuda and name in ("auto", "cuda") else "cpu")


def check_gpus(processes: int, device: torch.device) -> None:
    """Refuse more processes than GPUs.

    Raises:
        ConfigError: there are.
    """
    num = torch.cuda.device_count()
    if device.type == "cuda" and processes > num:
        raise ConfigError(
            f"site.processes = {processes} is more than the {num} GPUs of this site; "
            f"set site.processes={num}"
        )


def _plan(config: Config, run_id: str, settings: SiteSettings) -> SitePlan:
    return SitePlan(
        run_id=run_id,
        site=settings.name,
        seed=config.seed,
        batch=config.data.batch,
        num_steps=config.steps,
        num_samples=64,
        checkpoint_every=config.checkpoint.every,
        poll_s=HEARTBEAT_S,
        has_own_data=has_own_data(config.data),
        show_samples=settings.show_samples,  # not the run's: it is not the coordinator's to say
        inner=config.inner,
        exclude=config.excluded,
    )


@contextmanager
def _open_link(
    config: LinkConfig, address: str, identity: Identity, patience_s: float
) -> Iterator[Link]:
    link: Link = GrpcLink(
        address,
        identity,
        channels=config.channels,
        patience_s=patience_s,
        congestion=config.congestion,
        pace_mbit=config.pace_mbit,
    )
    if config.rate_mbit or config.rtt_ms or config.loss:
        link = ShapedLink(link, config.rate_mbit, config.rtt_ms, config.loss)
    try:
        yield link
    finally:
        link.close()
