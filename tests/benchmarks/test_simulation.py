"""The federation under seeded faults: new code meets new seeds, and a run can be repeated."""

from __future__ import annotations

import hashlib
from pathlib import Path

import pytest

import fedwan
from benchmarks.seeded import faults
from benchmarks.seeded.bugs import planted
from benchmarks.seeded.world import simulate_seed

NUM_SEEDS = 300
pytestmark = pytest.mark.usefixtures("usual_times")  # what seeds meet hangs on them


def _first_seed() -> int:
    digest = hashlib.sha256()
    for path in sorted(Path(fedwan.__file__).parent.rglob("*.py")):
        digest.update(path.read_bytes())
    return int(digest.hexdigest()[:6], 16)


def _violations(seeds: range) -> list[str]:
    reports = [simulate_seed(seed) for seed in seeds]
    command = "python -m benchmarks simulation --trace --seed"
    return [f"{r.violations[0]}: {command} {r.seed}" for r in reports if r.violations]


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_no_fault_breaks_a_run(part: int) -> None:
    size = NUM_SEEDS // 12
    first = _first_seed() + part * size
    assert not _violations(range(first, first + size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [("diloco", (12, 18)), ("diloco int2", (33, 45)), ("scaffnew", (14, 18))],
)
def test_a_site_s_newest_checkpoint_may_rot_without_a_trace_in_the_weights(
    scenario: str, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faults, "KINDS", (faults._rot, faults._kill_site, faults._kill_coordinator))
    monkeypatch.setattr(faults, "MEAN_PAUSE_S", 20.0)
    reports = [simulate_seed(seed, scenario, faults=20) for seed in seeds]
    assert not [report.violations for report in reports if report.violations]
    told = "\n".join(line for report in reports for line in report.trace)
    assert "takes the steps to it again" in told and "has no checkpoint" not in told


@pytest.mark.slow
@pytest.mark.parametrize("scenario", ["diloco int2", "async", "drawn"])
def test_a_seed_repeats_a_run_exactly(scenario: str) -> None:
    first, second = (simulate_seed(7, scenario).trace for _ in range(2))
    assert first == second


@pytest.mark.slow
def test_a_planted_bug_is_found() -> None:
    simulate_seed(1, "diloco int2")
    with planted("a version is called durable before it is"):
        assert simulate_seed(1, "diloco int2").violations
