"""The transport benchmark measures the real data plane, and says what it measured it on."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import transport, transport_plot, wan
from benchmarks.wan import WanLink

KEYS = "link rate_mbit rtt_ms loss cc channels goodput_mbit tcp_mbit ratio emulation".split()

RATE_MBIT = 200  # the warm-up sends 8 MiB at a time, however slow the link

EARLIER = {
    "link": "60 Mbit/s, 100 ms",
    "rate_mbit": 60.0,
    "rtt_ms": 100.0,
    "loss": 0.0,
    "cc": "reno",
    "channels": 2,
    "goodput_mbit": 50.0,
    "tcp_mbit": 50.0,
    "ratio": 1.0,
    "emulation": "tun",
    "way": "up",
}

reason = wan.available()
needs_wan = pytest.mark.skipif(reason is not None, reason=f"no emulated WAN here: {reason}")


@needs_wan
@pytest.mark.slow
@pytest.mark.parametrize("way", ["up", "down"])
def test_a_row_is_measured_drawn_and_appended(tmp_path: Path, way: str) -> None:
    path = tmp_path / "rows.json"
    words = ["--quick", "--seconds", "1", "--rate-mbit", f"{RATE_MBIT}", "--loss", "0"]
    words += ["--channels", "2", "--way", way]
    path.write_text(json.dumps(EARLIER) + "\n")
    command = [sys.executable, transport.__file__, *words, "--cc", "cubic"]
    subprocess.run([*command, "--json", str(path), "--append"], check=True, timeout=240)
    earlier, *rows = [json.loads(line) for line in path.read_text().splitlines()]
    assert earlier == EARLIER and [row["cc"] for row in rows] == ["cubic"]
    for row in rows:
        assert list(row)[: len(KEYS)] == KEYS
        assert row["emulation"] in ("tun", "netem") and row["way"] == way
        # What the link can carry bounds both; a busy machine knows no least.
        for key in ("goodput_mbit", "tcp_mbit"):
            assert 0 < row[key] < RATE_MBIT * transport_plot.TCP_SHARE * 1.01
        assert row["ratio"] == pytest.approx(row["goodput_mbit"] / row["tcp_mbit"], abs=0.01)
    assert (tmp_path / "rows.png").stat().st_size > 10_000


@pytest.mark.slow
def test_without_namespaces_a_shaped_link_stands_in_and_the_row_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transport, "PAUSE_S", 0.0)
    monkeypatch.setattr(transport, "LEAST_BYTES", 1 << 20)  # those before the one that counts
    case = transport.Case(WanLink(80, 20, 0.0), "system", "up", 1, seconds=1, repeats=1)
    (row,) = transport.run([case], None)
    assert row["emulation"] == "shaped"
    assert row["tcp_mbit"] == 80
    assert 0.6 < row["ratio"] <= 1.0


def test_a_picture_needs_no_more_than_one_row(tmp_path: Path) -> None:
    row = {"link": "a", "rate_mbit": 100.0, "loss": 0.0, "cc": "bbr"}
    transport_plot.draw([{**row, "goodput_mbit": 90.0, "tcp_mbit": 80.0}], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size > 5_000
