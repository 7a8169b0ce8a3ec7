"""A site's side of a run: the answer to its ticket, and what is made of how its script ends."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
from itertools import groupby
from pathlib import Path
from types import SimpleNamespace

import pytest

from fedwan.app import load_run
from fedwan.config import Config, EvalConfig, to_json
from fedwan.errors import ConfigError, DiskFull, FailedAfter, FedwanError, JoinRefused, UserError
from fedwan.flower.clientapp import train
from fedwan.flower.site_file import SiteFile, find_command
from fedwan.flower.status import Status
from fedwan.link.base import Ticket
from fedwan.site.assignment import MEMORY, VARIABLE, Assignment, Outcome, drop_meeting, read_outcome
from tests.support import no_links

REPOSITORY = Path(__file__).resolve().parents[2]

# It redirects its process's output and signals, so each case runs in a process of its own.
SITE = """
import json, os, signal, sys, time
from pathlib import Path
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity
from fedwan.errors import JoinRefused
from fedwan.flower import clientapp
from fedwan.flower.site_file import SiteFile
from fedwan.link.base import Ticket

TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

def run(ticket, settings, tell):
    print("a word of the training's")
    os.write(2, b"a word of a library's\\n")
    if what == "refuse":
        raise JoinRefused("initial weights differ; use seed 0")
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

def answer():
    settings = SiteFile(site="s1", identity="pki", dir=str(folder), door="a:1")
    settings.write(folder / "site.yaml")
    os.environ["FEDWAN_SITE"] = str(folder / "site.yaml")
    clientapp.train = run
    fields = vars(Ticket("127.0.0.1:1", "0" * 32, "{}", "a"))
    if what == "other":
        del fields["start"]
    content = RecordDict({"fedwan": ConfigRecord(fields)})
    answer = clientapp.answer_ticket(Message(content, 1, "train.ticket"))
    record = dict(answer.content.config_records["fedwan"])
    (folder / "answer.json").write_text(json.dumps(record))

for what in sys.argv[2:]:
    folder = Path(sys.argv[1]) / what
    if not (child := os.fork()):
        code = 1
        try:
            answer()
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    (folder / "code").write_text(str(code))
"""


@pytest.fixture(scope="module")
def answers(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folders of all cases; Flower takes two seconds to import, so one process forks them."""
    folder = tmp_path_factory.mktemp("answers")
    words = ("finish", "refuse", "signals", "bug", "other")
    subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SITE, str(folder), *words],
        cwd=REPOSITORY,
        check=True,
        timeout=100,
    )
    return folder


@pytest.mark.parametrize(
    ("what", "outcome", "text"),
    [
        ("finish", "done", ""),
        ("refuse", "refused", "initial weights differ; use seed 0"),
        ("signals", "failed", "ended by SIGTERM"),
        ("bug", "failed", "a bug"),
    ],
)
def test_a_ticket_is_answered_with_how_it_ended_and_a_second_signal_cuts_nothing_short(
    answers: Path, what: str, outcome: str, text: str
) -> None:
    folder, is_bug = answers / what, what == "bug"
    assert (folder / "code").read_text() == ("1" if is_bug else "0")
    if not is_bug:  # which goes on to Flower
        answer = json.loads((folder / "answer.json").read_text())
        assert answer == {"site": "s1", "outcome": outcome, "text": text}
    assert (folder / "answer.json").exists() != is_bug
    status = Status.read(folder / "clientapp.json")
    assert (status.outcome, status.text) == (outcome, text)
    assert status.error == "ValueError" or not is_bug
    log = (folder / "logs" / "clientapp.log").read_text()
    assert "a word of the training's" in log and "a word of a library's" in log
    assert ("Traceback" in log) == is_bug
    assert (folder / "cleaned-up").exists() == (what == "signals")


def test_a_ticket_of_another_version_is_answered_and_told_in_the_site_s_log(answers: Path) -> None:
    answer = json.loads((answers / "other" / "answer.json").read_text())
    said = "ticket field 'start' is None, not a non-empty string; run the same fedwan version"
    assert said in answer["text"]
    assert said in (answers / "other" / "logs" / "clientapp.log").read_text()


PREFACE = """
import json, os, signal, sys, time
from pathlib import Path
from fedwan.errors import JoinRefused
from fedwan.site.assignment import Assignment, Outcome, tell_welcome

joined = Assignment.given
"""


def run(
    folder: Path, body: str = "", command: str = "", workload: str = "command", start: str = "a"
) -> list[tuple[str, ...]]:
    """What its service is told; the ticket is of a start of the coordinator's."""
    told: list[tuple[str, ...]] = []
    (folder / "train.py").write_text(PREFACE + textwrap.dedent(body))
    config = load_run(None, [f"workload={workload}"])
    site = SiteFile(
        site="s1",
        dir=str(folder / "state"),
        command=command or ("python train.py" if body else ""),
        recipes=["flow"],
        folder=str(folder),
    )
    ticket = Ticket("127.0.0.1:1", "1" * 32, to_json(config), start)
    train(ticket, site, lambda *words: told.append(words))
    return told


def test_a_script_that_ends_well_has_taken_part_and_its_first_word_is_heard(tmp_path: Path) -> None:
    body = "a = joined(); print(a.site, a.run_id, sys.argv[1]); Outcome.leave(None, 8)"
    late = "Outcome.leave(ValueError('late'), 8)"
    run(tmp_path, f"{body}; {late}", command="python train.py --data={site}")
    assert f"s1 {'1' * 32} --data=s1" in (tmp_path / "state" / "logs" / "clientapp.log").read_text()
    word = json.loads((tmp_path / "state" / "training" / "outcome.json").read_text())
    assert word == {"error": "", "text": "", "step": 8}


def test_the_first_word_is_heard_without_hard_links_and_after_a_killed_script_s_half(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a file system that has none; whoever is killed half-way bars this start's others."""
    monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "assignment.json"
    monkeypatch.setenv(VARIABLE, str(path))
    path.with_name("outcome.tmp").write_text('{"err')
    Outcome.leave(ValueError("early"), 3)
    assert not Outcome.is_left() and read_outcome(path) == (None, False)
    assignment = Assignment(
        "a:1", "run", "{}", "s1", "pki", str(tmp_path), "", False, os.getpid(), ""
    )
    assignment.write(path)
    Outcome.leave(ValueError("first"), 3)
    Outcome.leave(None, 8)
    drop_meeting(path)
    assert read_outcome(path) == (Outcome("ValueError", "first", 3), False)
    assert {path.name for path in tmp_path.iterdir()} == {"assignment.json", "outcome.json"}


def test_a_script_that_fails_after_the_run_is_told_so(tmp_path: Path) -> None:
    with pytest.raises(FailedAfter, match=r"failed after it \(.* 1\): no room for pictures"):
        run(tmp_path, "joined(); Outcome.leave(None, 8); sys.exit('no room for pictures')")


@pytest.mark.slow
def test_the_service_is_told_when_a_script_is_let_in_and_why_it_is_started_again(
    tmp_path: Path,
) -> None:
    body = """
    joined(); tell_welcome("b"); time.sleep(0.5)
    Outcome.leave(None if Path("failed").exists() else ValueError("bad batch"), 8)
    Path("failed").touch()
    """
    told = [words for words, _ in groupby(run(tmp_path, body))]
    name = f"{'1' * 32} (command, diloco)"
    assert [words[0] for words in told] == [name] * 3
    assert (told[0][1], told[2][1]) == ("", "")
    assert told[1][1].startswith("the training script failed at step 8: ValueError: bad batch")
    assert told[1][1].endswith("it is started again")


def test_a_ticket_of_a_start_that_a_script_has_joined_by_itself_starts_no_other(
    tmp_path: Path,
) -> None:
    body = """
    joined(); tell_welcome("b"); Outcome.leave(None, 8)
    print("trained", file=open("log", "a"))
    """
    for start, num in (("a", 1), ("b", 1), ("c", 2)):
        run(tmp_path, body, start=start)
        assert (tmp_path / "log").read_text().split() == ["trained"] * num
    for start in ("a", "b"):
        with pytest.raises(FailedAfter, match="no room"):
            run(tmp_path, body + "sys.exit('no room')", start=start)
    assert (tmp_path / "log").read_text().split() == ["trained"] * 3
    with pytest.raises(UserError, match="at step 8: ValueError: bad"):
        run(tmp_path, 'joined(); tell_welcome("d"); Outcome.leave(ValueError("bad"), 8)', start="d")
    run(tmp_path, body, start="d")
    assert (tmp_path / "log").read_text().split() == ["trained"] * 4, "that one had not ended"


def test_processes_meet_where_no_full_disk_can_tear_what_they_write(tmp_path: Path) -> None:
    """Torchrun waits for ever for the rest of a torn record."""
    body = """
    joined()
    meeting = Path(os.environ["FEDWAN_ASSIGNMENT"]).with_name("meeting")
    assert meeting.stat().st_mode & 0o777 == 0o700 and not list(meeting.iterdir())
    (meeting / "torchrun").touch()
    Path("met").write_text(str(meeting.resolve()))
    Outcome.leave(None, 8)
    """
    run(tmp_path, body)
    met = Path((tmp_path / "met").read_text())
    assert MEMORY in met.parents and not met.exists()
    assert not (tmp_path / "state" / "training" / "meeting").is_symlink()


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        ("print('hello')", UserError, "before it called fedwan.join; last words: hello .* has to"),
        ("sys.exit('no GPU')", UserError, "ended with status 1 before .* last words: no GPU"),
        ("joined(); os.kill(os.getpid(), signal.SIGKILL)", FedwanError, "was killed .status -9"),
        ("joined()", FedwanError, "ended before the run did .status 0.*; it has to train inside"),
        (
            "joined(); Outcome.leave(JoinRefused('weights differ; use one seed'), 0); sys.exit(2)",
            JoinRefused,
            "^weights differ; use one seed$",
        ),
        ("if joined", UserError, r"last words: SyntaxError: expected ':' \(train.py:8\) \(log /"),
        (
            "print('hello'); json.loads('{')",
            UserError,
            r"with status 1 before .* last words: json.*JSONDecodeError: .* \(train.py:8\) \(log /",
        ),
        (
            "joined(); Outcome.leave(ZeroDivisionError('a\\nb'), 0); sys.exit(1)",
            UserError,
            "the training script failed at step 0: ZeroDivisionError: a b .exit status 1, log /",
        ),
        (
            """
            try:
                joined() and json.loads("{")
            except ValueError as error:
                Outcome.leave(error, 3)
                sys.exit(1)
            """,
            UserError,
            r"failed at step 3: JSONDecodeError: .* \(train.py:10\) \(exit status 1, log /",
        ),
    ],
)
def test_how_a_script_ended_is_one_line(
    tmp_path: Path, body: str, kind: type[FedwanError], text: str
) -> None:
    with pytest.raises(kind, match=text) as raised:
        run(tmp_path, body)
    told, log = str(raised.value), tmp_path / "state" / "logs" / "clientapp.log"
    assert "\n" not in told and (f"log {log})" in told) == (kind is not JoinRefused)


def test_a_script_that_fails_is_started_again_while_it_gets_further(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = """
    joined()
    open("starts", "a").write("x")
    at = Path("starts").stat().st_size - 1
    Outcome.leave(ValueError("bad batch"), (0, 5, 9, 9)[at])
    """
    with caplog.at_level("WARNING"), pytest.raises(UserError, match="at step 9: ValueError"):
        run(tmp_path, body)
    assert caplog.text.count("it is started again") == 3


@pytest.mark.parametrize("has_part", [True, False])
def test_a_script_that_ends_before_it_joins_is_tried_again_if_it_was_killed_or_once_took_part(
    tmp_path: Path, has_part: bool
) -> None:
    if has_part:
        (folder := tmp_path / "state" / "checkpoints" / ("1" * 32)).mkdir(parents=True)
        (folder / "site-00000003.safetensors").touch()
    end = "sys.exit(1)" if has_part else "os.kill(os.getpid(), signal.SIGKILL)"
    with pytest.raises(FedwanError, match="before it called fedwan.join|was killed"):
        run(tmp_path, f"open('starts', 'a').write('x'); {end}")
    assert (tmp_path / "starts").read_text() == "xx"


def test_a_full_disk_is_not_blamed_on_the_script(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is tried once more; where there was no room even for a word, the disk's state tells."""
    body = """
    joined()
    open("starts", "a").write("x")
    Outcome.leave(OSError(28, "No space left on device", "/a/b"), 5)
    sys.exit(1)
    """
    with pytest.raises(DiskFull, match="the disk of /a is full .No space left on device"):
        run(tmp_path, body)
    assert (tmp_path / "starts").read_text() == "xx"
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(free=0))
    with pytest.raises(DiskFull, match=f"the disk of {tmp_path / 'state'} is full"):
        run(tmp_path, "sys.exit(1)")


def test_a_script_that_is_killed_is_started_again_while_it_leaves_newer_checkpoints(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    body = """
    given = joined()
    open("told", "a").write(f"{'killed (status -9)' in given.error} ")
    folder = given.checkpoints
    folder.mkdir(parents=True, exist_ok=True)
    at = len(list(folder.iterdir()))
    (folder / f"site-{min(at, 2):08d}.safetensors").touch()
    os.kill(os.getpid(), signal.SIGKILL)
    """
    with caplog.at_level("WARNING"), pytest.raises(FedwanError, match="was killed"):
        run(tmp_path, body)
    assert caplog.text.count("it is started again") == 3
    assert (tmp_path / "told").read_text() == "False True True True "


@pytest.mark.parametrize(
    ("command", "workload", "text"),
    [
        ("", "command", "this site has none; add a line command: … to its SITE.yaml"),
        ("no-such-program x", "command", "command 'no-such-program' is not to be found"),
        ("python nothere.py", "command", "'python nothere.py': there is no 'nothere.py' in"),
        ("python x.py don't", "command", "command .*: No closing quotation; mend the quotes"),
        ("", "gan", "workload = 'gan' is not among the recipes that this site allows .flow."),
    ],
)
def test_what_a_site_s_owner_did_not_put_there_is_not_started(
    tmp_path: Path, command: str, workload: str, text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as raised:
        run(tmp_path, command=command, workload=workload)
    assert "\n" not in str(raised.value)


def test_a_folder_that_is_not_there_is_told_before_what_would_be_in_it(tmp_path: Path) -> None:
    site = SiteFile(command="python train.py", folder=str(tmp_path / "nowhere"))
    with pytest.raises(ConfigError, match="^folder = '.*nowhere' is no folder; give the one"):
        find_command(Config(workload="command"), site)


def test_of_modules_to_see_images_through_a_site_imports_those_that_its_owner_names() -> None:
    config = Config(workload="flow", eval=EvalConfig(features="json.tool:main"))
    with pytest.raises(ConfigError, match="eval.features = 'json.tool' is not among the recipes"):
        find_command(config, SiteFile(recipes=["flow"]))
    find_command(config, SiteFile(recipes=["flow", "json.tool"]))


def test_a_strategy_that_is_no_page_of_fedwan_s_is_imported_where_its_owner_names_it() -> None:
    for workload, allowed in (("flow", ["flow"]), ("command", ["flow"])):
        config = Config(workload=workload, strategy="json.tool")
        with pytest.raises(ConfigError, match="strategy = 'json.tool' is not among the recipes"):
            find_command(config, SiteFile(recipes=allowed, command="true"))
    find_command(config, SiteFile(recipes=["json.tool"], command="true", folder="/"))


def test_a_torchscript_file_is_code_that_a_site_s_owner_allows_by_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "features.pt"
    path.write_bytes(b"PK")
    config = Config(workload="flow", eval=EvalConfig(features=str(path)))
    sha256 = hashlib.sha256(b"PK").hexdigest()
    for bundles in ([], ["0" * 64]):
        with pytest.raises(ConfigError, match=rf"is code .* add a line bundles: \[{sha256}\]"):
            find_command(config, SiteFile(bundles=bundles))
    find_command(config, SiteFile(bundles=[sha256]))
    relative = Config(workload="flow", eval=EvalConfig(features=os.path.relpath(path, "/")))
    with pytest.raises(ConfigError, match="is no absolute path, and no module:function"):
        find_command(relative, SiteFile())  # begins where the script starts
    path.write_bytes(b"PK, another one")
    with pytest.raises(ConfigError, match="is code that this site has not allowed"):
        find_command(config, SiteFile(bundles=[sha256]))
