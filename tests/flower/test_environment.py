from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from fedwan.flower.environment import flower_environment


def test_flower_is_private_offline_and_deaf_to_the_users_variables(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FLWR_DATABASE", "elsewhere")
    monkeypatch.setenv("FLWR_HOME", "elsewhere")
    monkeypatch.setenv("HTTP_PROXY", "http://proxy.example.com")
    monkeypatch.setenv("NO_PROXY", "intranet.example.com")
    env = flower_environment(tmp_path / "home")
    assert "FLWR_DATABASE" not in env
    assert env["FLWR_HOME"] == str(tmp_path / "home")
    assert env["FLWR_TELEMETRY_ENABLED"] == "0"
    assert env["FLWR_DISABLE_UPDATE_CHECK"] == "1"
    assert env["NO_PROXY"] == "intranet.example.com,127.0.0.1,localhost"
    assert env["PATH"].split(os.pathsep)[0] == str(Path(sys.executable).parent)
