"""A site's training processes: what is started, and what is made of how they end."""

from __future__ import annotations

import json
import logging
import textwrap
from pathlib import Path

import pytest

from fedwan.app import load_run
from fedwan.config import to_json
from fedwan.errors import ConfigError, FedwanError, JoinRefused, UserError
from fedwan.flower.site_file import SiteFile
from fedwan.flower.training import find_command, train
from fedwan.link.ticket import Ticket

PREFACE = """
import os, signal, sys
from fedwan.errors import JoinRefused
from fedwan.site.assignment import Assignment, Outcome

joined = Assignment.given
"""


def run(folder: Path, body: str = "", command: str = "", workload: str = "command") -> None:
    (folder / "train.py").write_text(PREFACE + textwrap.dedent(body))
    config = load_run(None, [f"workload={workload}"])
    site = SiteFile(
        site="s1",
        dir=str(folder / "state"),
        command=command or ("python train.py" if body else ""),
        recipes=["flow"],
        folder=str(folder),
    )
    train(Ticket("127.0.0.1:1", "run-1", to_json(config)), site)


def test_a_script_that_ends_well_has_taken_part(tmp_path: Path) -> None:
    run(tmp_path, "a = joined(); print(a.site, a.run_id); Outcome.leave(None, 8)")
    assert "s1 run-1" in (tmp_path / "state" / "logs" / "clientapp.log").read_text()


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("print('hello')", UserError, "ended before it called fedwan.join; its last words: hello"),
        ("sys.exit('no GPU')", UserError, "ended with status 1 before .* last words: no GPU"),
        ("joined(); os.kill(os.getpid(), signal.SIGKILL)", FedwanError, "was killed .status -9"),
        (
            "joined(); Outcome.leave(JoinRefused('weights differ; use one seed'), 0); sys.exit(2)",
            JoinRefused,
            "^weights differ; use one seed$",
        ),
        (
            "joined(); Outcome.leave(ZeroDivisionError('a\\nb'), 0); sys.exit(1)",
            UserError,
            "the training script failed at step 0: ZeroDivisionError: a b",
        ),
        (
            "joined(); Outcome.leave(SystemExit('out of memory'), 3); sys.exit(1)",
            UserError,
            "the training script failed at step 3: SystemExit: out of memory",
        ),
    ],
)
def test_how_a_script_ended_is_one_line(
    tmp_path: Path, body: str, kind: type[FedwanError], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        run(tmp_path, body)
    assert "\n" not in str(raised.value)


def test_a_command_may_name_its_site(tmp_path: Path) -> None:
    config = load_run(None, ["workload=command", f"out={tmp_path}"])
    site = SiteFile(site="s7", command="python train.py --data={site}", folder=str(tmp_path))
    assert find_command(config, site)[0][1:] == ["train.py", "--data=s7"]


def test_a_script_that_fails_is_started_again_while_it_gets_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = """
    joined()
    starts = open("starts", "a+")
    starts.seek(0)
    at = len(starts.read())
    starts.write("x")
    Outcome.leave(ValueError("bad batch"), (0, 5, 9, 9)[at])
    sys.exit(1)
    """
    with caplog.at_level(logging.WARNING), pytest.raises(UserError, match="at step 9: ValueError"):
        run(tmp_path, body)
    assert (tmp_path / "starts").read_text() == "xxxx"
    assert caplog.text.count("it is started again") == 3


@pytest.mark.parametrize(
    ("command", "workload", "text"),
    [
        ("", "command", "this site has none; add a line command: … to its SITE.yaml"),
        ("no-such-program x", "command", "command 'no-such-program' is not to be found"),
        ("", "gan", "workload = 'gan' is not among the recipes that this site allows .flow."),
    ],
)
def test_what_a_site_s_owner_did_not_put_there_is_not_started(
    tmp_path: Path, command: str, workload: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        run(tmp_path, command=command, workload=workload)
    assert "\n" not in str(raised.value)


def test_the_first_process_that_says_how_it_ended_is_heard(tmp_path: Path) -> None:
    body = "joined(); Outcome.leave(None, 8); Outcome.leave(ValueError('late'), 8)"
    run(tmp_path, body)
    word = json.loads((tmp_path / "state" / "training" / "outcome.json").read_text())
    assert word == {"error": "", "text": "", "step": 8}
