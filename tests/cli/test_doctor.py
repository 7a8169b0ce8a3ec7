"""`fedwan doctor link` against a real data plane, and against everything that is none."""

from __future__ import annotations

import json
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from fedwan.cli.main import main
from fedwan.link import client, measure, tls
from fedwan.link.server import DataPlane
from tests.planes import Bench, serving


def fedwan(*words: str) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        main(words)
    return caught.value.code


def error_of(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    """The one line of a command that fails as a user's mistake, without a long wait."""
    began = time.monotonic()
    assert fedwan("doctor", "link", *words) == 2
    assert time.monotonic() - began < 20.0
    text = capsys.readouterr().err
    assert text.startswith("fedwan: ") and text.count("\n") == 1, text
    return text


@pytest.fixture
def plane(tmp_path: Path, identities: Path) -> Iterator[DataPlane]:
    with serving(Bench(tmp_path).hub, identities) as plane:
        yield plane


def test_figures_advice_and_the_same_as_json(
    plane: DataPlane, identities: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "link.json"
    words = ("link.congestion=cubic", "--seconds", "0.5", "--json", str(path))
    address = f"127.0.0.1:{plane.port}"
    assert fedwan("doctor", "link", address, "--identity", str(identities / "s2"), *words) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line[:13].strip() for line in lines] == [
        *("link", "round trip", "up", "down", "site", "advice")
    ]
    assert f"s2 to {address}, 4 channels" in lines[0]
    figures = json.loads(path.read_text())
    assert figures["site"] == "s2" and figures["channels"] == 4
    for way, line in (("up", lines[2]), ("down", lines[3])):
        found = figures[way]
        # Loopback: more than any disk or modem, less than any memory.
        assert 20 < found["mbit"] < 1e6
        assert f"{found['mbit']:.1f} Mbit/s" in line
        if sys.platform == "linux":
            assert found["congestion"] in line
    if sys.platform == "linux":
        assert 0 <= figures["up"]["again"] < 0.5
    assert 0 < figures["rtt_ms"] < 50
    advice = figures["advice"]
    assert (advice["command"] if advice else "nothing to mend") in lines[5]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("127.0.0.1",), "is no host:port"),
        (("127.0.0.1:99999",), "is no host:port"),
        (("no-such-host.invalid:7444",), "no machine is called 'no-such-host.invalid'"),
        (("127.0.0.1:1",), "nothing listens at 127.0.0.1:1"),
        (("127.0.0.1:1", "--identity", "coordinator"), "a coordinator's certificate"),
        (("127.0.0.1:1", "--identity", "nobody"), "ca.crt is missing"),
        (("127.0.0.1:1", "--seconds", "nan"), "--seconds = nan is out of range"),
        (("127.0.0.1:1", "--rate", "-1"), "--rate = -1 is out of range"),
        (("127.0.0.1:1", "link.rtt_ms=100"), "has no effect on a measurement, which heeds link.c"),
        (("127.0.0.1:1", "link.pace=90"), "did you mean 'link.pace_mbit'?"),
        (("127.0.0.1:1", "link.congestion=brr"), "is none of auto, bbr, cubic, system; did you me"),
        (("127.0.0.1:1", "cubic"), "'cubic' is no key=value"),
    ],
)
def test_what_cannot_be_measured_is_one_clear_line(
    identities: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    words: tuple[str, ...],
    says: str,
) -> None:
    monkeypatch.chdir(identities)
    identity = () if "--identity" in words else ("--identity", "s1")
    assert says in error_of(capsys, *words, *identity)


def test_a_foreign_identity_is_one_clear_line(
    plane: DataPlane, foreign_identities: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    address, folder = f"127.0.0.1:{plane.port}", str(foreign_identities / "s1")
    assert "certificate is not accepted" in error_of(capsys, address, "--identity", folder)


def test_a_listener_that_says_nothing_is_given_up(
    identities: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(measure, "PATIENCE_S", 0.2)
    monkeypatch.setattr(tls, "TIMEOUT_S", 0.2)
    monkeypatch.setattr(client, "HANDSHAKE_MS", 200)
    with socket.create_server(("127.0.0.1", 0)) as mute:
        address = f"127.0.0.1:{mute.getsockname()[1]}"
        text = error_of(capsys, address, "--identity", str(identities / "s1"))
    assert "answers, but not as a data plane" in text


@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_it_measures_as_the_run_is_configured_and_words_beat_its_file(
    plane: DataPlane, identities: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config, path = tmp_path / "run.yaml", tmp_path / "link.json"
    config.write_text("steps: 100\nlink:\n  congestion: cubic\n  pace_mbit: 900\n")
    address = f"127.0.0.1:{plane.port}"
    words = ("--identity", str(identities / "s1"), "--seconds", "0.5", "--json", str(path))
    asked = (address, "link.pace_mbit=8", "--config", str(config), *words)
    assert fedwan("doctor", "link", *asked) == 0
    assert "up at 8 Mbit/s at most" in capsys.readouterr().out
    figures = json.loads(path.read_text())
    assert (figures["pace_mbit"], figures["channels"]) == (8.0, 1)
    assert figures["up"]["congestion"] == "cubic"
    assert figures["up"]["mbit"] < 20 < figures["down"]["mbit"]
