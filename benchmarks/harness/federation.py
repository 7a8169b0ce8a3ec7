"""A run with all its processes, in a network and on a disk of its own.

As `fedwan demo` starts it, or as services. Needs root, `unshare`, `nsenter` and `ip`.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from benchmarks.harness.fleet import app
from benchmarks.wan import ROOT
from fedwan.errors import FedwanError
from fedwan.link import pki
from fedwan.output.journal import JOURNAL, verify

PATIENCE_S = 300.0
"""A run that does not go on for so long hangs."""
MARK = "FEDWAN_CHAOS"
ENV = {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
DOOR, LISTEN = "127.0.0.1:7443", "127.0.0.1:7444"
_COORDINATOR = {"FEDWAN_CHAOS_PARTY": "coordinator"}
RECIPE = "fedwan.site.recipe"
"""In the words of a site's training processes."""
FEDWAN = (sys.executable, "-m", "fedwan")
IN_NETWORK = (
    "ip link set lo up && ip rule add pref 20 lookup local && ip rule del pref 0 && "
    'exec "$@"'  # there is room now for a rule before all others
)
NEW_NETWORK = ("unshare", "-n", "--", "sh", "-c", IN_NETWORK, "sh")


class Ended(FedwanError):
    """A run ended before what was asked of it could be done."""


class Federation:
    """Started and resumed as a user would."""

    def __init__(self, folder: Path, words: Sequence[str], disk: str = "size=400m") -> None:
        self.folder, self.out, self._words = folder, folder / "out", words
        self.log = folder.with_suffix(".log")
        self.child: subprocess.Popen[bytes]
        self._mark = uuid.uuid4().hex
        folder.mkdir()
        _call("mount", "-t", "tmpfs", "-o", disk, "tmpfs", str(folder))

    def start(self, *, resume: bool = False) -> None:
        words = ["demo", f"out={self.out}", *self._words]
        if resume:
            words = ["run", str(self.out / "config.yaml"), "--resume"]
        self.child = self._popen(*NEW_NETWORK, *FEDWAN, *words)

    def _popen(self, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        with self.log.open("ab") as log:
            return subprocess.Popen(
                words,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=app(),
                env={**os.environ, **ENV, MARK: self._mark, **environ},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def journal(self) -> list[dict[str, Any]]:
        """Its whole lines, newest last."""
        path = self.out / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

    def version(self) -> int:
        """The newest one that the journal tells of; 0 for none."""
        versions = [row["version"] for row in self.journal() if row["event"] == "version"]
        return int(versions[-1]) if versions else 0

    def reach(self, version: int) -> str:
        """Wait for a version, or for the end; resume what has ended before. How it ended, if so."""
        began, ended = time.monotonic(), ""
        while self.version() < version:
            code = self.child.poll()
            if code == 0:
                break
            if code is not None:
                ended = f"{ended} {code}".strip()
                self.await_silence()
                self.start(resume=True)
            if time.monotonic() - began > PATIENCE_S:
                raise FedwanError(f"at version {self.version()} after {PATIENCE_S:g} s")
            time.sleep(0.05)
        return ended

    def await_silence(self, **environ: str) -> None:
        """Processes of a run that was killed end by themselves, soon."""
        deadline = time.monotonic() + 30
        while left := self.processes(**environ):
            if time.monotonic() > deadline:
                raise FedwanError(f"processes are left 30 s after the end: {left}")
            time.sleep(0.05)

    def processes(self, text: str = "", **environ: str) -> list[psutil.Process]:
        """All that belong to it, or those whose words hold a text and which have variables."""
        wanted = {MARK: self._mark, **environ}.items()
        return [
            process
            for process in psutil.process_iter(["environ", "cmdline"])
            if wanted <= (process.info["environ"] or {}).items()
            and process.info["cmdline"]
            and text in " ".join(process.info["cmdline"])
        ]

    def find(self, rng: random.Random, text: str, **environ: str) -> psutil.Process:
        """One process; waits for it, since some are being replaced. `Ended` if the run has."""
        deadline = time.monotonic() + PATIENCE_S
        while time.monotonic() < deadline and self.child.poll() is None:
            if found := self.processes(text, **environ):
                return rng.choice(found)
            time.sleep(0.05)
        if self.child.poll() is None:
            raise FedwanError(f"no process {text!r}")
        raise Ended(f"no process {text!r}")

    def inside(self, *words: str) -> str:
        """What a command prints in its network, which is gone with it: `Ended` then."""
        for process in self.processes():
            try:
                return _call("nsenter", "-t", str(process.pid), "-n", *words)
            except subprocess.CalledProcessError:
                if process.is_running():
                    raise
        raise Ended(f"no process is left for {' '.join(words)}")

    def sha256(self) -> str:
        return str(json.loads((self.out / "summary.json").read_text())["global_sha256"])

    def problem(self, wanted: str) -> str:
        """What is not as it should be after the end; empty if nothing."""
        if self.child.returncode != 0:
            return f"status {self.child.returncode}, see {self.log}"
        try:
            self.await_silence()
            verify(self.out)
        except FedwanError as error:
            return str(error)
        if left := [str(path) for path in self.out.rglob("*.tmp")]:
            return f"left: {', '.join(left)}"
        if self.sha256() == wanted:
            return ""
        return f"weights {self.sha256()[:8]}, not {wanted[:8]}"

    def close(self, *, is_kept: bool = False) -> None:
        """End what is left of it, and its disk; what is to be looked at is copied beside it."""
        for process in self.processes():
            kill(process)
        self.child.wait()
        self.await_silence()
        if is_kept:
            no_sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(self.out, self.folder.with_suffix(".kept"), ignore=no_sockets)
        _call("umount", "--lazy", str(self.folder))  # a process may still be on its way out


class Services(Federation):
    """A coordinator and sites that start and end by themselves, as on machines of their own.

    What is waited for and resumed is the coordinator.
    """

    def __init__(self, folder: Path, sites: Sequence[str], words: Sequence[str], disk: str) -> None:
        super().__init__(folder, words, disk)
        pki.federation(folder / "pki", ["127.0.0.1"], sites)
        (folder / "run.yaml").write_text("")
        self._services = [self._popen(*NEW_NETWORK, "sleep", "infinity")]
        for site in sites:
            keys = {"site": site, "identity": folder / "pki" / site, "dir": folder / site}
            lines = [f"{key}: {value}\n" for key, value in (keys | {"door": DOOR}).items()]
            (folder / f"{site}.yaml").write_text("".join(lines))
            self._services.append(self._enter("site", str(folder / f"{site}.yaml")))

    def _enter(self, *words: str, **environ: str) -> subprocess.Popen[bytes]:
        network = ("nsenter", "-t", str(self._services[0].pid), "-n", "--")
        return self._popen(*network, *FEDWAN, *words, **environ)

    def start(self, *, resume: bool = False) -> None:
        identity = ("--identity", str(self.folder / "pki" / "coordinator"))
        ports = (f"link.door={DOOR}", f"link.listen={LISTEN}")
        words = (str(self.folder / "run.yaml"), *identity, f"out={self.out}", *ports, *self._words)
        more = ("--resume",) if resume else ()
        self.child = self._enter("coordinator", *words, *more, **_COORDINATOR)

    def await_silence(self, **environ: str) -> None:
        super().await_silence(**(environ or _COORDINATOR))

    def close(self, *, is_kept: bool = False) -> None:
        super().close(is_kept=is_kept)
        for service in self._services:
            service.wait()


def _call(*words: str) -> str:
    return subprocess.run(words, check=True, stdout=subprocess.PIPE, text=True).stdout


def kill(process: psutil.Process) -> None:
    with suppress(psutil.NoSuchProcess):
        process.kill()
