"""Scripts of two sites, as `fedwan launch` runs them, that go wrong."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.flower.fleet import Fleet, wait_for
from tests.site.support import SCRIPT


@pytest.mark.slow
def test_a_script_that_goes_wrong_is_one_line_and_one_that_blocks_is_not_left_running(
    tmp_path: Path,
) -> None:
    """That of s1 ends early, once that of s2 does not come back to `site`."""
    out, blocks, fleet = tmp_path / "out", tmp_path / "blocks", Fleet()
    words = ("steps=8", "h=4", "eval.every=0", "round.patience_s=100", f"out={out}")
    script = ("python", str(SCRIPT), "{site}", str(blocks))
    launch = fleet.start("-m", "fedwan", "launch", "--sites", "2", *words, "--", *script)
    try:
        _, errors = launch.communicate(timeout=150)
        lines = [line for line in errors.splitlines() if line]
        assert (launch.returncode, len(lines)) == (2, 1), errors
        assert "before the run was over; iterate over `site` to its end" in lines[0]
        assert blocks.exists()
        wait_for(lambda: not fleet.pids(), 10)
    finally:
        fleet.kill()
