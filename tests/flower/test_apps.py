"""The apps redirect their process's output and signals, so each test runs them in a process."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fedwan.flower.status import Status

REPOSITORY = Path(__file__).resolve().parents[2]

SITE = """
import json, os, signal, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Context, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedwan.errors import JoinRefused, RunStopped
from fedwan.flower.apps import answer_ticket
from fedwan.flower.site_file import SiteFile
from fedwan.link.ticket import Ticket

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
folder, what = Path(sys.argv[1]), sys.argv[2]

def run(ticket, settings):
    print("a word of the training's")
    os.write(2, b"a word of a library's\\n")
    if what == "refuse":
        raise JoinRefused("initial weights differ; use seed 0")
    if what == "stop":
        raise RunStopped("too few sites")
    if what == "bug":
        raise ValueError("a bug")
    if what == "signals":
        try:
            os.kill(os.getpid(), signal.SIGTERM)
            time.sleep(60)
        finally:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(0.2)
            (folder / "cleaned-up").touch()

SiteFile(site="s1", identity="/pki/s1", dir=str(folder)).write(folder / "site.json")
config = {"settings": str(folder / "site.json")}
context = Context(run_id=1, node_id=1, node_config=config, state=RecordDict(), run_config={})
ticket = Ticket("127.0.0.1:1", "run-1", "{}")
content = RecordDict({"fedwan": ConfigRecord(ticket.to_dict())})
message = Message(content, 1, "train.ticket")
answer = answer_ticket(message, context, run)
(folder / "answer.json").write_text(json.dumps(dict(answer.content.config_records["fedwan"])))
"""


def answer_of(folder: Path, what: str) -> tuple[int, dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-c", SITE, str(folder), what],
        cwd=REPOSITORY,
        capture_output=True,
        text=True,
        timeout=60,
    )
    path = folder / "answer.json"
    return done.returncode, json.loads(path.read_text()) if path.exists() else {}


@pytest.mark.parametrize(
    ("what", "outcome", "text"),
    [
        ("finish", "done", ""),
        ("refuse", "refused", "initial weights differ; use seed 0"),
        ("stop", "stopped", "too few sites"),
        ("signals", "failed", "ended by SIGTERM"),
    ],
)
def test_a_ticket_is_answered_with_how_it_ended(
    tmp_path: Path, what: str, outcome: str, text: str
) -> None:
    code, answer = answer_of(tmp_path, what)
    assert code == 0
    assert answer == {"site": "s1", "outcome": outcome, "text": text}
    status = Status.read(tmp_path / "clientapp.json")
    assert status is not None
    assert (status.run_id, status.outcome, status.text) == ("run-1", outcome, text)
    log = (tmp_path / "logs" / "clientapp.log").read_text()
    assert "a word of the training's" in log
    assert "a word of a library's" in log


def test_a_second_signal_does_not_cut_the_cleaning_up_short(tmp_path: Path) -> None:
    answer_of(tmp_path, "signals")
    assert (tmp_path / "cleaned-up").exists()


def test_a_bug_leaves_its_traceback_in_the_log_and_goes_on_to_flower(tmp_path: Path) -> None:
    code, answer = answer_of(tmp_path, "bug")
    assert code == 1
    assert answer == {}
    status = Status.read(tmp_path / "clientapp.json")
    assert status is not None
    assert (status.outcome, status.error, status.text) == ("failed", "ValueError", "a bug")
    assert "Traceback" in (tmp_path / "logs" / "clientapp.log").read_text()
