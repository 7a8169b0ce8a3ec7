"""The operator's socket, and what a decision does to sites over a real data plane."""

from __future__ import annotations

import errno
import json
import socket
import stat
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fedwan.config import Config, dump
from fedwan.coordinator import control, members
from fedwan.coordinator.past import Past
from fedwan.coordinator.records import Totals
from fedwan.coordinator.run import CoordinatedRun
from fedwan.errors import ConfigError, SiteDrained, SiteEjected, UserError
from fedwan.flower import status
from fedwan.link import wire_pb2 as wire
from fedwan.output.records import Recorder
from tests.cli.conftest import Command
from tests.cli.conftest import fedwan as fedwan
from tests.output.runs import event_row
from tests.planes import (
    RUN,
    Bench,
    dialling,
    eventually,
    header_of,
    in_thread,
    payload_of,
    read_all,
    serving,
    update_request,
)
from tests.support import run_tiny, tiny_config


def test_a_site_that_is_ejected_keeps_no_copy_of_the_weights(tmp_path: Path) -> None:
    bench = Bench(tmp_path)
    hub = bench.hub
    hub.rounds.updates.keeps_past = True
    hub.join("s1", bench.hello("s1"))
    hub.download("s1", wire.DownloadRequest(run_id=RUN, kind=wire.DownloadRequest.GLOBAL))
    assert hub._snapshots._kept
    hub.decide("eject", "s1")
    assert not hub._snapshots._kept


def test_a_coordinator_that_stood_still_takes_nobody_for_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(tmp_path, silence_s=10.0)
    for site in ("s1", "s2", "s3"):
        bench.hub.join(site, bench.hello(site))
    real_s = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: real_s() + 60.0)
    assert bench.hub.live() == ["s1", "s2", "s3"] and bench.hub.notice() == []
    for later_s in range(1, 12):
        monkeypatch.setattr(time, "monotonic", lambda s=later_s: real_s() + 60.0 + s)
        bench.hub.notice()
    assert bench.hub.live() == []


class Desk:
    """A bench's operator, at a socket in a folder whose path is long."""

    def __init__(self, folder: Path) -> None:
        self.bench = Bench(folder)
        for site in ("s1", "s2", "s3"):
            self.bench.hub.join(site, self.bench.hello(site))
        with self.bench.hub.changed:
            self.bench.rounds.begin(0.0)
        self.out = folder / ("a-long-name-" * 15) / "run"
        self.out.mkdir(parents=True)
        dump(Config(steps=40, h=4, sites=3), self.out / "config.yaml")

    def answer(self, request: Any) -> dict[str, Any]:
        config, hub = Config(steps=40, h=4, sites=3), self.bench.hub
        run: Any = SimpleNamespace(hub=hub, config=config, totals=Totals())
        return members.answer(run, request)

    def ask(self, verb: str, site: str = "") -> dict[str, Any]:
        found = control.ask(self.out, {"ask": verb, "site": site})
        assert found is not None
        return found


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Desk]:
    monkeypatch.setattr(control, "REQUEST_S", 0.2)
    desk = Desk(tmp_path)
    with control.serving(desk.out, desk.answer):
        yield desk


@pytest.mark.parametrize(
    ("sent", "expected"),
    [
        (b"[" * 20_000 + b"\n", "a request is a JSON object in one line"),
        (b"\xff\xfe\n", "a request is a JSON object in one line"),
        (b"x" * (control.MAX_BYTES + 1), "a request is a JSON object in one line"),
        (b'{"ask": "stop"}\n', "ask = 'stop'; it is status, admit, drain, eject"),
        (b'{"ask": "drain", "site": {"a": 1}}\n', "is not in this run"),
        (b'{"ask"', "in one line of at most 65536 bytes, sent within 0.2 s"),
    ],
)
def test_a_bad_request_is_answered_in_one_line(desk: Desk, sent: bytes, expected: str) -> None:
    with socket.socket(socket.AF_UNIX) as raw, control._short(desk.out / control.SOCKET) as at:
        raw.settimeout(5.0)
        raw.connect(at)
        raw.sendall(sent)
        reply = json.loads(raw.makefile().readline())
    assert expected in reply["error"] and "\n" not in reply["error"]
    assert desk.ask("status")["is_running"], "the next one is answered"


def test_a_folder_that_can_hold_no_socket_holds_up_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(server: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")  # as some file systems do

    desk = Desk(tmp_path)
    monkeypatch.setattr(control.UnixStreamServer, "server_bind", refuse)
    with control.serving(desk.out, desk.answer):
        assert control.ask(desk.out, {"ask": "status"}) is None
    assert "control.sock can be made ([Errno 1] Operation not permitted)" in caplog.text


def test_who_asks_is_told_of_a_coordinator_that_does_not_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(control, "ANSWER_S", 0.2)
    desk, is_over = Desk(tmp_path), threading.Event()

    def hang(_: Any) -> dict[str, Any]:
        is_over.wait(10)
        return {}

    (desk.out / control.SOCKET).touch()  # left by a coordinator that was killed
    with control.serving(desk.out, hang):
        mode = (desk.out / control.SOCKET).stat().st_mode
        assert stat.S_ISSOCK(mode) and stat.S_IMODE(mode) == 0o600
        with pytest.raises(ConfigError, match="did not answer"):
            desk.ask("status")
        is_over.set()
    assert control.ask(desk.out, {"ask": "status"}) is None
    with pytest.raises(ConfigError, match="holds no run"):
        control.ask(tmp_path / "elsewhere", {"ask": "status"})


def test_what_the_front_door_refuses_is_in_the_journal(desk: Desk) -> None:
    for site, text in (("s1", "front door: \x1b[2J"), ("", "front door: " + "x" * 2000)):
        assert control.ask(desk.out, {"ask": "refused", "site": site, "text": text}) == {}
    assert desk.bench.events[-2] == ("rejected", "s1", "front door: ?[2J")
    event, site, text = desk.bench.events[-1]
    assert (event, site, len(text)) == ("rejected", None, 1000)


def test_status_names_who_is_waited_for(desk: Desk) -> None:
    with desk.bench.hub.changed:
        desk.bench.registry.sites["s3"].heard_s -= 100.0
    found = desk.ask("status")
    assert found["waits_for"] == ["s1", "s2", "s3"] and found["versions"] == 10
    assert found["text"].startswith("waiting for s3 (silent since ")
    way = "goes on when it is here, or without after `fedwan sites runs/demo drain s3`"
    assert way in found["text"]
    assert [row["state"] for row in found["sites"]] == ["training", "training", "silent"]


def test_a_contribution_on_its_way_is_merged_and_then_its_site_is_drained(
    desk: Desk, identities: Path
) -> None:
    bench = desk.bench
    payload = payload_of(2.0, bench.layout)
    header = header_of(payload)
    header.session, header.chunk_bytes = "s2-first", 1 << 16
    reception = bench.hub.open_upload("s2", header)
    assert not isinstance(reception, wire.Receipt)
    with serving(bench.hub, identities) as plane, dialling(plane.port, identities / "s2") as link:
        waits = in_thread(lambda: link.download(update_request(wait_s=10.0)))
        assert desk.ask("drain", "s2")["event"] == "drained"
        assert [row["state"] for row in desk.ask("status")["sites"]][1] == "draining"
        assert bench.rounds.awaited == ["s1", "s2", "s3"]
        reception.write(0, read_all(payload))
        assert bench.hub.close_stripe("s2", header).status == wire.Receipt.ACCEPTED
        with pytest.raises(SiteDrained, match="s2 was drained and has left"):
            waits()
        with pytest.raises(SiteDrained):
            link.join(bench.hello("s2", "again"))
    assert bench.rounds.awaited == ["s1", "s3"] and bench.value("s2") == 2.0
    assert [event[0] for event in bench.events[-2:]] == ["drained", "leave"]


def test_nothing_more_is_taken_of_a_site_that_is_ejected(desk: Desk, identities: Path) -> None:
    bench = desk.bench
    payload = payload_of(2.0, bench.layout)
    with serving(bench.hub, identities) as plane, dialling(plane.port, identities / "s2") as link:
        link.join(bench.hello("s2", "s2-second"))
        assert link.upload(header_of(payload), payload).status == wire.Receipt.ACCEPTED
        ahead = header_of(payload, version=1)
        ahead.session, ahead.chunk_bytes = "s2-second", 1 << 10
        reception = bench.hub.open_upload("s2", ahead)
        assert not isinstance(reception, wire.Receipt)
        desk.ask("eject", "s2")
        assert bench.contribution("s2") is None
        with pytest.raises(SiteEjected):  # its stream ends
            reception.write(0, bytes(1 << 10))
        for call in (
            lambda: link.upload(header_of(payload), payload),
            lambda: link.download(update_request()),
            lambda: link.join(bench.hello("s2", "third")),
        ):
            with pytest.raises(SiteEjected, match="s2 was ejected"):
                call()
        desk.ask("admit", "s2")
        assert not link.join(bench.hello("s2", "fourth")).refusal
        eventually(lambda: bench.is_live("s2"))
    assert bench.rounds.awaited == ["s1", "s2", "s3"]
    with pytest.raises(UserError, match="s1 is in the run already"):
        desk.ask("admit", "s1")


def test_the_commands_print_a_table_or_json_and_whether_a_coordinator_runs(
    tmp_path: Path, fedwan: Command
) -> None:
    desk = Desk(tmp_path)
    out = str(desk.out)
    with control.serving(desk.out, desk.answer):
        code, text, _ = fedwan("sites", out, "drain", "s2")
        assert code == 0 and text.startswith("s2 leaves once")
        code, text, _ = fedwan("sites", out, "list")
        assert code == 0 and text.splitlines()[2].split()[:2] == ["s2", "drained"]
        code, text, _ = fedwan("status", out, "--json")
        assert code == 0 and json.loads(text)["waits_for"] == ["s1", "s3"]
        desk.bench.hub.fail("s1", "its script failed\nat step 3")
        assert "s1: its script failed at step 3" in fedwan("status", out)[1].splitlines()
        code, _, err = fedwan("sites", out, "drain")
        assert code == 2 and "admit, drain and eject take one" in err
    code, _, err = fedwan("sites", out, "list")
    assert code == 2
    assert "no coordinator answers for" in err and "before its first checkpoint" in err
    (desk.out / "checkpoint").mkdir()
    (desk.out / "checkpoint" / "coordinator.safetensors").touch()
    with closing(Recorder(desk.out)) as recorder:
        recorder.write(event_row("join", "s1"))
    code, text, _ = fedwan("status", out)
    assert code == 0 and text.startswith("version 0 of 10\nno coordinator answers for")
    assert "--resume` goes on" in text
    status.service_file(desk.out).parent.mkdir()
    status.Status.of().write(status.service_file(desk.out))
    assert "it is starting or ending: ask again" in fedwan("status", out)[1]


def test_decisions_outlive_the_coordinator_and_damage_to_the_journal(tmp_path: Path) -> None:
    rows = [("drained", "s1"), ("join", "s1"), ("ejected", "s2"), ("admitted", "s1")]
    lines = [json.dumps({"event": event, "site": site}) for event, site in rows]
    (tmp_path / "journal.jsonl").write_text("\n".join([*lines[:2], '{"event": "eje', *lines[2:]]))
    found = Past.read(tmp_path / "journal.jsonl").decisions
    assert found == [("drain", "s1", True), ("eject", "s2", False), ("admit", "s1", False)]


def test_a_coordinator_that_starts_again_does_not_judge_decisions_anew(tmp_path: Path) -> None:
    config = tiny_config(sites=3, steps=2)
    run_tiny(tmp_path, config)
    # The drain of s1 was taken back while s1 was still sending: it never left, and did not join
    # anew. So the others could be drained; s9 while the run still had it.
    rows = [("drained", "s1"), ("admitted", "s1")]
    rows += [("drained", name) for name in ("s2", "s9", "s3")]
    with (tmp_path / "journal.jsonl").open("a") as journal:
        journal.writelines(json.dumps({"event": e, "site": s}) + "\n" for e, s in rows)
    run = CoordinatedRun(config, "again", tmp_path, lambda row: None, lambda *_: None)
    run.resume()
    registry = run.hub.registry
    standings = [site.standing for site in registry.sites.values()]
    assert standings == ["in", "drained", "drained"] and registry.awaited() == ["s1"]
