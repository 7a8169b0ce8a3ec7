"""What holds for every test, and fixtures that tests of several parts share."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan.link import pki
from tests.workers import scope_of, turn

# A suite that was started in the background ignores Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors of tests are small, and several workers share the cores: more threads only wait.
torch.set_num_threads(1)

# Nobody cuts the power: that a file reaches the disk is not tested, and is a tenth of the waiting.
os.fsync = lambda file: None

# Imports leave a million objects that live to the end; to look for garbage among them, while they
# come and ever after, would take a third of the time of an import and some of every test's.
gc.disable()


def pytest_collection_finish() -> None:
    """From now on there may be garbage, but not among what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Some tests go to one worker, the others wherever there is time."""
    from xdist.scheduler import LoadScopeScheduling

    class Scheduling(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return scope_of(nodeid)

    return Scheduling(config, log)


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """A test that is marked so is alone on the machine, though the suite has several workers."""
    if not hasattr(item.config, "workerinput"):
        return (yield)
    factory: pytest.TempPathFactory = item.config._tmp_path_factory  # type: ignore[attr-defined]
    # The workers' folders have one parent, the run's. Waiting counts to no test's timeout.
    with turn(factory.getbasetemp().parent, alone=item.get_closest_marker("alone") is not None):
        return (yield)


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Identity folders that one authority issued: `coordinator`, `s1`, `s2`, `s3`; read only."""
    folder = tmp_path_factory.mktemp("pki")
    pki.init(folder, ["127.0.0.1"])
    for site in ("s1", "s2", "s3"):
        pki.issue(folder, site)
    return folder


@pytest.fixture(scope="session")
def foreign_identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the same names from another authority."""
    folder = tmp_path_factory.mktemp("foreign_pki")
    pki.init(folder, ["127.0.0.1"])
    pki.issue(folder, "s1")
    return folder
