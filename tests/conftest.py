"""What holds for every test, and fixtures that tests of several parts share."""

from __future__ import annotations

import gc
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from fedwan import simulation
from fedwan.coordinator import control, federation
from fedwan.link import client, pki, server
from fedwan.site import site, stub

# A suite that was started in the background ignores Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)

# Tensors of tests are small, and several workers share the cores: more threads only wait. So do
# those of the processes that tests start.
torch.set_num_threads(1)
os.environ["OMP_NUM_THREADS"] = "1"

# Nobody cuts the power: that a file reaches the disk is not tested, and is a tenth of the waiting.
os.fsync = lambda file: None

# Parties in one process need not wait for one another as long as those across an ocean.
QUICK: dict[tuple[Any, str], Any] = {
    (federation, "TICK_S"): 0.02,
    (simulation, "STANDSTILL_S"): 0.3,
    (site, "ASK_AGAIN_S"): (0.002, 0.05),
    (client, "HEARTBEAT_S"): 0.1,
    (server, "HEARTBEAT_S"): 0.2,
    (client, "CHUNK_BYTES"): 1 << 16,
    (client, "REDIAL_S"): 0.05,
    (stub, "STOP_SIGNAL_S"): 0.3,
    (control, "_TICK_S"): 0.01,
}
USUAL = {place: getattr(*place) for place in QUICK}
for place, value in QUICK.items():
    setattr(*place, value)

# Imports leave a million objects that live to the end; to look for garbage among them, while they
# come and ever after, would take a third of the time of an import and some of every test's.
gc.disable()


@pytest.fixture(autouse=True)
def _as_many_threads_as_before() -> Iterator[None]:
    """Who computes in more threads, as benchmarks do, leaves the tests that follow alone."""
    yield
    torch.set_num_threads(1)


@pytest.fixture
def usual_times(monkeypatch: pytest.MonkeyPatch) -> None:
    """Waits as they are outside of tests."""
    for (module, name), value in USUAL.items():
        monkeypatch.setattr(module, name, value)


@pytest.fixture
def no_recipes() -> Iterator[None]:
    """As in a process that has imported no app; what is imported meanwhile is forgotten."""

    def forget() -> dict[str, Any]:
        names = [n for n in sys.modules if n.partition(".")[0] in ("sites", "strategies")]
        return {name: sys.modules.pop(name) for name in names}

    others = forget()
    yield
    forget()
    sys.modules.update(others)


def pytest_collection_finish() -> None:
    """From now on there may be garbage, but not among what was imported."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session")
def identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Identity folders that one authority issued: `coordinator`, `s1`, `s2`, `s3`; read only."""
    folder = tmp_path_factory.mktemp("pki")
    pki.federation(folder, ["127.0.0.1"], ["s1", "s2", "s3"])
    return folder


@pytest.fixture
def authority(tmp_path: Path) -> pki.Authority:
    """Of the test's own, with folders as `identities` has them, of `coordinator`, `s1` and `s2`."""
    return pki.federation(tmp_path / "pki", ["127.0.0.1"], ["s1", "s2"])


@pytest.fixture(scope="session")
def foreign_identities(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of the same names from another authority."""
    folder = tmp_path_factory.mktemp("foreign_pki")
    pki.federation(folder, ["127.0.0.1"], ["s1"])
    return folder
