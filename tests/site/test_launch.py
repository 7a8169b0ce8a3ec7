"""Scripts of two sites, as `fedwan launch` runs them, that go wrong."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.site.support import ROOT, SCRIPT


@pytest.mark.slow
def test_a_script_that_goes_wrong_is_one_line_and_one_that_blocks_is_not_left_running(
    tmp_path: Path,
) -> None:
    """That of s1 ends early, once that of s2 does not come back to `site`."""
    words = ["steps=8", "h=4", "eval.every=0", "round.patience_s=100", f"out={tmp_path / 'out'}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "MARK": (mark := f"{tmp_path}")}
    command = [sys.executable, "-m", "fedwan", "launch", "--sites", "2", *words]
    command += ["--", sys.executable, str(SCRIPT), "{site}"]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=150
    )
    lines = [line for line in ended.stderr.splitlines() if line]
    assert (ended.returncode, len(lines)) == (2, 1), ended.stderr
    assert "before the run was over; iterate over `site` to its end" in lines[0]
    assert (tmp_path / "blocks").exists()
    deadline = time.monotonic() + 10
    while left := running(mark):
        assert time.monotonic() < deadline, left
        time.sleep(0.1)


def running(mark: str) -> list[str]:
    """Processes that have a value in their environment."""
    found = []
    for path in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"MARK={mark}\0".encode() in path.read_bytes():
                found.append(path.parent.name)
        except OSError:
            continue  # gone meanwhile, or somebody else's
    return found
