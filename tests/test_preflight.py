"""What is found wrong before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fedwan.app import load_run
from fedwan.errors import ConfigError
from fedwan.preflight import preflight


def test_a_run_that_can_start_has_no_faults(tmp_path: Path) -> None:
    preflight(load_run(None, [f"out={tmp_path / 'run'}", "threads=1"]))


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [
            f"out={tmp_path / 'file' / 'run'}",
            f"link.listen=127.0.0.1:{taken.getsockname()[1]}",
        ]
        with pytest.raises(ConfigError) as raised:
            preflight(load_run(None, [*words, "data.batch=1000"]))
    lines = str(raised.value).splitlines()
    assert [line.split(" ")[0] for line in lines] == ["out", "link.listen", "data.batch"]


def test_folders_of_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    words = [f"out={tmp_path / 'run'}", "data.name=folder", f"data.path={tmp_path / 'nowhere'}"]
    with pytest.raises(ConfigError, match="nowhere"):
        preflight(load_run(None, ["workload=gan", "data.size=8", *words]))
