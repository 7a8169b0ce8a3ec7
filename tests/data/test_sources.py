"""The table of data sets."""

from __future__ import annotations

import pytest

from fedwan.data import find_source
from fedwan.errors import ConfigError


@pytest.mark.parametrize("name", ["digits", "ring8", "grid25", "stacked_digits"])
def test_what_is_announced_is_what_is_loaded(name: str) -> None:
    source = find_source(name)
    for part in source.load():
        assert part.x.shape[1:] == source.shape
        assert set(part.y.tolist()) == set(range(source.num_classes))


def test_data_are_read_once_per_process() -> None:
    assert find_source("ring8").load() is find_source("ring8").load()


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"'ring9'.*did you mean 'ring8'.*valid: digits, ring8"):
        find_source("ring9")
