"""Data that cannot be used: all faults at once, in seconds, before a run starts on this machine."""

from __future__ import annotations

import logging

from fedwan.config import Config, DataConfig, site_names
from fedwan.data.checks import check_data
from fedwan.data.file_source import FILE_NAMES, data_at_site
from fedwan.data.files import Files, open_files
from fedwan.data.shard import too_large
from fedwan.data.sources import find_source
from fedwan.data.splits import has_own_data, split_indices
from fedwan.errors import ConfigError

__all__ = ["check_files"]

log = logging.getLogger(__name__)


def check_files(config: Config, sample: int = 32, *, captions: bool = False) -> list[str]:
    """What is wrong with the data of a run whose sites are all on this machine, one line each.

    Pictures that are not RGB are nothing wrong: they are converted, which is logged in one line.

    Args:
        config: of the run, with `data.batch` filled in.
        sample: pictures of each folder that are read, evenly spaced.
        captions: whether the recipe takes them.
    """
    names, data = site_names(config), config.data
    faults: list[str] = []
    try:
        check_data(data, len(names))
        if data.name not in FILE_NAMES:
            y = find_source(data.name).load()[0].y
            parts = split_indices(y, data.split, len(names), config.seed)
            return too_large(data.batch, min(len(part) for part in parts))
    except ConfigError as error:
        return [str(error)]
    is_own = has_own_data(data)
    for index, name in enumerate(names):
        here = data_at_site(data, name)
        try:
            files = open_files(here, captions)
            train = files.train(data.split, index, len(names), config.seed)
        except ConfigError as error:
            faults.append(str(error))
            continue
        faults += too_large(data.batch, train.num_samples)
        if is_own or not index:
            faults += _unreadable(files, here, sample)
    return list(dict.fromkeys(faults))


def _unreadable(files: Files, data: DataConfig, sample: int) -> list[str]:
    """Faults of some pictures of a table, evenly spaced; of a stream the first."""
    faults: list[str] = []
    modes: set[str] = set()
    for row in files.some_rows(sample):
        try:
            row.sample(files.source.transform)
            modes.add(row.mode())
        except ConfigError as error:
            faults.append(str(error))
    if modes - {"RGB"}:
        others = ", ".join(sorted(modes - {"RGB"}))
        log.warning("data.path: %s holds pictures of mode %s, converted to RGB", data.path, others)
    return faults
