"""Whole runs through Flower, in processes of their own, with faults: what a user is promised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

from benchmarks.harness.simulated import run_simulated
from fedwan.coordinator import control
from fedwan.link import pki
from fedwan.output.journal import verify
from tests.cli.conftest import Command
from tests.flower.fleet import free_port, listening
from tests.output.test_summary import PROMISED

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS, ROUNDS = 160, 8
"""As few as the claims need, since most of a run is the start of its processes."""
SMALL = ("sites=2", "eval.every=0", f"steps={STEPS}")


def start(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedwan", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    return output


def summary(out: Path) -> dict[str, Any]:
    return json.loads((out / "summary.json").read_text())


def rows(out: Path) -> list[dict[str, Any]]:
    paths = [path for path in (out / "metrics.jsonl", out / "journal.jsonl") if path.exists()]
    lines = [line for path in paths for line in path.read_text().splitlines(keepends=True)]
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_version(out: Path, version: int) -> None:
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline:
        if any(row["kind"] == "round" and row["version"] >= version for row in rows(out)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no round {version} within 240 s")


def kill(mark: Path) -> None:
    os.kill(json.loads(mark.read_text())["pid"], signal.SIGKILL)


def test_a_killed_site_ctrl_c_and_a_killed_coordinator_cost_no_bit(tmp_path: Path) -> None:
    out = tmp_path / "run"
    _, undisturbed = run_simulated(SMALL)
    process = start("demo", f"out={out}", *SMALL)
    wait_for_version(out, 2)
    kill(out / "sites" / "s2" / "clientapp.json")
    wait_for_version(out, 4)
    process.send_signal(signal.SIGINT)
    assert "fedwan: stopped by Ctrl-C" in finish(process)
    assert process.returncode == 130
    assert not (out / "summary.json").exists()
    assert sum(row.get("event") == "rejoin" for row in rows(out)) == 1
    stopped = [row["text"] for row in rows(out) if row.get("event") == "stopped"]
    assert stopped == ["the run was stopped from outside"]
    run_id = json.loads((out / "flower" / "start.json").read_text())["run_id"]

    process = start("demo", f"out={out}", "--resume")
    wait_for_version(out, 6)
    kill(out / "flower" / "serverapp.json")  # which its service starts again
    output = finish(process)
    assert process.returncode == 0 and "Traceback" not in output, output
    assert output.count("resumed at version") == 2
    service_log = (out / "logs" / "coordinator.log").read_text()
    assert service_log.count("was killed; it is started again") == 1
    assert json.loads((out / "flower" / "start.json").read_text())["run_id"] == run_id
    assert {summary(out)["global_sha256"]} == set(undisturbed.site_sha256.values())
    found = verify(out, out / "pki" / "coordinator" / "ca.crt")
    assert found["is_done"] and (found["versions"], found["events"]["resume"]) == ([ROUNDS], 2)
    assert not [path for path in [out, *out.rglob("*")] if path.lstat().st_mode & 0o077]
    # It has left all that a run promises, and counts nothing twice.
    promised = summary(out)
    assert list(promised) == PROMISED and {"fd", "fd_floor"} <= set(promised["quality"])
    assert promised["rounds"] == ROUNDS and promised["contributions"] == 2 * ROUNDS
    assert promised["rejected"] == 0 < promised["rejoins"] and 0 < promised["utilisation"] <= 1
    for name in ("config.yaml", "samples.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert [(row["version"], row["site"]) for row in rows(out) if row["kind"] == "round"] == [
        (version, site) for version in range(1, ROUNDS + 1) for site in ("s1", "s2")
    ]


def test_a_drained_site_ends_with_0_and_an_ejected_one_with_2(
    tmp_path: Path, fedwan: Command
) -> None:
    out, folder, sites = tmp_path / "run", tmp_path / "pki", ("s1", "s2", "s3")
    pki.federation(folder, ["127.0.0.1"], sites)
    door, listen = (f"127.0.0.1:{free_port()}" for _ in range(2))
    for site in sites:
        keys = {"site": site, "identity": folder / site, "door": door, "dir": tmp_path / site}
        (tmp_path / f"{site}.yaml").write_text("".join(f"{k}: {v}\n" for k, v in keys.items()))
    words = ["sites=3", "eval.every=0", "steps=300", "link.rtt_ms=100", f"out={out}"]
    words += [f"link.door={door}", f"link.listen={listen}"]
    (tmp_path / "run.yaml").write_text("workload: gan\n")
    path, identity = str(tmp_path / "run.yaml"), str(folder / "coordinator")
    coordinator = start("coordinator", path, "--identity", identity, *words)
    services = {site: start("site", str(tmp_path / f"{site}.yaml")) for site in sites}
    try:
        wait_for_version(out, 2)
        for process in (coordinator, *services.values()):
            first = psutil.Process(process.pid)
            pids = [child.pid for child in (first, *first.children(recursive=True))]
            hosts = {host for pid in pids for host, _ in listening(pid)}
            assert hosts and hosts <= {"127.0.0.1", "::ffff:127.0.0.1"}, hosts
        assert control.ask(out, {"ask": "eject", "site": "s3"})
        assert fedwan("sites", str(out), "drain", "s2")[0] == 0
        for site, code, said in (("s2", 0, "s2 was drained"), ("s3", 2, "s3 was ejected")):
            output = finish(services[site])
            assert services[site].returncode == code, output
            last = output.strip().splitlines()[-1]
            assert last.startswith(f"fedwan: {said}") and "Traceback" not in output
        output = finish(coordinator)
        assert coordinator.returncode == 0, output
    finally:
        for process in (coordinator, *services.values()):
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    contributed = [row["site"] for row in rows(out) if row["kind"] == "round"]
    assert contributed.count("s1") == 15 > contributed.count("s2") >= 2
    ca = str(folder / "coordinator" / "ca.crt")
    code, told, err = fedwan("verify", str(out), "--ca", ca)
    assert code == 0 and f"{len(contributed)} of contributions, by keys" in told, err
    assert "of the coordinator\n" in told and "of s3\n" in told and "the run is done" in told
    code, told, _ = fedwan("status", str(out))
    assert code == 0 and "the run is done" in told
