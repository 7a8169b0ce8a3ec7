"""The command line from outside: what it says, where, and with which exit code."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from fedwan import __version__
from fedwan.cli import main as main_module
from fedwan.cli.main import main
from fedwan.errors import LinkLost


def run_main(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    with pytest.raises(SystemExit) as caught:
        main(words)
    out, err = capsys.readouterr()
    assert isinstance(caught.value.code, int)
    return caught.value.code, out, err


def test_help_names_every_command(capsys: pytest.CaptureFixture[str]) -> None:
    for words in ((), ("--help",), ("-h",)):
        code, out, err = run_main(capsys, *words)
        assert (code, err) == (0, "")
        for command in ("demo", "run", "coordinator", "site", "pki", "report"):
            assert command in out


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["demo", "stepz=3"], "unknown key 'stepz' (= 3); did you mean 'steps'?"),
        (["demo", "sites=0", "out=/nowhere/x"], "sites = 0 is out of range"),
        (["run", "nope.yaml"], "config file 'nope.yaml' does not exist"),
        (["train"], "No such command 'train'; see fedwan --help"),
        (["demo", "--fast"], "No such option"),
        (["report", "nope"], "'nope' holds no run"),
        (["site", "nope.yaml"], "config file 'nope.yaml' does not exist"),
        (["coordinator", "c.yaml"], "Missing option '--identity'"),
        (["coordinator", "c.yaml", "--identity", "nope"], "identity file nope/ca.crt is missing"),
        (["pki", "issue", "s1", "--pki", "nope"], "no authority in nope"),
        (["pki", "init", "p", "--host", "a:1"], "host 'a:1' is neither"),
    ],
)
def test_a_users_mistake_is_one_line_on_stderr_and_exit_code_2(
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    words: list[str],
    says: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    code, out, err = run_main(capsys, *words)
    assert (code, out) == (2, "")
    assert err.startswith("fedwan: ") and err.count("\n") == 1
    assert says in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (LinkLost("a.b:1 is gone; call again"), 1, "fedwan: a.b:1 is gone; call again\n"),
        (KeyboardInterrupt(), 130, "fedwan: stopped by Ctrl-C\n"),
    ],
)
def test_what_is_not_the_users_mistake_has_an_exit_code_of_its_own(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    says: str,
) -> None:
    def app(words: object, **_: object) -> None:
        raise error

    monkeypatch.setattr(main_module, "app", app)
    assert run_main(capsys) == (code, "", says)


def test_the_command_line_starts_without_torch_flower_grpc_and_plots() -> None:
    code = (
        "import sys, fedwan.cli.main;"
        "heavy = {'torch', 'flwr', 'grpc', 'matplotlib', 'cryptography', 'numpy', 'wandb'};"
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"


def test_python_dash_m_fedwan_is_the_same_command() -> None:
    argv = [sys.executable, "-m", "fedwan", "--version"]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    assert done.stdout == f"fedwan {__version__}\n"
