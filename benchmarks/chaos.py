"""Real processes under faults at random moments: does a run end on the undisturbed run's bits?

A federation of two sites with two processes each, as `fedwan demo` starts it, in a network
namespace and on a small disk of its own. While it trains, a fault is drawn, caused, and the seconds
are counted until the run is two versions further; where the fault ended the run, it is resumed at
once. Then the next one, to the end of the run. It must end with status 0 and the weights of the run
that nothing disturbed; its journal must be whole, and neither processes nor unfinished files may be
left. Needs root, `unshare`, `nsenter`, `ip` and `ss`. `--quick`: 20 faults.

Clocks are not moved: the processes share this machine's.

Row: run fault version seconds ended problem
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness.fleet import app
from benchmarks.harness.table import Row
from benchmarks.wan import ROOT
from fedwan.coordinator.model import CHECKPOINT
from fedwan.errors import FedwanError
from fedwan.output.journal import JOURNAL, verify
from fedwan.site.assignment import VARIABLE

SITES = 2
H = 20
SMALL = (f"sites={SITES}", f"h={H}", "site.processes=2", "threads=1", "eval.every=0")
FURTHER = 2
"""Versions after a fault by which the run has recovered: one may have been under way."""
PATIENCE_S = 300.0
"""A run that does not go on for so long hangs."""
PAUSE_S = 2.0
"""Between recovery and the next fault, on average."""
DISK = "size=400m"
MARK = "FEDWAN_CHAOS"
IN_NETWORK = (
    "ip link set lo up && ip rule add pref 20 lookup local && ip rule del pref 0 && "
    'exec "$@"'  # there is room now for a rule before all others
)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, default=300)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="of each run, H = 20")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    if os.geteuid():
        raise FedwanError("chaos makes a network and a disk of its own, which needs root")
    kinds = [kind for kind in KINDS if args.only in kind]
    count, num_runs = 20 if args.quick else args.faults, 0
    folder = Path(tempfile.mkdtemp(prefix="fedwan-chaos-"))
    words = (f"steps={args.steps}", *SMALL)
    undisturbed = Federation(folder / "undisturbed", words)
    undisturbed.start()
    undisturbed.wait()
    wanted = undisturbed.sha256()
    undisturbed.close()
    while count > 0:
        num_runs += 1
        rng = random.Random(f"{args.seed} {num_runs}")
        run = Federation(folder / f"run{num_runs}", words)
        problem = "interrupted"
        try:
            for row in _disturb(run, args.steps // H, rng, kinds):
                count -= 1
                yield row | {"run": num_runs}
            problem = run.problem(wanted)
        finally:
            run.close(is_kept=bool(problem))
        yield _row("the end", 0, 0.0, run.child.returncode, problem) | {"run": num_runs}


def _row(fault: str, version: int, seconds: float, ended: Any, problem: str = "") -> Row:
    return {
        "run": 0,
        "fault": fault,
        "version": version,
        "seconds": round(seconds, 2),
        "ended": ended,
        "problem": problem,
    }


def _disturb(
    run: Federation, versions: int, rng: random.Random, kinds: Sequence[str]
) -> Iterator[Row]:
    """Faults one after the other until the run is done."""
    run.start()
    run.reach(2)
    while True:
        time.sleep(rng.expovariate(1 / PAUSE_S))
        if run.child.poll() is not None:
            return
        kind, version = rng.choice(kinds), run.version()
        if version + FURTHER >= versions:  # it could not be seen to recover
            run.reach(versions + 1)
            return
        began = time.monotonic()
        problem = ""
        try:
            KINDS[kind](run, rng)
            ended = run.reach(version + FURTHER)
        except FedwanError as error:
            if run.child.poll() == 0:
                return  # it was done before there was anything to disturb
            ended, problem = "never", str(error)
        yield _row(kind, version, time.monotonic() - began, ended or "no", problem)
        if problem:
            return


def summarise(rows: Sequence[Row]) -> list[str]:
    lines = [
        "| fault | caused | recovered | median s | 95 % within s | longest s |",
        "| --- | --- | --- | --- | --- | --- |",
    ]
    for kind in [*KINDS, ""]:
        of_kind = [r for r in rows if r["fault"] == kind or (not kind and r["fault"] in KINDS)]
        times = sorted(r["seconds"] for r in of_kind if not r["problem"])
        if times:
            late = times[math.ceil(0.95 * len(times)) - 1]
            figures = f"{statistics.median(times):.1f} | {late:.1f} | {times[-1]:.1f}"
            lines.append(f"| {kind or 'all'} | {len(of_kind)} | {len(times)} | {figures} |")
    ends = [row for row in rows if row["fault"] == "the end"]
    good = sum(not row["problem"] for row in ends)
    lines.append(
        f"{good} of {len(ends)} runs ended on the undisturbed weights, nothing left behind"
    )
    return lines


class Federation:
    """A run in a namespace of its own, started and resumed as a user would."""

    def __init__(self, folder: Path, words: Sequence[str], disk: str = DISK) -> None:
        self.folder, self.out, self._words = folder, folder / "out", words
        self.log = folder.with_suffix(".log")
        self.child: subprocess.Popen[bytes]
        self._marks = f"{MARK}={uuid.uuid4().hex}"
        folder.mkdir()
        _call("mount", "-t", "tmpfs", "-o", disk, "tmpfs", str(folder))

    def start(self, *, resume: bool = False) -> None:
        config = self.out / "config.yaml"
        words = ["run", str(config), "--resume"] if resume else ["demo", f"out={self.out}"]
        words += () if resume else self._words
        inside = ["unshare", "-n", "--", "sh", "-c", IN_NETWORK, "sh"]
        name, _, value = self._marks.partition("=")
        with self.log.open("ab") as log:
            self.child = subprocess.Popen(
                [*inside, sys.executable, "-m", "fedwan", *words],
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=app(),
                env={**os.environ, "PYTHONPATH": str(ROOT), name: value},
                preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
            )

    def wait(self) -> None:
        """Until it has ended by itself."""
        self.child.wait(PATIENCE_S)

    def version(self) -> int:
        """The newest one that the journal tells of; 0 for none."""
        versions = [row["version"] for row in self.journal() if row["event"] == "version"]
        return int(versions[-1]) if versions else 0

    def journal(self) -> list[dict[str, Any]]:
        """Its whole lines, newest last."""
        path = self.out / JOURNAL
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        return [json.loads(line) for line in lines if line.endswith(b"\n")]

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

    def await_silence(self) -> None:
        """Processes of a run that was killed end by themselves, soon."""
        deadline = time.monotonic() + 30
        while self.processes():
            if time.monotonic() > deadline:
                raise FedwanError(f"processes are left 30 s after the end: {self.processes()}")
            time.sleep(0.05)

    def processes(self) -> dict[int, str]:
        """All that belong to it: their words, by number."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                if self._marks.encode() in (path / "environ").read_bytes().split(b"\0"):
                    words = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode()
                    found[int(path.name)] = words
            except OSError:
                continue
        return {number: words for number, words in found.items() if words}

    def find(self, rng: random.Random, text: str, rank: int | None = None) -> int:
        """One process whose words hold a text; waits for one, since some are being replaced."""
        deadline = time.monotonic() + PATIENCE_S
        while self.child.poll() is None and time.monotonic() < deadline:
            found = [number for number, words in self.processes().items() if text in words]
            if rank is not None:
                found = [number for number in found if _has_rank(number, rank)]
            if found:
                return rng.choice(found)
            time.sleep(0.05)
        raise FedwanError(f"no process {text!r}")

    def inside(self, *words: str) -> None:
        """Run a command in its network."""
        number = next(iter(self.processes()))
        _call("nsenter", "-t", str(number), "-n", *words)

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
        for number in self.processes():
            signal_to(number, signal.SIGKILL)
        self.child.wait()
        while self.processes():
            time.sleep(0.05)
        if is_kept:
            no_sockets = shutil.ignore_patterns("*.sock")
            shutil.copytree(self.out, self.folder.with_suffix(".kept"), ignore=no_sockets)
        _call("umount", "--lazy", str(self.folder))  # a process may still be on its way out


def _call(*words: str) -> None:
    subprocess.run(words, check=True, stdout=subprocess.DEVNULL)


def signal_to(number: int, what: signal.Signals) -> None:
    try:
        os.kill(number, what)
    except ProcessLookupError:
        pass


def _has_rank(number: int, rank: int) -> bool:
    try:
        return f"RANK={rank}".encode() in Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    except OSError:
        return False


# Faults ------------------------------------------------------------------------------------------

Fault = Callable[[Federation, random.Random], None]
RECIPE = "fedwan.site.recipe"


def _killed(text: str, rank: int | None = None) -> Fault:
    return lambda run, rng: signal_to(run.find(rng, text, rank), signal.SIGKILL)


def _stopped(
    text: str, rank: int | None = None, least_s: float = 1.0, most_s: float = 20.0
) -> Fault:
    def fault(run: Federation, rng: random.Random) -> None:
        number = run.find(rng, text, rank)
        signal_to(number, signal.SIGSTOP)
        time.sleep(rng.uniform(least_s, most_s))
        signal_to(number, signal.SIGCONT)

    return fault


def _interrupted(run: Federation, rng: random.Random) -> None:
    run.child.send_signal(signal.SIGINT)


def _whole_run_killed(run: Federation, rng: random.Random) -> None:
    run.child.kill()


def _blackout(run: Federation, rng: random.Random) -> None:
    run.inside("ip", "link", "set", "lo", "down")
    time.sleep(rng.uniform(0.5, 20))
    run.inside("ip", "link", "set", "lo", "up")


def _port(run: Federation) -> str:
    """Of the data plane."""
    rows = [row["text"] for row in run.journal() if row["event"] == "listening"]
    return str(rows[-1].split(":")[-1])


def _cut(way: str) -> Fault:
    """What sites send to the data plane is lost (`dport`), or what it sends to them (`sport`)."""

    def fault(run: Federation, rng: random.Random) -> None:
        rule = ["ip", "rule", "add", "pref", "10", way, _port(run), "blackhole"]
        run.inside(*rule)
        time.sleep(rng.uniform(0.5, 60))
        rule[2] = "del"
        run.inside(*rule)

    return fault


def _resets(run: Federation, rng: random.Random) -> None:
    """Of all connections of the data plane."""
    port = _port(run)
    run.inside("ss", "-K", "-t", f"( sport = :{port} or dport = :{port} )")


def _full_disk(run: Federation, rng: random.Random) -> None:
    filler = run.folder / "filler"
    try:
        with filler.open("wb", buffering=0) as file:
            while True:
                file.write(bytes(1 << 20))
    except OSError:
        time.sleep(rng.uniform(1, 8))
    filler.unlink()


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _coordinators_bit(run: Federation, rng: random.Random) -> None:
    _interrupted(run, rng)
    run.child.wait(PATIENCE_S)
    _flip(run.out / "checkpoint" / CHECKPOINT, rng)


def _sites_bit(run: Federation, rng: random.Random) -> None:
    _interrupted(run, rng)
    run.child.wait(PATIENCE_S)
    _flip(_newest(run, f"s{rng.randint(1, SITES)}"), rng)


def _newest(run: Federation, site: str) -> Path:
    files = (run.out / "sites" / site).rglob("site-*.safetensors")
    return max(files, key=lambda path: path.name[:13])


def _living_sites_bit(run: Federation, rng: random.Random) -> None:
    """One of its processes is killed at once, so that both are started again."""
    number = run.find(rng, RECIPE, 0)
    words = Path(f"/proc/{number}/environ").read_bytes().split(b"\0")
    path = next(word for word in words if word.startswith(VARIABLE.encode() + b"=")).decode()
    signal_to(number, signal.SIGSTOP)
    _flip(_newest(run, Path(path).parents[1].name), rng)
    signal_to(number, signal.SIGKILL)


KINDS: dict[str, Fault] = {
    "a site's first process is killed": _killed(RECIPE, 0),
    "a site's second process is killed": _killed(RECIPE, 1),
    "a site's ClientApp is killed": _killed("flwr-clientapp"),
    "a site's SuperNode is killed": _killed("flower-supernode"),
    "the coordinator is killed": _killed("flwr-serverapp"),
    "SuperLink is killed": _killed("flower-superlink"),
    "Ctrl-C": _interrupted,
    "the whole run is killed": _whole_run_killed,
    "a site's process stops for 1 to 20 s": _stopped(RECIPE, 0),
    "a site's process stops for 30 to 90 s": _stopped(RECIPE, 0, 30.0, 90.0),
    "a site's ClientApp stops for 1 to 20 s": _stopped("flwr-clientapp"),
    "a site's SuperNode stops for 1 to 20 s": _stopped("flower-supernode"),
    "the coordinator stops for 1 to 20 s": _stopped("flwr-serverapp"),
    "the coordinator stops for 30 to 90 s": _stopped("flwr-serverapp", None, 30.0, 90.0),
    "SuperLink stops for 1 to 20 s": _stopped("flower-superlink"),
    "blackout of 0.5 to 20 s": _blackout,
    "what sites send is lost for 0.5 to 60 s": _cut("dport"),
    "what sites are sent is lost for 0.5 to 60 s": _cut("sport"),
    "connections of the data plane are reset": _resets,
    "the disk is full for 1 to 8 s": _full_disk,
    "a bit of the coordinator's checkpoint flips": _coordinators_bit,
    "a bit of a site's checkpoint flips": _sites_bit,
    "a bit of a site's checkpoint flips, and it is killed": _living_sites_bit,
}
