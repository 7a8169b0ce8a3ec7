"""A site as its service starts it: torchrun, an assignment, a data plane under mutual TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from fedwan.site.assignment import read_outcome
from tests.site.support import ROOT, Served, asked

TORCHRUN = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
SCRIPT = Path(__file__).with_name("script.py")


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_the_next_start_ends_on_the_same_bits(
    identities: Path, tmp_path: Path
) -> None:
    shas = set()
    for way in ("", "rank_0_dies"):
        served = Served(asked("h=2", "round.patience_s=150"), tmp_path / f"{way}run", identities)
        with served.serving():
            if way:
                assert served.start(*TORCHRUN, SCRIPT, way).wait(120) != 0
            assert served.start(*TORCHRUN, SCRIPT).wait(120) == 0, served.stderr.read_text()
        outcome, has_joined = read_outcome(served.assignment)
        assert has_joined and outcome is not None and not outcome.error
        shas.add(served.sha256)
        assert served.run.site_sha256() == {"s1": served.sha256}
    assert len(shas) == 1


@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "says"),
    [
        ("blocks", "s1 at step 1): a script that does not come back to `site` has to be mended"),
        ("ends_early", "before the run was over; iterate over `site` to its end"),
    ],
)
def test_a_script_that_goes_wrong_is_one_line_and_leaves_nothing_running(
    way: str, says: str, tmp_path: Path
) -> None:
    patience = f"round.patience_s={30 if way == 'blocks' else 60}"
    words = ["steps=8", "h=4", "eval.every=0", patience, f"out={tmp_path / 'out'}"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "MARK": (mark := f"{tmp_path}")}
    command = [sys.executable, "-m", "fedwan", "launch", "--sites", "1", *words]
    command += ["--", sys.executable, str(SCRIPT), way]
    ended = subprocess.run(
        command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120
    )
    lines = [line for line in ended.stderr.splitlines() if line]
    assert (ended.returncode, len(lines)) == (2, 1) and says in lines[0], ended.stderr
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
