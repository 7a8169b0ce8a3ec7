"""The command line from outside: what it says, where, and with which exit code."""

from __future__ import annotations

import errno
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import yaml
from rich.console import Console

from fedwan import __version__
from fedwan.app import load_run
from fedwan.cli import main as main_module
from fedwan.config import Config, from_json
from fedwan.config_tree import keys_of
from fedwan.errors import LinkLost
from tests.cli.conftest import Command

MODEL = ("params=57182660", "step_s=0.1")
LINK = ("link.rate_mbit=100", "link.rtt_ms=100")
PLAN = ("plan", *MODEL, *LINK)


def test_help_names_every_command(fedwan: Command) -> None:
    for words in ((), ("--help",), ("-h",)):
        code, out, err = fedwan(*words)
        assert (code, err) == (0, "")
        for command in ("demo", "run", "coordinator", "site", "pki", "report"):
            assert command in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("demo", "sites=0", "out=/nowhere/x"), "sites = 0 is out of range"),
        (("run", "nope.yaml"), "config file 'nope.yaml' does not exist; give the path"),
        (("config", "--list", "h=50"), "--list has every key: h=50 changes nothing; leave it out"),
        (("train",), "No such command 'train'; see fedwan --help"),
        (("demo", "--fast"), "No such option"),
        (("launch",), "fedwan launch names no command; write it after --"),
        (("launch", "--resume"), "out = "),
        (("launch", "--sites", "0", "python", "x.py"), "sites = 0 is out of range; choose"),
        (
            ("launch", "data.size=32", "steps=9", "python", "x.py"),
            "data.size = 32 needs a recipe: a script has its own way",
        ),
        (("sample", "nope", "--out", "x.txt"), "--out x.txt is no PNG file"),
        (("report", "nope"), "'nope' holds no run"),
        (("coordinator", "c.yaml"), "Missing option '--identity'"),
        (("coordinator", "c.yaml", "--identity", "nope"), "identity file nope/ca.crt is missing"),
        (("pki", "request", "coordinator", "p", "--host", "a:1"), "host 'a:1' is neither"),
        ((*PLAN, "round.quorum=9"), "round.quorum = 9 is out of range; choose 0 to sites (4"),
        ((*PLAN, "params=0"), "params = 0.0 is out of range; choose 1 to 1e+12"),
        ((*PLAN, "seed=3"), "seed is not counted by a plan"),
        (("plan", *MODEL), "link.rate_mbit has no value"),
        (("plan", *LINK, "step_s=0.1"), "params has no value; give params=57.2e6"),
        (("plan", *LINK, "params=1e6"), "step_s has no value"),
        (("plan", *MODEL, "--link", "nope"), "--link = 'nope' is no measurement; write one with"),
        ((*PLAN, "--json", "no/folder/x"), "no/folder/x: No such file or directory"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_2(
    fedwan: Command,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = fedwan(*words)
    assert (code, out) == (2, "")
    assert err.startswith("fedwan: ") and err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (LinkLost("a.b:1 is gone; call again"), 1, "fedwan: a.b:1 is gone; call again\n"),
        (KeyboardInterrupt(), 130, "fedwan: stopped by Ctrl-C\n"),
        (
            OSError(errno.EDQUOT, "", "/x/y/z"),
            1,
            "fedwan: the disk of /x/y is full (Disk quota exceeded, 5.0 MB free); make room there "
            "and start again: a run goes on from its last checkpoint\n",
        ),
    ],
)
def test_what_is_not_the_users_mistake_has_an_exit_code_of_its_own(
    fedwan: Command,
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str,
) -> None:
    def app(words: object, **_: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", app)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=5_000_000))
    assert fedwan() == (code, "", says)


def test_a_folder_that_is_gone_is_told_by_those_who_need_it(
    fedwan: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    told = "fedwan: the folder that this was started in is gone; go to one that is there (cd)\n"
    for words in (("config", "workload=flow"), ("run", "workload=flow")):
        assert fedwan(*words) == (2, "", told)
    assert "holds no run" in fedwan("status", str(tmp_path))[2]


def test_what_a_terminal_has_no_character_for_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    terminal = io.TextIOWrapper(io.BytesIO(), "latin-1", newline="\n")
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setattr(main_module, "app", lambda *_, **__: Console().print("up to 3 – 4 …"))
    with pytest.raises(SystemExit, match="0"):
        main_module.main(())
    terminal.seek(0)
    assert terminal.read() == "up to 3 ? 4 ?\n"


def test_python_dash_m_fedwan_starts_without_torch_flower_grpc_and_plots() -> None:
    code = (
        "import atexit, runpy, sys; sys.argv = ['fedwan', '--version'];"
        "heavy = {'torch', 'flwr', 'grpc', 'matplotlib', 'cryptography', 'numpy', 'wandb'};"
        "atexit.register(lambda: print(sorted(heavy & set(sys.modules))));"
        "runpy.run_module('fedwan', run_name='__main__')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == f"fedwan {__version__}\n[]\n"


def test_every_setting_is_listed_with_its_type_default_and_meaning(fedwan: Command) -> None:
    rows = json.loads(fedwan("config", "--list", "--json")[1])
    assert [row["key"] for row in rows] == keys_of(Config)
    assert all(row["type"] and row["meaning"] for row in rows)
    by_key = {row["key"]: row for row in rows}
    assert by_key["stream.tau"]["default"] is None and by_key["sites"]["default"] == 4
    _, text, _ = fedwan("config", "--list")
    assert all(f"{key} (" in text for key in by_key)


def test_what_a_run_would_be_resolved_to_is_printed(fedwan: Command, tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text("strategy: local_sgd\n")
    expected = load_run(path, ["h=10"])
    assert from_json(fedwan("config", str(path), "h=10", "--json")[1]) == expected
    text = fedwan("config", str(path), "h=10")[1]
    assert from_json(json.dumps(yaml.safe_load(text))) == expected
    assert "h: 10" in fedwan("config", "h=10")[1]
    # Each fault has a line of its own.
    code, _, err = fedwan("config", "stepz=5", "link.rtt=3")
    assert code == 2 and [line[:20] for line in err.splitlines()] == ["fedwan: unknown key "] * 2
