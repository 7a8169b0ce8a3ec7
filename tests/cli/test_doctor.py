"""`fedwan doctor`: links to a data plane and to what is none, and folders as runs leave them."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from fedwan.config import Config, dump
from fedwan.doctor.diagnosis import Doctor
from fedwan.link import client, measure, tls
from fedwan.link.server import DataPlane
from tests.cli.conftest import Command, mistake
from tests.doctor.records import SITES, Bend, at, figures, healthy
from tests.planes import Bench, serving


def error_of(fedwan: Command, *words: str) -> str:
    """The one line of a command that fails as a user's mistake, without a long wait."""
    began = time.monotonic()
    text = mistake(fedwan, "doctor", "link", *words)
    assert time.monotonic() - began < 20.0
    return text


@pytest.fixture
def plane(tmp_path: Path, identities: Path) -> Iterator[DataPlane]:
    with serving(Bench(tmp_path).hub, identities) as plane:
        yield plane


linux = pytest.mark.skipif(sys.platform != "linux", reason="tells of TCP what Linux tells")


@pytest.mark.slow
@linux
def test_figures_and_the_same_as_json(
    plane: DataPlane, identities: Path, tmp_path: Path, fedwan: Command
) -> None:
    path = tmp_path / "link.json"
    words = ("link.congestion=cubic", "--seconds", "0.5", "--json", str(path))
    address = f"127.0.0.1:{plane.port}"
    identity = str(identities / "s2")
    code, out, _ = fedwan("doctor", "link", address, "--identity", identity, *words)
    lines = out.splitlines()
    assert code == 0
    assert [line[:13].strip() for line in lines] == ["link", "round trip", "up", "down", "advice"]
    assert f"s2 to {address}, 4 channels" in lines[0]
    figures = json.loads(path.read_text())
    assert figures["site"] == "s2" and figures["channels"] == 4
    for way, line in (("up", lines[2]), ("down", lines[3])):
        found = figures[way]
        # Loopback: more than any disk or modem, less than any memory.
        assert 20 < found["mbit"] < 1e6
        assert f"{found['mbit']:.1f} Mbit/s" in line
        assert found["congestion"] in line
    assert 0 <= figures["up"]["again"] < 0.5
    assert 0 < figures["rtt_ms"] < 50


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("127.0.0.1",), "is no host:port"),
        (("127.0.0.1:99999",), "is no host:port"),
        (("coordinator..example.com:7444",), "is no host:port"),
        ((f"{'a' * 64}.example.com:7444",), "is no host:port"),
        (("no-such-host.invalid:7444",), "no-such-host.invalid:7444 cannot be reached ("),
        (("127.0.0.1:1",), "127.0.0.1:1 cannot be reached (Connection refused)"),
        (("127.0.0.1:1", "--identity", "coordinator"), "a coordinator's certificate"),
        (("127.0.0.1:1", "--identity", "nobody"), "ca.crt is missing"),
        (("127.0.0.1:1", "--seconds", "nan"), "--seconds = nan is out of range"),
        (("127.0.0.1:1", "link.rtt_ms=100"), "link.rtt_ms=100 has no effect on a measurement"),
        (("127.0.0.1:1", "link.pace=90"), "did you mean 'link.pace_mbit'?"),
        (("127.0.0.1:1", "link.congestion=brr"), "is none of auto, bbr, cubic, system; did you me"),
        (("127.0.0.1:1", "cubic"), "'cubic' is no key=value"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    identities: Path,
    fedwan: Command,
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(identities)
    identity = () if "--identity" in words else ("--identity", "s1")
    assert says in error_of(fedwan, *words, *identity)


def test_a_foreign_identity_is_one_clear_line(
    plane: DataPlane, foreign_identities: Path, fedwan: Command
) -> None:
    address, folder = f"127.0.0.1:{plane.port}", str(foreign_identities / "s1")
    assert "certificate is not accepted" in error_of(fedwan, address, "--identity", folder)


def test_a_listener_that_says_nothing_is_given_up(
    identities: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "PATIENCE_S", 0.2)
    monkeypatch.setattr(tls, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(client, "HANDSHAKE_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        text = error_of(fedwan, address, "--identity", str(identities / "s1"))
    assert "answers not as a data plane" in text


@pytest.mark.slow
@linux
def test_it_measures_as_words_say(
    plane: DataPlane, identities: Path, tmp_path: Path, fedwan: Command
) -> None:
    path, identity = tmp_path / "link.json", str(identities / "s1")
    words = ("--identity", identity, "--seconds", "0.5", "--json", str(path), "link.pace_mbit=8")
    code, out, _ = fedwan("doctor", "link", f"127.0.0.1:{plane.port}", *words)
    assert code == 0 and "up at 8 Mbit/s at most" in out
    figures = json.loads(path.read_text())
    assert figures["pace_mbit"] == 8.0 and figures["up"]["mbit"] < 20 < figures["down"]["mbit"]


BYTES = at("s2", figures(x_low=0.0, x_high=255.0))


def make_run(folder: Path, bend: Bend = lambda record: record, rounds: int = 6) -> str:
    doctor, rows = Doctor(), list[dict[str, Any]]()
    for version in range(1, rounds + 1):
        round_ = [{"kind": "round", **asdict(bend(healthy(version, site)))} for site in SITES]
        rows += round_ + [{"t": 0.0, **row} for row in doctor.look(round_)]
    dump(Config(sites=4), folder / "config.yaml")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder)


def test_a_finding_is_told_with_round_site_network_why_and_mend(
    tmp_path: Path, fedwan: Command
) -> None:
    path = tmp_path / "found.json"
    code, text, err = fedwan("doctor", make_run(tmp_path, BYTES), "--json", str(path))
    lines = text.splitlines()
    assert code == 0
    assert lines[0] == f"{tmp_path}: 6 rounds, 4 sites, not finished"
    assert lines[2] == "round 3, site s2, all networks: range"
    assert lines[3].split()[0] == "why" and "from 0 to 255" in lines[3]
    assert lines[4].split()[0] == "mend" and "[-1, 1]" in lines[4]
    (finding,) = json.loads(path.read_text())
    assert (finding["kind"], finding["site"], finding["version"]) == ("range", "s2", 3)


def test_empty_short_and_damaged_runs_are_read_as_far_as_they_go(
    tmp_path: Path, fedwan: Command
) -> None:
    folder, path = make_run(tmp_path, BYTES), tmp_path / "metrics.jsonl"
    path.unlink()
    code, text, _ = fedwan("doctor", folder)
    assert code == 0 and "no round yet" in text and "too early to tell" in text
    code, text, _ = fedwan("doctor", make_run(tmp_path, rounds=2))
    assert code == 0 and text.splitlines()[-1] == "too early to tell: that takes 3 rounds or more"
    path.write_text("nonsense\n{}\n")
    assert "line 1 is no record" in mistake(fedwan, "doctor", folder)
    told = mistake(fedwan, "doctor", str(tmp_path / "lnik"))
    assert "lnik' holds no run (no config.yaml); give the folder" in told


def test_a_folder_may_bear_the_name_of_a_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fedwan: Command
) -> None:
    monkeypatch.chdir(tmp_path)
    for name, given in (("run", "run"), ("link", "./link")):
        Path(name).mkdir()
        make_run(Path(name), rounds=2)
        code, text, err = fedwan("doctor", given)
        assert (code, err) == (0, "") and text.startswith(f"{name}: 2 rounds"), err


def test_a_run_that_stopped_is_told_with_the_way_on(tmp_path: Path, fedwan: Command) -> None:
    folder = make_run(tmp_path)
    row = {"kind": "event", "t": 10.0, "event": "stopped", "site": None, "text": "the end"}
    (tmp_path / "journal.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "checkpoint").mkdir()
    (tmp_path / "checkpoint" / "coordinator.safetensors").touch()
    _, text, _ = fedwan("doctor", folder)
    assert f"fedwan run {tmp_path / 'config.yaml'} --resume" in " ".join(text.split())
