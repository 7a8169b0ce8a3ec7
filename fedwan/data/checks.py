"""Settings of data that cannot work."""

from __future__ import annotations

from pathlib import Path

from fedwan.config import DataConfig
from fedwan.data.file_source import FILE_NAMES, PAIRS, SITE, TARS
from fedwan.data.sources import source_of
from fedwan.data.splits import parse_split
from fedwan.errors import ConfigError
from fedwan.names import nearest

__all__ = ["check_data"]

_LABELS = ("class", "site")
"""Forms of `data.labels`."""
_LEAST_PAIR_SIZE = 32
_OF_FILES = ("path", "size", "classes", "flip", "workers")


def check_data(config: DataConfig, num_sites: int) -> None:
    """Refuse, without reading any data, settings that cannot work.

    Raises:
        ConfigError: unknown name or split, a setting of files unasked or missing, negative batch,
            more sites than labels, or a split that one site alone makes meaningless.
    """
    source = source_of(config)
    split = parse_split(config.split)
    if config.name in FILE_NAMES:
        _check_files(config, split.kind == "own")
    else:
        _check_small(config, split.kind == "own")
    if config.batch < 0:
        raise ConfigError(
            f"data.batch is {config.batch}; take 1 or more, or 0 for the recipe's own"
        )
    if config.labels not in _LABELS:
        raise ConfigError(
            f"data.labels is {config.labels!r}{nearest(config.labels, _LABELS)}; valid: "
            f"{', '.join(_LABELS)}"
        )
    if config.labels == "site" and num_sites == 1:
        raise ConfigError(
            "data.labels is 'site', which tells the same of every sample at one site; leave it out"
        )
    if config.name == TARS and split.kind not in ("iid", "own"):
        raise ConfigError(
            f"data.split is {config.split!r}, by which a stream cannot be dealt; take iid, which "
            "deals tar files, or own"
        )
    if split.kind == "by_label" and num_sites > source.num_classes:
        raise ConfigError(
            f"data.split is 'by_label' and sites is {num_sites}, but {config.name} has only "
            f"{source.num_classes} labels; take at most {source.num_classes} sites, or dirichlet:A"
        )
    if split.kind not in ("iid", "own") and num_sites == 1:
        raise ConfigError(
            f"data.split is {config.split!r}, which has no effect with one site; take iid"
        )


def _check_small(config: DataConfig, is_own: bool) -> None:
    """Refuse what only files have."""
    for key in _OF_FILES:
        value = getattr(config, key)
        if value != getattr(DataConfig(), key):
            raise ConfigError(
                f"data.{key} = {value!r} has no effect on {config.name}; "
                f"leave it out, or set data.name={' or '.join(FILE_NAMES)}"
            )
    if is_own:
        raise ConfigError(
            f"data.split is 'own', but no site has {config.name} of its own; take iid, or set "
            f"data.name={' or '.join(FILE_NAMES)}"
        )


def _check_files(config: DataConfig, is_own: bool) -> None:
    """Refuse paths and sizes that cannot be."""
    if config.name in PAIRS and 0 < config.size < _LEAST_PAIR_SIZE:
        raise ConfigError(
            f"data.size = {config.size} is out of range for pairs; choose 0, or "
            f"{_LEAST_PAIR_SIZE} to 1024"
        )
    if not is_own and SITE in config.path:
        raise ConfigError(
            f"data.path is {config.path!r}, another folder at each site, of which nothing can be "
            f"dealt by data.split = {config.split!r}; set data.split=own"
        )
    if not Path(config.path).is_absolute() and not (is_own and not config.path):
        raise ConfigError(
            f"data.path is {config.path!r}; name the folder of images from the root, as in "
            "/data/facades: sites run in folders of their own"
        )
