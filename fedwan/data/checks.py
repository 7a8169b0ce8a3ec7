"""Settings and files that cannot work, found before a run starts."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

from fedwan.config import SITE, Config, DataConfig, site_names
from fedwan.data.files import Files, open_files
from fedwan.data.sources import FILE_NAMES, PAIRS, data_at_site, find_source, source_of
from fedwan.data.splits import has_own_data, parse_split, split_indices
from fedwan.errors import ConfigError

__all__ = ["check_data", "check_files", "too_large"]

_log = logging.getLogger(__name__)

_LEAST_PAIR_SIZE = 32
_OF_FILES = ("path", "size", "classes", "flip", "workers")


def check_data(config: DataConfig, num_sites: int) -> None:
    """Refuse, with a `ConfigError` and without reading any data, settings that cannot work."""
    for fault in _faults(config, num_sites):
        raise ConfigError(fault)


def _faults(config: DataConfig, num_sites: int) -> Iterator[str]:
    source, kind = source_of(config), parse_split(config.split).kind
    if config.name in FILE_NAMES:
        yield from _of_path(config, is_own=kind == "own")
    else:
        for key in _OF_FILES:
            value = getattr(config, key)
            if value != getattr(DataConfig(), key):
                yield (
                    f"data.{key} = {value!r} has no effect on {config.name}; "
                    f"leave it out, or set data.name={' or '.join(FILE_NAMES)}"
                )
        if kind == "own":
            yield (
                f"data.split is 'own', but no site has {config.name} of its own; take iid, or set "
                f"data.name={' or '.join(FILE_NAMES)}"
            )
    if config.labels == "site" and num_sites == 1:
        yield (
            "data.labels is 'site', which tells the same of every sample at one site; leave it out"
        )
    if kind == "by_label" and num_sites > source.num_classes:
        yield (
            f"data.split is 'by_label' and sites is {num_sites}, but {config.name} has only "
            f"{source.num_classes} labels; take at most {source.num_classes} sites, or dirichlet:A"
        )
    if kind not in ("iid", "own") and num_sites == 1:
        yield f"data.split is {config.split!r}, which has no effect with one site; take iid"


def _of_path(config: DataConfig, is_own: bool) -> Iterator[str]:
    if config.name in PAIRS and 0 < config.size < _LEAST_PAIR_SIZE:
        yield (
            f"data.size = {config.size} is out of range for pairs; choose 0, or "
            f"{_LEAST_PAIR_SIZE} to 1024"
        )
    if not is_own and SITE in config.path:
        yield (
            f"data.path is {config.path!r}, another folder at each site, of which nothing can be "
            f"dealt by data.split = {config.split!r}; set data.split=own"
        )
    if not Path(config.path).is_absolute() and not (is_own and not config.path):
        yield (
            f"data.path is {config.path!r}; name the folder of images from the root, as in "
            "/data/facades: sites run in folders of their own"
        )


def check_files(config: Config, sample: int = 32) -> list[str]:
    """What is wrong with the data of a run whose sites are all on this machine, one line each.

    Of each folder `sample` pictures are read. Those that are not RGB are converted, which is
    logged.
    """
    names, data = site_names(config), config.data
    try:
        if faults := list(_faults(data, len(names))):
            return faults
        if data.name not in FILE_NAMES:
            y = find_source(data.name).load()[0].y
            parts = split_indices(y, data.split, len(names), config.seed)
            return too_large(data.batch, min(len(part) for part in parts))
    except ConfigError as error:
        return [str(error)]
    for index, name in enumerate(names):
        try:
            files = open_files(data_at_site(data, name))
            train = files.train(data.split, index, len(names), config.seed)
        except ConfigError as error:
            faults.append(str(error))
            continue
        faults += too_large(data.batch, len(train))
        if has_own_data(data) or not index:
            faults += _unreadable(files, sample)
    return list(dict.fromkeys(faults))


def _unreadable(files: Files, sample: int) -> Iterator[str]:
    """Faults of some pictures, evenly spaced."""
    modes: set[str] = set()
    for row in range(0, len(files.keys), -(-len(files.keys) // sample)):
        try:
            files.sample(row)
            modes.add(files.mode(row))
        except ConfigError as error:
            yield str(error)
    if others := ", ".join(sorted(modes - {"RGB"})):
        folder = files.folder
        _log.warning("data.path: %s holds pictures of mode %s, converted to RGB", folder, others)


def too_large(batch_size: int, num_samples: int) -> list[str]:
    """What is wrong with a batch for a site of so many samples, 0 where that is not known."""
    if not 0 < num_samples < batch_size:
        return []
    return [
        f"data.batch = {batch_size} is more than the {num_samples} samples that a site trains on; "
        f"set data.batch={num_samples} or less, or give each site more"
    ]
