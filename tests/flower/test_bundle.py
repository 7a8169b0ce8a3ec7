from __future__ import annotations

import io
import zipfile
from pathlib import Path

import pytest

from fedwan.app import installed_app
from fedwan.errors import ConfigError
from fedwan.flower.bundle import build_fab

# Flower's own, not ours to mend.
pytestmark = pytest.mark.filterwarnings("ignore:GitWildMatchPattern:DeprecationWarning")


def test_a_bundle_holds_the_two_entry_points_and_nothing_else(tmp_path: Path) -> None:
    fab = build_fab(installed_app())
    assert set(zipfile.ZipFile(io.BytesIO(fab)).namelist()) == {
        ".info/CONTENT",
        "pyproject.toml",
        "strategies/__init__.py",
        "strategies/server_app.py",
        "sites/__init__.py",
        "sites/client_app.py",
    }
    with pytest.raises(ConfigError, match="is no fedwan app") as error:
        build_fab(tmp_path)
    assert "\n" not in str(error.value)
