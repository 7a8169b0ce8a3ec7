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
