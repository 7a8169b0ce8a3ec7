"""What is known of a data set from the configuration alone, before it is opened."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

from fedwan.config import SITE, Config, DataConfig
from fedwan.data import toys
from fedwan.data.emoji import GROUPS, load_emoji
from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.workloads.base import Batch

PAIRS = ("pairs", "pairs_b_to_a")
FILE_NAMES = ("folder", *PAIRS, "webdataset", "parquet", "hf")
"""The values of `data.name` that stand for files of the user's."""
_FORMS = "names like cat,dog, or how many there are, like 10, which numbers them 0 to 9"


@dataclass(frozen=True)
class Source:
    """A data set: one that comes with fedwan and is held in memory, or one of files."""

    name: str
    """As in `data.name`."""
    shape: tuple[int, ...]
    """Of one sample, without the batch."""
    num_classes: int
    """Labels are 0 … num_classes - 1."""
    mixture: Callable[[], toys.Mixture] | None = None
    """The distribution that the points come from, where it is known: modes are counted on it."""
    stack_of: str = ""
    """The data set whose images are the channels, and whose labels are the digits of a label."""
    inputs: int = 0
    """Channels at the front of a sample that are given; a workload learns to make the others."""

    @property
    def public(self) -> bool:
        """Whether samples may be shown, in pictures that leave the site."""
        return self.name not in FILE_NAMES

    def load(self) -> tuple[Batch, Batch]:
        """(Training, held-out) data of a set in memory, the same objects whoever asks."""
        return _load(self.name)


@cache
def _load(name: str) -> tuple[Batch, Batch]:
    if name == "ring8":
        return toys.draw_mixture(toys.ring8(), name, 1000, 50)
    if name == "grid25":
        return toys.draw_mixture(toys.grid25(), name, 400, 20)
    if name == "digits":
        return toys.load_digits()
    if name == "emoji":
        return load_emoji()
    return toys.load_photo_edges() if name == "photo_edges" else toys.stack_digits(*_load("digits"))


_SOURCES = {
    "digits": Source("digits", (1, 8, 8), 10),
    "ring8": Source("ring8", (2,), 8, toys.ring8),
    "grid25": Source("grid25", (2,), 25, toys.grid25),
    "stacked_digits": Source("stacked_digits", (3, 8, 8), 1000, stack_of="digits"),
    "emoji": Source("emoji", (3, 32, 32), len(GROUPS)),
    "photo_edges": Source("photo_edges", (4, 32, 32), 5, inputs=1),
}


def find_source(name: str) -> Source:
    """The data set called `name` that comes with fedwan; a `ConfigError` if there is none."""
    if name not in _SOURCES:
        valid = [*_SOURCES, *FILE_NAMES]
        raise ConfigError(
            f"data.name is {name!r}, which fedwan does not know{nearest(name, valid)}; "
            f"valid: {', '.join(valid)}"
        )
    return _SOURCES[name]


def source_of(config: DataConfig) -> Source:
    """What is known of the data set that a configuration names, without reading it."""
    if config.name not in FILE_NAMES:
        return find_source(config.name)
    size, num_classes = size_of(config), max(1, len(parse_classes(config.classes)))
    inputs = 3 if config.name in PAIRS else 0
    return Source(config.name, (3 + inputs, size, size), num_classes, inputs=inputs)


def size_of(config: DataConfig) -> int:
    """Pixels a side of pictures."""
    return config.size or (256 if config.name in PAIRS else 64)


def parse_classes(text: str) -> tuple[str, ...]:
    """Read `data.classes`, which names them since no site sees another's: names by number.

    >>> parse_classes("cat, dog"), parse_classes("3"), parse_classes("")
    (('cat', 'dog'), ('0', '1', '2'), ())
    """
    if not text:
        return ()
    if text.strip().isdecimal():
        names = tuple(str(number) for number in range(int(text)))
    else:
        names = tuple(name.strip() for name in text.split(","))
    if len(names) < 2:
        what = "a single class" if names and not names[0].isdecimal() else f"{len(names)} classes"
        raise ConfigError(f"data.classes is {text!r}, {what}; give two or more, {_FORMS}")
    if not all(names):
        raise ConfigError(f"data.classes is {text!r}, in which a name is empty; give {_FORMS}")
    (name, times), *_ = Counter(names).most_common(1)
    if times > 1:
        raise ConfigError(
            f"data.classes is {text!r} and holds {name!r} twice; name each class once"
        )
    return names


def num_labels(config: Config) -> int:
    """Labels that networks are told are 0 … num_labels - 1: those of classes, or of sites."""
    return config.sites if config.data.labels == "site" else source_of(config.data).num_classes


def pair_names() -> list[str]:
    """The data sets whose samples are pairs of an input and its target."""
    return [*(source.name for source in _SOURCES.values() if source.inputs), *PAIRS]


def data_at_site(config: DataConfig, site: str, own_path: str = "") -> DataConfig:
    """A run's data as one site has them: `own_path`, of the site's own file, goes first."""
    if config.name not in FILE_NAMES:
        return config
    return dataclasses.replace(config, path=own_path or config.path.replace(SITE, site))
