"""What can be found wrong on this machine before anything starts, all of it at once."""

from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

from fedwan.config import Config, site_names
from fedwan.data import FILE_NAMES, data_at_site, find_source, split_indices
from fedwan.errors import ConfigError
from fedwan.uses import Faults

__all__ = ["preflight"]

_EXTRAS = {"wandb": "wandb", "lightning": "pytorch_lightning", "hf": "datasets"}
"""Module by the extra that brings it."""


def preflight(config: Config) -> list[str]:
    """Check what a run needs of this machine; a few seconds at most.

    Args:
        config: resolved, of a run whose sites are here as well.

    Returns:
        A line for each fault: what is wrong, the value, the mend. None if all is well.
    """
    faults = Faults()
    for check in (_out, _device, _ports, _extras, _threads):
        faults.add(check(config))
    with faults.caught():
        faults.add(_data(config))
    return faults.lines


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
    link = config.link
    for key, port in (("link.port", link.port), ("link.door_port", link.door_port)):
        with socket.socket() as listener:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                listener.bind((link.host, port))
            except OSError as error:
                yield f"{key} = {port} cannot be listened on ({error.strerror}); set a free {key}"


def _extras(config: Config) -> Iterator[str]:
    needed = {
        "wandb": config.log.wandb != "disabled",
        "lightning": config.workload == "lightning",
        "hf": config.data.name == "hf",
    }
    for extra, module in _EXTRAS.items():
        if needed[extra] and find_spec(module) is None:
            yield f"{module} is not installed here; pip install 'fedwan[{extra}]'"


def _threads(config: Config) -> Iterator[str]:
    cores = os.cpu_count() or 1
    if config.threads > cores:
        yield f"threads = {config.threads} is more than this machine's {cores}; leave it out"


def _data(config: Config) -> Iterator[str]:
    """Paths, and a batch larger than what the smallest site has."""
    data = config.data
    if data.name in FILE_NAMES:
        for path in sorted({data_at_site(data, site).path for site in site_names(config)}):
            if not Path(path).exists():
                yield f"data.path = {path!r} does not exist; name the folder of the data"
        # fedwan.data.check_files(config, sample=32) belongs here: pictures that cannot be read.
        return
    train, _ = find_source(data.name).load()
    shards = split_indices(train.y, data.split, config.sites, config.seed)
    smallest = min(map(len, shards))
    if data.batch > smallest:
        raise ConfigError(
            f"data.batch = {data.batch} is more than the {smallest} samples of the smallest site; "
            f"set data.batch={smallest} or less"
        )
