"""A process of a site that is not its leader: `python -m fedwan.site.follower FOLDER RANK SIZE`.

It is started by its leader, reads the run's configuration from the folder that they share, and ends
with the leader, whose end it notices by the pipe that its standard input is.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from fedwan.app import find_app, load_strategy, load_workload
from fedwan.config import Config, from_json, to_json
from fedwan.errors import FedwanError
from fedwan.memory import tune_allocator
from fedwan.site.common import share_out
from fedwan.site.led import follow
from fedwan.site.sharing import SharedWorkload
from fedwan.site.team import Team
from fedwan.workloads.base import Workload

__all__ = ["main", "shared"]

_GRACE_S = 10.0
_POLL_S = 0.05


@contextmanager
def shared(workload: Workload, config: Config, device: torch.device) -> Iterator[Workload]:
    """The workload as `site.processes` take its steps together, of which this one leads.

    Args:
        workload: of this process.
        config: resolved.
        device: of this process, the first of the site's.

    Raises:
        FedwanError: another process ended, or they did not end on the same weights.
    """
    size = config.site.processes
    if size == 1:
        yield workload
        return
    is_gradient = load_strategy(config.strategy).build(config).contributes == "gradient"
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "config.json").write_text(to_json(config))
        others = [_start(folder, rank, size) for rank in range(1, size)]
        team = None
        try:
            _await(others, folder)
            team = Team(folder, 0, size, device)
            shares = share_out(workload, team, config.site.partition, device)
            leader = SharedWorkload(workload, team, shares, shares_gradients=is_gradient)
            yield leader
            if not leader.stop():
                raise FedwanError(
                    f"the {size} processes of this site did not end on the same weights: a "
                    "computation differs between them; set site.processes=1"
                )
        except RuntimeError as error:
            raise _explain(others, error) from None
        finally:
            if team is not None:
                team.close()
            _end(others)


def main(words: list[str]) -> int:
    """Take part until the leader says stop; the exit code."""
    folder, rank, size = Path(words[0]), int(words[1]), int(words[2])
    threading.Thread(target=_end_with_leader, name="leash", daemon=True).start()
    tune_allocator()
    try:
        config = from_json((folder / "config.json").read_text())
        if config.threads:
            torch.set_num_threads(config.threads)
        device = _device(config, rank)
        workload = load_workload(config.workload).build(config, device)
        _ready(folder, rank).touch()
        team = Team(folder, rank, size, device)
        shares = share_out(workload, team, config.site.partition, device)
        follow(workload, team, shares, config.inner)
        team.close()
    except FedwanError as error:
        print(f"process {rank} of the site: {error}", file=sys.stderr)
        return error.exit_code
    return 0


def _start(folder: Path, rank: int, size: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedwan.site.follower", str(folder), str(rank), str(size)],
        stdin=subprocess.PIPE,
        cwd=find_app(),
        start_new_session=True,  # a terminal's Ctrl-C is the leader's to answer
    )


def _ready(folder: Path, rank: int) -> Path:
    return folder / f"ready-{rank}"


def _await(others: list[subprocess.Popen[bytes]], folder: Path) -> None:
    """Wait until all others have built the workload: who has not would keep its leader waiting."""
    waiting = dict(enumerate(others, start=1))
    while waiting:
        for rank, process in list(waiting.items()):
            if _ready(folder, rank).exists():
                del waiting[rank]
            elif process.poll() is not None:
                raise _ended(rank, process.returncode)
        time.sleep(_POLL_S)


def _ended(rank: int, code: int) -> FedwanError:
    return FedwanError(
        f"process {rank} of this site ended with code {code}; its last words are in this site's log"
    )


def _end(others: list[subprocess.Popen[bytes]]) -> None:
    for process in others:
        assert process.stdin is not None
        process.stdin.close()
    for process in others:
        try:
            process.wait(_GRACE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _explain(others: list[subprocess.Popen[bytes]], error: RuntimeError) -> Exception:
    """Of a call that failed since another process ended; or as it was."""
    for rank, process in enumerate(others, start=1):
        try:
            code = process.wait(1.0)
        except subprocess.TimeoutExpired:
            continue
        return _ended(rank, code)
    return error


def _device(config: Config, rank: int) -> torch.device:
    if config.device == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    torch.cuda.set_device(rank)
    return torch.device("cuda", rank)


def _end_with_leader() -> None:
    # Nothing is ever written. Not through sys.stdin, whose lock this thread would hold at the end.
    os.read(0, 1)
    os._exit(1)


if __name__ == "__main__":
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(
        code
    )  # threads of torch's and the leash would abort an interpreter that takes its time
