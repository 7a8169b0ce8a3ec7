"""A site as its service starts it: torchrun, an assignment, a data plane under mutual TLS."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from fedwan.config import to_json
from fedwan.coordinator.run import CoordinatedRun
from fedwan.link.server import DataPlane
from fedwan.link.tls import Identity
from fedwan.site.assignment import VARIABLE, Assignment, read_outcome
from fedwan.state import hash_state
from tests.site.support import asked

SCRIPT = Path(__file__).with_name("script.py")


class Served:
    """A run of one site behind a real socket."""

    def __init__(self, folder: Path, identities: Path) -> None:
        self.config = asked("h=2", "round.patience_s=60")
        self.folder = folder
        self.identities = identities
        self.run = CoordinatedRun(
            *(self.config, "run-1", folder, lambda row: None, lambda *_: None, lambda *_: None),
            silence_s=1.0,
        )
        self.sha256 = ""
        self._thread = threading.Thread(target=self._train)

    def _train(self) -> None:
        self.sha256 = hash_state(self.run.train().state)

    @contextmanager
    def serving(self) -> Iterator[DataPlane]:
        identity = Identity.load(self.identities / "coordinator", "coordinator")
        plane = DataPlane(self.run.hub, identity, "127.0.0.1", 0, 24, 0.3, "auto")
        plane.start()
        self._thread.start()
        try:
            yield plane
            self._thread.join(60)
        finally:
            self.run.hub.finish("the test ended")
            self._thread.join(10)
            plane.stop(0.1)

    def start(self, plane: DataPlane, *words: object) -> int:
        """The site, until torchrun ends; its exit status."""
        path = self.folder / "assignment.json"
        Assignment(
            address=f"127.0.0.1:{plane.port}",
            run_id="run-1",
            config=to_json(self.config),
            site="s1",
            identity=str(self.identities / "s1"),
            dir=str(self.folder / "s1"),
            data_path="",
            show_samples=False,
            parent=os.getpid(),
        ).write(path)
        torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
        return subprocess.run(
            [*torchrun, "--nproc-per-node", "2", str(SCRIPT), *map(str, words)],
            env=dict(os.environ) | {VARIABLE: str(path), "PYTHONPATH": str(Path.cwd())},
            cwd=Path.cwd(),
            capture_output=True,
            timeout=120,
        ).returncode


@pytest.mark.slow
def test_a_rank_that_is_killed_ends_the_others_and_the_next_start_ends_on_the_same_bits(
    identities: Path, tmp_path: Path
) -> None:
    shas = set()
    for name, killed in (("whole", ()), ("first", (0, 5)), ("second", (1, 5))):
        served = Served(tmp_path / name, identities)
        with served.serving() as plane:
            if killed:
                assert served.start(plane, *killed) != 0
            assert served.start(plane) == 0
        outcome, has_joined = read_outcome(served.folder / "assignment.json")
        assert has_joined and outcome is not None and not outcome.error
        shas.add(served.sha256)
        assert served.run.site_sha256() == {"s1": served.sha256}
    assert len(shas) == 1
