from __future__ import annotations

import hashlib
import io
import zipfile
from pathlib import Path

import pytest
from flwr.proto.fab_pb2 import Fab, GetFabResponse

from fedwan.app import installed_app
from fedwan.errors import ConfigError
from fedwan.flower.bundle import build_fab, check_bundle

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


def test_code_that_the_owner_has_approved_lets_no_other_in() -> None:
    def answer(content: bytes) -> bytes:
        return bytes(GetFabResponse(fab=Fab(content=content)).SerializeToString())

    own = build_fab(installed_app())
    approved = [hashlib.sha256(own + b"0").hexdigest()]
    for content in (own, own + b"0"):
        check_bundle(answer(content), approved)
    with pytest.raises(ConfigError, match="the coordinator's code for sites has SHA-256"):
        check_bundle(answer(own + b"1"), approved)
