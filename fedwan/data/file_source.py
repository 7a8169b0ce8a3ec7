"""What is known of the user's files from the configuration alone."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from fedwan.config import DataConfig
from fedwan.data.classes import Classes, parse_classes
from fedwan.data.pictures import Transform

__all__ = ["FILE_NAMES", "PAIRS", "SITE", "TARS", "FileSource", "data_at_site", "file_source"]

TARS = "webdataset"
PAIRS = ("pairs", "pairs_b_to_a")
FILE_NAMES = ("folder", *PAIRS, TARS, "parquet", "hf")
"""The values of `data.name` that stand for files of the user's."""
SITE = "{site}"
"""What stands for the site's name in `data.path`."""


@dataclass(frozen=True)
class FileSource:
    """What is known of a data set of files before it is opened, and at machines that lack it."""

    name: str
    """As in `data.name`."""
    transform: Transform
    classes: Classes
    captions: bool = False
    """Whether samples have them, and are dicts."""
    public: bool = False
    """Nobody said that a user's images may be shown."""

    @property
    def shape(self) -> tuple[int, int, int]:
        """Of one sample."""
        return self.transform.shape

    @property
    def inputs(self) -> int:
        """Channels at the front of a sample that are given; a workload makes the others."""
        return 3 if self.transform.pairs else 0

    @property
    def num_classes(self) -> int:
        """Labels are 0 … num_classes - 1."""
        return self.classes.num


def file_source(config: DataConfig, captions: bool = False) -> FileSource:
    """What is known of the files that a configuration names, without looking at them.

    Raises:
        ConfigError: `data.classes` are none.
    """
    is_pairs = config.name in PAIRS
    size = config.size or (256 if is_pairs else 64)
    transform = Transform(size, is_pairs, config.name == "pairs_b_to_a")
    return FileSource(config.name, transform, parse_classes(config.classes), captions)


def data_at_site(config: DataConfig, site: str, own_path: str = "") -> DataConfig:
    """A run's data as one site has them.

    Args:
        config: of the run.
        site: the site's name, which takes the place of `{site}` in `data.path`.
        own_path: that the site's own file names in place of the run's; it does not matter to data
            that come with fedwan.
    """
    if config.name not in FILE_NAMES:
        return config
    return dataclasses.replace(config, path=own_path or config.path.replace(SITE, site))
