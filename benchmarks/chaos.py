"""Real processes under faults at random moments: does a run end on the undisturbed run's bits?

A federation of two sites with two processes each, as `fedwan demo` starts it, in a network
namespace and on a small disk of its own. While it trains, a fault is drawn, caused, and the seconds
are counted until the run is two versions further; where the fault ended the run, it is resumed at
once. Then the next one, to the end of the run. It must end with status 0 and the weights of the run
that nothing disturbed; its journal must be whole, and neither processes nor unfinished files may be
left. Needs root, `unshare`, `nsenter`, `ip` and `ss`. `--quick`: 20 faults.

Clocks are not moved: the processes share this machine's.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import signal
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path

import psutil

from benchmarks.harness.federation import PATIENCE_S, RECIPE, Ended, Federation, kill
from benchmarks.harness.table import Row, select
from fedwan.coordinator.model import CHECKPOINT
from fedwan.errors import FedwanError
from fedwan.site.assignment import VARIABLE

SITES = 2
H = 20
SMALL = (f"sites={SITES}", f"h={H}", "site.processes=2", "eval.every=0")
FURTHER = 2
"""Versions after a fault by which the run has recovered: one may have been under way."""
PAUSE_S = 2.0
"""Between recovery and the next fault, on average."""


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--faults", type=int, help="300, or 20 if quick")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=800, help="of each run, H = 20")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    if os.geteuid():
        raise FedwanError("chaos makes a network and a disk of its own, which needs root")
    kinds = select(list(KINDS), args.only)
    count, num_runs = args.faults or (20 if args.quick else 300), 0
    folder = Path(tempfile.mkdtemp(prefix="fedwan-chaos-"))
    words = (f"steps={args.steps}", *SMALL)
    undisturbed = Federation(folder / "undisturbed", words)
    undisturbed.start()
    try:
        undisturbed.child.wait(PATIENCE_S)
        wanted = undisturbed.sha256()
    finally:
        undisturbed.close()
    while count > 0:
        num_runs += 1
        rng = random.Random(f"{args.seed} {num_runs}")
        run = Federation(folder / f"run{num_runs}", words)
        problem = "interrupted"
        try:
            for row in _disturb(run, args.steps // H, rng, kinds):
                count -= 1
                yield {"run": num_runs} | row
            problem = run.problem(wanted)
        finally:
            run.close(is_kept=bool(problem))
        row = {"run": num_runs, "fault": "the end", "version": 0, "seconds": 0.0}
        yield row | {"ended": run.child.returncode, "problem": problem}


def _disturb(
    run: Federation, versions: int, rng: random.Random, kinds: Sequence[str]
) -> Iterator[Row]:
    """Faults one after the other until the run is done."""
    run.start()
    run.reach(2)
    problem = ""
    while not problem:
        time.sleep(rng.expovariate(1 / PAUSE_S))
        if run.child.poll() is not None:
            return
        kind, version = rng.choice(kinds), run.version()
        if version + FURTHER >= versions:  # it could not be seen to recover
            run.reach(versions + 1)
            return
        began = time.monotonic()
        try:
            KINDS[kind](run, rng)  # which may wait for its moment
            ended = run.reach(min(run.version() + FURTHER, versions))
        except Ended:
            if run.child.poll() == 0:
                return  # it was done before there was anything to disturb
            run.reach(run.version() + 1)  # an earlier fault ended it: this one is not counted
            continue
        except FedwanError as error:
            ended, problem = "never", str(error)
        row = {"fault": kind, "version": version, "seconds": round(time.monotonic() - began, 2)}
        yield row | {"ended": ended or "no", "problem": problem}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    yield "| fault | caused | recovered | median s | 95 % within s | longest s |"
    yield "| --- " * 6 + "|"
    for kind in [*KINDS, "all"]:
        of_kind = [r for r in rows if r["fault"] in (KINDS if kind == "all" else (kind,))]
        times = sorted(r["seconds"] for r in of_kind if not r["problem"])
        figures = "- | - | -"
        if times:
            late = times[math.ceil(0.95 * len(times)) - 1]
            figures = f"{statistics.median(times):.1f} | {late:.1f} | {times[-1]:.1f}"
        if of_kind:
            yield f"| {kind} | {len(of_kind)} | {len(times)} | {figures} |"
    ends = [row for row in rows if row["fault"] == "the end"]
    good = sum(not row["problem"] for row in ends)
    yield f"{good} of {len(ends)} runs ended on the undisturbed weights, nothing left behind"


# Faults ------------------------------------------------------------------------------------------

Fault = Callable[[Federation, random.Random], object]


def _killed(text: str, **environ: str) -> Fault:
    return lambda run, rng: kill(run.find(rng, text, **environ))


def _stopped(text: str, least_s: float = 1.0, most_s: float = 20.0, **environ: str) -> Fault:
    def fault(run: Federation, rng: random.Random) -> None:
        process = run.find(rng, text, **environ)
        process.suspend()
        time.sleep(rng.uniform(least_s, most_s))
        with suppress(psutil.NoSuchProcess):  # ended by those who missed it
            process.resume()

    return fault


def _while_writing(text: str, **environ: str) -> Fault:
    """Killed while a checkpoint's temporary file is there; a site's in its own folder."""

    def fault(run: Federation, rng: random.Random) -> None:
        deadline = time.monotonic() + PATIENCE_S
        process = run.find(rng, text, **environ)
        of = Path(process.environ()[VARIABLE]).parents[1] if environ else run.out / "checkpoint"
        while not any(of.rglob(".*.safetensors.*.tmp")) and time.monotonic() < deadline:
            if not process.is_running():
                process = run.find(rng, text, **environ)
        kill(process)

    return fault


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
        rule = ("pref", "10", way, _port(run), "blackhole")
        run.inside("ip", "rule", "add", *rule)
        time.sleep(rng.uniform(0.5, 60))
        run.inside("ip", "rule", "del", *rule)

    return fault


def _resets(run: Federation, rng: random.Random) -> None:
    """Of all connections of the data plane, once there are any."""
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline:
        port = _port(run)
        # It prints what it has closed: nothing on a kernel that cannot (INET_DIAG_DESTROY).
        if run.inside("ss", "-KHt", f"( sport = :{port} or dport = :{port} )"):
            return
        time.sleep(0.05)
    raise FedwanError("no connection of the data plane was reset")


def _full_disk(run: Federation, rng: random.Random) -> None:
    filler = run.folder / "filler"
    with suppress(OSError), filler.open("wb", buffering=0) as file:
        while True:
            file.write(bytes(1 << 20))
    time.sleep(rng.uniform(1, 8))
    filler.unlink()


def _flip(path: Path, rng: random.Random) -> None:
    data = bytearray(path.read_bytes())
    data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
    path.write_bytes(data)


def _newest(run: Federation, site: str) -> Path:
    files = (run.out / "sites" / site).rglob("site-*.safetensors")
    return max(files, key=lambda path: path.name[:13])


def _stopped_runs_bit(of: Callable[[Federation, random.Random], Path]) -> Fault:
    def fault(run: Federation, rng: random.Random) -> None:
        run.child.send_signal(signal.SIGINT)
        run.child.wait(PATIENCE_S)
        _flip(of(run, rng), rng)

    return fault


def _living_sites_bit(run: Federation, rng: random.Random) -> None:
    """One of its processes is killed at once, so that both are started again."""
    process = run.find(rng, RECIPE, RANK="0")
    site = Path(process.environ()[VARIABLE]).parents[1].name
    process.suspend()
    _flip(_newest(run, site), rng)
    kill(process)


KINDS: dict[str, Fault] = {
    "a site's first process is killed": _killed(RECIPE, RANK="0"),
    "a site's second process is killed": _killed(RECIPE, RANK="1"),
    "a site's ClientApp is killed": _killed("flwr-clientapp"),
    "a site's SuperNode is killed": _killed("flower-supernode"),
    "the coordinator is killed": _killed("flwr-serverapp"),
    "a site's first process is killed while it writes": _while_writing(RECIPE, RANK="0"),
    "the coordinator is killed while it writes": _while_writing("flwr-serverapp"),
    "SuperLink is killed": _killed("flower-superlink"),
    "Ctrl-C": lambda run, rng: run.child.send_signal(signal.SIGINT),
    "the whole run is killed": lambda run, rng: run.child.kill(),
    "a site's process stops for 1 to 20 s": _stopped(RECIPE, RANK="0"),
    "a site's process stops for 30 to 90 s": _stopped(RECIPE, 30.0, 90.0, RANK="0"),
    "a site's ClientApp stops for 1 to 20 s": _stopped("flwr-clientapp"),
    "a site's SuperNode stops for 1 to 20 s": _stopped("flower-supernode"),
    "the coordinator stops for 1 to 20 s": _stopped("flwr-serverapp"),
    "the coordinator stops for 30 to 90 s": _stopped("flwr-serverapp", 30.0, 90.0),
    "SuperLink stops for 1 to 20 s": _stopped("flower-superlink"),
    "blackout of 0.5 to 20 s": _blackout,
    "what sites send is lost for 0.5 to 60 s": _cut("dport"),
    "what sites are sent is lost for 0.5 to 60 s": _cut("sport"),
    "connections of the data plane are reset": _resets,
    "the disk is full for 1 to 8 s": _full_disk,
    "a bit of the coordinator's checkpoint flips": _stopped_runs_bit(
        lambda run, rng: run.out / "checkpoint" / CHECKPOINT
    ),
    "a bit of a site's checkpoint flips": _stopped_runs_bit(
        lambda run, rng: _newest(run, f"s{rng.randint(1, SITES)}")
    ),
    "a bit of a site's checkpoint flips, and it is killed": _living_sites_bit,
}
