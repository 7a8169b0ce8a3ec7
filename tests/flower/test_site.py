"""A site's service, and its file."""

from __future__ import annotations

import math
import os
import signal
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from fedwan.errors import ConfigError, DiskFull, IdentityError, NotJoined, RunStopped, SessionLost
from fedwan.flower import site
from fedwan.flower.site import _Supervisor, serve_site
from fedwan.flower.site_file import VARIABLE, SiteData, SiteFile, given_site, load_site
from fedwan.flower.status import Status


def test_a_name_that_is_not_the_certificates_is_refused(tmp_path: Path, identities: Path) -> None:
    with pytest.raises(IdentityError, match=r"is of 's1' and not of 's2'; give the folder"):
        serve_site(SiteFile("s2", str(identities / "s1"), "127.0.0.1:9", str(tmp_path)))


def test_a_site_that_is_told_to_stop_says_so_in_the_last_line_of_its_log(
    tmp_path: Path, identities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_Supervisor, "look", lambda self: os.kill(os.getpid(), signal.SIGTERM))
    serve_site(SiteFile("s1", str(identities / "s1"), "127.0.0.1:9", str(tmp_path)))
    *_, last = (tmp_path / "logs" / "site.log").read_text().splitlines()
    assert last.endswith("INFO site s1 was told to stop, and has stopped")


GOOD = "site: paris\nidentity: identity\ndoor: coordinator.example.com:7444\ndir: state\n"


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    return path


def test_relative_paths_begin_at_the_files_folder_and_words_beat_the_file(tmp_path: Path) -> None:
    path = write(tmp_path, GOOD + "data: {path: images}\n")
    assert load_site(path, []) == SiteFile(
        site="paris",
        identity=str(tmp_path / "identity"),
        door="coordinator.example.com:7444",
        dir=str(tmp_path / "state"),
        data=SiteData(str(tmp_path / "images")),
        folder=str(tmp_path),
    )
    words = ["dir=/var/lib/fedwan", "site=rome", "data.path=/srv/images"]
    settings = load_site(path, words)
    assert (settings.dir, settings.site) == ("/var/lib/fedwan", "rome")
    assert settings.data.path == "/srv/images"


def test_what_a_service_passes_on_is_read_as_it_was(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="belongs to no site"):
        given_site()
    folder = tmp_path / 'it\'s "$x"'
    data = SiteData("/data of ours", True)
    command = "python 'my train.py' --x=\"${y}: 1\""
    site = SiteFile(
        "s1", "/pki/s1", "a.b:1", "/state", data, command, ["gan"], ["0a" * 32], "/scripts"
    )
    site.write(folder / "site.yaml")
    monkeypatch.setenv(VARIABLE, str(folder / "site.yaml"))
    assert given_site() == site


@pytest.mark.parametrize(
    ("text", "says"),
    [
        (GOOD + "data: images\n", "'images' is a section, not a setting; it holds data.path"),
        (GOOD + "doors: x\n", "did you mean 'door'?"),
        (GOOD.replace("door: coordinator.example.com:7444\n", ""), "has no 'door'; add a line"),
        (GOOD.replace(":7444", ""), "door = 'coordinator.example.com' is no host:port"),
        ("", "has no 'site'"),
        (GOOD + "data.path: /srv\n", "in a file, write it as data: {path: /srv}"),
        (GOOD + "bundles: [abc]\n", "bundles = 'abc' is no SHA-256"),
        (GOOD + "recipes: [flw]\n", "'flw' is not installed here; did you mean 'flow'?"),
    ],
)
def test_a_wrong_file_is_one_clear_line(tmp_path: Path, text: str, says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_site(write(tmp_path, text), [])
    assert says in str(caught.value) and "\n" not in str(caught.value)


def test_a_site_s_log_tells_of_the_run_how_its_script_failed_and_where_its_log_is(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    forwarder: Any = SimpleNamespace(refusal=None)
    log = tmp_path / "logs" / "clientapp.log"
    caplog.set_level("INFO", "fedwan")
    with closing(_Supervisor(SiteFile("s1", dir=str(tmp_path)), forwarder)) as supervisor:
        supervisor._due_at = math.inf  # no SuperNode is started
        begun = Status.of()
        joined = replace(begun, run="r1 (gan, diloco)")
        failed = replace(joined, text="at step 8: ValueError: no; it is started again")
        done = joined.ended(None)
        lost = joined.ended(NotJoined("site 's1' has not joined this run; join first"))
        other = joined.ended(SessionLost("this session of s1 was replaced; join again"))
        stopped = joined.ended(RunStopped("too few"))
        for status in (begun, joined, joined, failed, lost, other, done, stopped):
            status.write(tmp_path / "clientapp.json")
            supervisor.look()
            assert forwarder.is_over == (status == done)
    lines = [f"{record.levelname} {record.getMessage()}" for record in caplog.records]
    assert lines == [
        "INFO joined run r1 (gan, diloco)",
        f"WARNING run r1 (gan, diloco): {failed.text} (log {log})",
        "INFO the coordinator was started again; joining run r1 (gan, diloco) anew",
        f"WARNING run r1 (gan, diloco): {other.text} (log {log})",
        "INFO run r1 (gan, diloco) is done",
        "INFO run r1 (gan, diloco) has stopped: too few",
    ]


class Supervised:
    """A site's supervisor and its forwarder, with time and SuperNodes in the test's hands."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now, self.lost, self.nodes = 100.0, "", list[Mock]()
        monkeypatch.setattr(site, "time", SimpleNamespace(monotonic=lambda: self.now))
        monkeypatch.setattr(_Supervisor, "_start", self.start)
        forwarder: Any = SimpleNamespace(refusal=None, take_lost=self.take_lost)
        self.supervisor = _Supervisor(SiteFile("s1", dir=str(folder)), forwarder)
        self.path, self.gone = folder / "clientapp.json", Status(2**22 + 1, 0.0)

    def start(self) -> Mock:
        self.nodes.append(Mock(started_at=self.now, poll=Mock(return_value=None)))
        return self.nodes[-1]

    def take_lost(self) -> str:
        lost, self.lost = self.lost, ""
        return lost

    def look(self, status: Status | None = None, after_s: float = 60.0) -> int:
        """How many SuperNodes have been started, after two looks."""
        if status is not None:
            status.write(self.path)
        for _ in range(2):
            self.now += after_s
            self.supervisor.look()
        return len(self.nodes)


def test_another_supernode_is_started_once_for_each_that_is_of_no_use_any_more(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Supervised(tmp_path, monkeypatch)
    with closing(run.supervisor):
        assert run.look() == run.look(Status.of()) == 1
        assert run.look(run.gone) == run.look() == 2, "its ClientApp was killed"
        for code in (1, 0):
            run.nodes[-1].poll.return_value = code
            assert run.look() == run.look() == 4 - code
        run.lost = "an answer was lost"
        assert run.look(Status.of()) == 4, "no ticket: it has one"
        assert run.look(run.gone.ended(None)) == run.look() == 5
        run.lost = "another one was lost"  # with what has to be started again in any case
        run.nodes[-1].poll.return_value = 1
        assert run.look() == run.look() == 6
    assert [node.stop.call_count for node in run.nodes] == [1] * 6


def test_what_has_to_be_mended_ends_a_site_s_service_once_it_was_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for error in (ConfigError("no such folder"), DiskFull("is full")):
        run = Supervised(tmp_path, monkeypatch)
        with closing(run.supervisor):
            run.look()
            run.look(Status.of().ended(error))  # the ClientApp is still there
            run.look(run.gone.ended(error), after_s=1.5)
            run.look(Status.of())  # it has got another ticket
            run.look(run.gone.ended(error), after_s=1.5)
            with pytest.raises(type(error), match=str(error)):
                run.look()
    run.path.unlink()
    monkeypatch.setattr(site, "no_room", lambda folder: DiskFull("no room for a status"))
    with pytest.raises(DiskFull, match="no room"):
        run.look()
