"""An emulated wide area: real namespaces, real packets. Needs root."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import wan
from benchmarks.wan import BARE, Star, WanLink
from fedwan.errors import FedwanError, UserError
from tests.planes import eventually

reason = wan.available()
needs_wan = pytest.mark.skipif(reason is not None, reason=f"no emulated WAN here: {reason}")
pytestmark = pytest.mark.slow


def spaces_of(pid: int) -> list[str]:
    return [p.name for p in wan.FOLDER.iterdir() if p.name.startswith(f"fedwan-{pid}-")]


def children_of(pid: int) -> list[str]:
    text = "".join(p.read_text() for p in Path(f"/proc/{pid}/task").glob("*/children"))
    return text.split()


@needs_wan
def test_a_stream_survives_the_loss_of_parts_of_super_packets_intact(tmp_path: Path) -> None:
    data = os.urandom(6 << 20)
    (tmp_path / "data").write_bytes(data)
    code = (
        "import socket, sys\n"
        "s = socket.create_server((sys.argv[1], 7000)); print('up', flush=True)\n"
        "c, _ = s.accept()\n"
        "with open(sys.argv[2], 'wb') as f:\n"
        "    while d := c.recv(1 << 16): f.write(d)\n"
    )
    send = (
        "import socket, sys\n"
        "s = socket.create_connection((sys.argv[1], 7000))\n"
        "s.sendall(open(sys.argv[2], 'rb').read())\n"
    )
    with Star(1, WanLink(200, 2, loss=0.01)) as star:
        address = star.coordinator.address
        server = star.coordinator.popen(
            [sys.executable, "-c", code, address, str(tmp_path / "copy")], stdout=subprocess.PIPE
        )
        assert server.stdout is not None
        server.stdout.readline()
        star.sites[0].run(
            [sys.executable, "-c", send, address, str(tmp_path / "data")], check=True, timeout=60
        )
        server.communicate(timeout=60)
        counts = star.counts(0)["up"]
    assert (tmp_path / "copy").read_bytes() == data
    assert counts["lost"] / counts["packets"] == pytest.approx(0.01, abs=0.006)


@needs_wan
@pytest.mark.parametrize("link", [WanLink(), BARE])
def test_nothing_stays_behind_even_after_an_exception(link: WanLink) -> None:
    before = children_of(os.getpid())
    with pytest.raises(ZeroDivisionError), Star(2, link) as star:
        child = star.sites[1].popen(["sleep", "1000"])
        assert len(spaces_of(os.getpid())) == 3
        raise ZeroDivisionError
    assert spaces_of(os.getpid()) == []
    assert child.poll() is not None
    assert children_of(os.getpid()) == before


HOLDER = """
import signal
from benchmarks.wan import Star
with Star(2):
    print("up", flush=True)
    signal.pause()
"""


def start_holder() -> tuple[subprocess.Popen[str], int]:
    words = [sys.executable, "-c", HOLDER]
    child = subprocess.Popen(words, stdout=-1, stderr=-3, text=True, cwd=wan.ROOT)
    assert child.stdout is not None and child.stdout.readline() == "up\n"
    return child, child.pid


@needs_wan
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL])
def test_everything_is_removed_when_its_process_is_ended(number: signal.Signals) -> None:
    child, pid = start_holder()
    wires = children_of(pid)
    assert len(spaces_of(pid)) == 3 and wires
    child.send_signal(number)
    child.communicate(timeout=15)
    eventually(lambda: not spaces_of(pid))
    eventually(lambda: not any(Path(f"/proc/{wire}").exists() for wire in wires))


@needs_wan
def test_what_a_killed_star_and_its_wire_left_is_swept_up_by_the_next() -> None:
    child, pid = start_holder()
    for victim in (*children_of(pid), str(pid)):
        os.kill(int(victim), signal.SIGKILL)
    child.communicate(timeout=15)
    assert len(spaces_of(pid)) == 3
    with Star(1):
        assert spaces_of(pid) == []


@pytest.mark.parametrize("setting", [{"loss": 1.0}, {"rtt_ms": -1}, {"rate_mbit": float("nan")}])
def test_a_link_that_cannot_be_is_refused(setting: dict[str, float]) -> None:
    (name,) = setting
    with pytest.raises(UserError, match=f"{name} = "):
        WanLink(**setting)


def test_a_star_that_is_not_up_says_so() -> None:
    with pytest.raises(FedwanError, match="not up"):
        Star(1).change(0, WanLink())


def test_without_the_right_to_make_namespaces_the_error_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(wan, "available", lambda: "run as root")
    with pytest.raises(wan.WanUnavailable, match="run as root.*ShapedLink"), Star(1):
        pass
