"""Whole runs through Flower, in processes of their own, with faults: what a user is promised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

STEPS = {"gan": 400, "flow": 160}
"""By workload: as few as the claims need, since most of a run is the start of its processes."""
ROUNDS = 20
COMMON = ("sites=2", "eval.every=0")
SUMMARY_KEYS = {
    "strategy",
    "workload",
    "sites",
    "h",
    "steps",
    "seed",
    "wall_s",
    "compute_s",
    "wait_s",
    "utilisation",
    "bytes_up",
    "bytes_down",
    "rounds",
    "contributions",
    "rejected",
    "rejoins",
    "late",
    "dropped",
    "staleness",
    "quality",
    "global_sha256",
}

Sabotage = Callable[[Path], None]


def fedwan(*words: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "fedwan", *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen[str]) -> str:
    output, _ = process.communicate(timeout=300)
    return output


def words_of(workload: str) -> tuple[str, ...]:
    return (*COMMON, f"workload={workload}", f"steps={STEPS[workload]}")


def demo(out: Path, workload: str, *words: str, sabotage: Sabotage | None = None) -> dict[str, Any]:
    process = fedwan("demo", f"out={out}", *words_of(workload), *words)
    if sabotage:
        sabotage(out)
    output = finish(process)
    assert process.returncode == 0, output
    return summary(out)


def summary(out: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads((out / "summary.json").read_text())
    return content


def rows(out: Path) -> list[dict[str, Any]]:
    path = out / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("\n")]


def wait_for_version(out: Path, version: int) -> None:
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        if any(row["kind"] == "round" and row["version"] >= version for row in rows(out)):
            return
        time.sleep(0.05)
    raise AssertionError(f"no round {version} within 120 s")


def kill(mark: Path) -> None:
    os.kill(json.loads(mark.read_text())["pid"], signal.SIGKILL)


def kill_second_site(out: Path) -> None:
    wait_for_version(out, 3)
    kill(out / "sites" / "s2" / "clientapp.json")


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Undisturbed runs, by workload and strategy; made when first asked for."""
    folder = tmp_path_factory.mktemp("runs")
    made: dict[str, Path] = {}

    class Runs(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            workload, strategy = name.split("-")
            out = folder / name
            demo(out, workload, f"strategy={strategy}")
            made[name] = self[name] = out
            return out

    return Runs()


def test_demo_leaves_everything_that_design_section_5_promises(runs: dict[str, Path]) -> None:
    out = runs["gan-diloco"]
    found = summary(out)
    assert set(found) == SUMMARY_KEYS
    assert found["rounds"] == ROUNDS and found["contributions"] == 2 * ROUNDS
    assert found["rejected"] == found["rejoins"] == 0
    assert {"fd", "fd_floor"} <= set(found["quality"])
    assert 0 < found["utilisation"] <= 1
    for name in ("config.yaml", "samples.png", "report.html"):
        assert (out / name).stat().st_size > 0
    assert (out / "checkpoint" / "coordinator.safetensors").exists()
    per_site = [row for row in rows(out) if row["kind"] == "round"]
    assert {(row["version"], row["site"]) for row in per_site} == {
        (version, site) for version in range(1, ROUNDS + 1) for site in ("s1", "s2")
    }


@pytest.mark.parametrize("workload", ["gan", "flow"])
def test_same_seed_gives_the_same_weights_though_a_site_was_killed(
    workload: str, runs: dict[str, Path], tmp_path: Path
) -> None:
    undisturbed = summary(runs[f"{workload}-diloco"])
    disturbed = demo(tmp_path / "run", workload, sabotage=kill_second_site)
    assert disturbed["rejoins"] == 1
    assert disturbed["global_sha256"] == undisturbed["global_sha256"]


def test_a_site_whose_processes_share_out_comes_back_with_all_of_it(
    tmp_path: Path,
) -> None:
    words = ("site.processes=2", "steps=100")
    whole = demo(tmp_path / "whole", "gan", *words)
    for partition in ("gradients", "weights"):
        shared = demo(
            tmp_path / partition,
            "gan",
            *words,
            f"site.partition={partition}",
            sabotage=kill_second_site,
        )
        assert shared["rejoins"] == 1
        assert shared["global_sha256"] == whole["global_sha256"]


def test_a_killed_coordinator_resumes_and_ends_on_the_same_weights(
    runs: dict[str, Path], tmp_path: Path
) -> None:
    out = tmp_path / "run"
    process = fedwan("demo", f"out={out}", *words_of("gan"), "checkpoint.every=3")
    wait_for_version(out, 5)
    kill(out / "flower" / "serverapp.json")
    output = finish(process)
    assert process.returncode == 1
    assert output.strip().splitlines()[-1].startswith("fedwan: ") and "--resume" in output
    assert "Traceback" not in output

    process = fedwan("run", str(out / "config.yaml"), "--resume")
    output = finish(process)
    assert process.returncode == 0, output
    assert summary(out)["global_sha256"] == summary(runs["gan-diloco"])["global_sha256"]


def test_diloco_at_20_steps_sends_at_most_a_19th_of_what_sync_sends(runs: dict[str, Path]) -> None:
    sync, diloco = summary(runs["gan-sync"]), summary(runs["gan-diloco"])
    assert sync["rounds"] == STEPS["gan"] and sync["quality"]["fd"] > 0
    ratio = (sync["bytes_up"] + sync["bytes_down"]) / (diloco["bytes_up"] + diloco["bytes_down"])
    assert ratio >= 19


def test_a_truncated_checkpoint_is_one_clear_line(runs: dict[str, Path], tmp_path: Path) -> None:
    out = tmp_path / "run"
    subprocess.run(["cp", "-r", str(runs["gan-diloco"]), str(out)], check=True)
    (out / "summary.json").unlink()
    checkpoint = out / "checkpoint" / "coordinator.safetensors"
    checkpoint.write_bytes(checkpoint.read_bytes()[:1000])
    process = fedwan("run", str(out / "config.yaml"), "--resume")
    output = finish(process)
    assert process.returncode == 2
    assert "coordinator.safetensors" in output and "Traceback" not in output
