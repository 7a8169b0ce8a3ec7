"""Fixtures that tests of several parts share."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from fedwan.link import pki

# A suite that was started in the background ignores Ctrl-C, and so would every process it starts.
signal.signal(signal.SIGINT, signal.default_int_handler)


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
