"""What is found wrong before anything starts."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from fedwan import preflight as module
from fedwan.app import load_run
from fedwan.preflight import preflight


def test_a_run_that_can_start_has_no_faults(tmp_path: Path) -> None:
    assert preflight(load_run(None, [f"out={tmp_path}/run"])) == []


def test_all_faults_are_found_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "find_spec", lambda name: None)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    (tmp_path / "file").write_text("")
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        words = [
            f"out={tmp_path}/file/run",
            "device=cuda",
            f"link.port={taken.getsockname()[1]}",
            "log.wandb=offline",
            "threads=100000",
            "data.batch=100000",
        ]
        faults = preflight(load_run(None, words))
    begins = ("out =", "device =", "link.port =", "wandb is not", "threads =", "data.batch =")
    assert len(faults) == len(begins)
    for fault, begin in zip(faults, begins, strict=True):
        assert fault.startswith(begin) and "\n" not in fault


def test_folders_of_data_that_are_not_there_are_named(tmp_path: Path) -> None:
    words = ["data.name=folder", "data.split=own", "data.size=32", "data.path=/nowhere/{site}"]
    faults = preflight(load_run(None, [*words, "data.classes=a,b", "sites=2"]))
    assert sorted(fault.split("'")[1] for fault in faults) == ["/nowhere/s1", "/nowhere/s2"]
