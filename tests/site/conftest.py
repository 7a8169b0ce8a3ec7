"""Processes that tests of a site share."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.site.support import Processes


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Processes]:
    """Two, in one process group."""
    processes = Processes(2, tmp_path_factory.mktemp("pair"))
    yield processes
    processes.stop()
