"""What can be found wrong on this machine before anything starts, all of it at once."""

from __future__ import annotations

import os
from collections.abc import Iterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

from fedwan.app import has_own_data, load_workload, told
from fedwan.config import COMMAND, FILE_NAMES, SITE, Config, site_names
from fedwan.config_tree import value_at
from fedwan.data import check_files, dataset_of
from fedwan.errors import ConfigError
from fedwan.flower.processes import listen
from fedwan.metrics.network import find_network
from fedwan.names import named_function
from fedwan.uses import Faults
from fedwan.weights import shapes_of


def preflight(config: Config) -> list[str]:
    """Check what a resolved run needs of this machine, where its sites are as well; in seconds.

    Lines on what can run, but is hardly meant.
    """
    faults = Faults()
    for check in (_out, _device, _ports, _files, _data):
        faults.add(check(config))
    faults.tell()
    return [*_shared(config)]


def _shared(config: Config) -> Iterator[str]:
    data, num = config.data, config.num_sites
    if num < 2 or data.split != "own" or data.name not in FILE_NAMES or SITE in data.path:
        return
    if not has_own_data(config):
        yield (
            f"data.split = 'own', and data.path = {data.path!r} is one folder, so that all {num} "
            f"sites train on the same files; set data.path={data.path.rstrip('/')}/{SITE}, or "
            "data.split=iid"
        )


def _out(config: Config) -> Iterator[str]:
    folder = Path(config.out).absolute()
    while not folder.exists():
        folder = folder.parent
    if not folder.is_dir():
        yield f"out = {config.out!r}: {folder} is a file; choose another out="
    elif not os.access(folder, os.W_OK | os.X_OK):
        yield f"out = {config.out!r}: {folder} cannot be written to; choose another out="


def _device(config: Config) -> Iterator[str]:
    import torch

    num = torch.cuda.device_count()
    if config.device == "cuda" and not num:
        yield "device = 'cuda', but this machine has no GPU; set device=auto"
    if config.device != "cpu" and num and config.site.processes > num:
        yield (
            f"site.processes = {config.site.processes} is more than the {num} GPUs of this "
            f"machine; set site.processes={num}"
        )


def _ports(config: Config) -> Iterator[str]:
    for key in ("link.listen", "link.door"):
        try:
            listen(value_at(config, key), key).close()
        except ConfigError as error:
            yield str(error)


def _files(config: Config) -> list[str]:
    faults = Faults()
    if config.log.wandb != "disabled" and find_spec("wandb") is None:
        faults.add(["wandb is not installed here; pip install 'fedwan[wandb]'"])
    features = config.eval.features
    with faults.caught(), told(f"eval.features = {features!r} cannot be used"):
        if features:
            find_network(features)
        if named := named_function(features):
            getattr(import_module(named[0]), named[1])
    for network, path in config.init.items():
        with faults.caught():
            shapes_of(f"init.{network} = {path!r}", Path(path))
    return faults.lines


def _data(config: Config) -> list[str]:
    if config.workload == COMMAND:
        return []
    page, faults = load_workload(config.workload), Faults()
    if not hasattr(page, "dataset"):
        return check_files(config, captions=getattr(page, "CAPTIONS", False))
    # Of one site: who knows how long the user's own function takes.
    with faults.caught(), told(f"dataset() of workload {config.workload!r} failed"):
        dataset_of(page, config, site_names(config)[0])
    return faults.lines
