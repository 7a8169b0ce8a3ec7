"""What is found wrong before anything starts."""

from __future__ import annotations

import socket
import sys
from pathlib import Path

import datasets
import pytest

from fedwan.app import load_run
from fedwan.cli import run as commands
from fedwan.errors import ConfigError
from fedwan.preflight import preflight
from tests.data.files import write_folder

ROOT = Path(__file__).resolve().parents[1]


def faults(*words: str) -> list[str]:
    with pytest.raises(ConfigError) as raised:
        preflight(load_run(None, list(words)))
    return str(raised.value).splitlines()


def test_a_run_that_can_start_has_no_faults(tmp_path: Path) -> None:
    preflight(load_run(None, [f"out={tmp_path / 'run'}"]))


def test_all_faults_are_found_at_once(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        out, port = tmp_path / "file" / "run", taken.getsockname()[1]
        lines = faults(f"out={out}", f"link.listen=127.0.0.1:{port}", "data.batch=1000")
    assert [line.split(" ")[0] for line in lines] == ["out", "link.listen", "data.batch"]


def test_weights_to_start_from_and_a_recipes_own_data_are_looked_at(
    no_recipes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sites").mkdir()
    page = (ROOT / "docs" / "examples" / "moons.py").read_text()
    page += "\n\ndef dataset(config, site):\n    return [torch.zeros(2)] * 3\n"
    (tmp_path / "sites" / "moons.py").write_text(page)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    words = ("workload=moons", "data.batch=8", f"out={tmp_path / 'run'}")
    (few,) = faults(*words)
    assert "data.batch = 8 is more than the 3 samples" in few
    (gone,) = faults("workload=command", "sites=2", f"init.net={tmp_path / 'no'}", words[-1])
    assert "is no file on this machine" in gone


def test_a_function_of_features_is_imported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "own_eyes.py").write_text("def see(device): ...\n")
    (tmp_path / "own_blind.py").write_text("import does_not_exist\n")
    monkeypatch.syspath_prepend(tmp_path)
    words = ("workload=flow", f"out={tmp_path / 'run'}")
    preflight(load_run(None, [*words, "eval.features=own_eyes:see"]))
    (gone,) = faults(*words, "eval.features=own_eyes:sea")
    assert "'own_eyes:sea' cannot be used" in gone and "no attribute 'sea'" in gone
    (broken,) = faults(*words, "eval.features=own_blind:see")
    assert "No module named 'does_not_exist' (own_blind.py:1)" in broken


def test_sites_that_all_have_one_folder_of_their_own_are_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(commands, "start", lambda *_: None)
    for site in ("s1", "s2"):
        write_folder(tmp_path / site, range(16))
    words = ["workload=flow", f"out={tmp_path / 'run'}", "sites=2", "data.batch=8", "data.size=8"]
    words += ["data.name=folder", "data.split=own"]
    commands.run_here(None, [*words, f"data.path={tmp_path}"], resume=False)
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("warning: data.split = 'own', and data.path = ")
    assert f"all 2 sites train on the same files; set data.path={tmp_path}/{{site}}," in line
    assert preflight(load_run(None, [*words, f"data.path={tmp_path}/{{site}}"])) == []


def test_a_missing_extra_hides_no_folder_that_is_missing_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    where = f"{tmp_path}/{{site}}"
    words = ["workload=gan", "sites=2", "data.name=folder", "data.split=own", "data.size=8"]
    (tmp_path / "s1").mkdir()
    extra, folder = faults(f"out={tmp_path / 'run'}", f"data.path={where}", *words)
    assert "pip install 'fedwan[data]'" in extra
    assert f"'{tmp_path}/s2' is no folder on this machine" in folder
