"""The federation under seeded faults: new code meets new seeds, and a run can be repeated."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import fedwan
from benchmarks import simulation
from benchmarks.harness.table import read_arguments
from benchmarks.seeded import faults, world
from benchmarks.seeded.bugs import planted
from benchmarks.seeded.kernel import Kernel
from benchmarks.seeded.scenarios import TURNS
from benchmarks.seeded.world import Report, simulate_seed
from benchmarks.simulation import shrink
from fedwan.app import installed_app
from fedwan.coordinator.model import GlobalModel
from fedwan.errors import UserError
from fedwan.protocol.updates import Updates
from fedwan.site import place as place_module
from fedwan.site.checkpoint import Ledger, SiteCheckpoints
from fedwan.site.exchange import Exchange
from fedwan.site.place import Place

NUM_SEEDS = 300
_save = GlobalModel.save
pytestmark = pytest.mark.usefixtures("usual_times")  # what seeds meet hangs on them


def _first_seed() -> int:
    digest = hashlib.sha256()
    strategies = installed_app() / "strategies"
    for folder in (Path(fedwan.__file__).parent, strategies, Path(faults.__file__).parent):
        for path in sorted(folder.rglob("*.py")):
            digest.update(path.read_bytes())
    return int(digest.hexdigest()[:6], 16)


def _save_another(model: GlobalModel, folder: Path, meta: dict[str, Any]) -> None:
    weights = {name: value + 1 for name, value in model.state.items()}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(model, "state", weights)
        _save(model, folder, meta)


def _put_and_keep(updates: Updates[Any], fragment: int, version: int, update: Any) -> None:
    updates._held[fragment][version] = update


def _violations(seeds: range) -> list[str]:
    reports = [simulate_seed(seed) for seed in seeds]
    command = "python -m benchmarks simulation --trace --seed"
    return [f"{r.violations[0]}: {command} {r.seed}" for r in reports if r.violations]


def _simulate(
    scenario: str,
    seeds: tuple[int, ...],
    kinds: tuple[faults.Kind, ...],
    mean_pause_s: float = 10.0,
) -> list[Report]:
    """Runs with 20 faults of these kinds alone; none breaks any."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(faults, "kinds_of", lambda world, seed: kinds)
        patch.setattr(faults, "MEAN_PAUSE_S", mean_pause_s)
        reports = [simulate_seed(seed, scenario, faults=20) for seed in seeds]
    assert not [report.violations for report in reports if report.violations]
    return reports


@pytest.mark.slow
@pytest.mark.parametrize("part", range(12))
def test_no_fault_breaks_a_run(part: int) -> None:
    size = NUM_SEEDS // 12
    first = _first_seed() + part * size
    assert not _violations(range(first, first + size))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("scenario", "seeds"),
    [("diloco", (3, 7)), ("diloco int2", (1, 4)), ("scaffnew", (6, 7))],
)
def test_a_site_s_newest_checkpoint_may_rot_without_a_trace_in_the_weights(
    scenario: str, seeds: tuple[int, ...]
) -> None:
    kinds = (faults.rot, faults.kill_site, faults.kill_coordinator)
    reports = _simulate(scenario, seeds, kinds, mean_pause_s=20.0)
    told = "\n".join(line for report in reports for line in report.trace)
    assert "takes the steps to it again" in told and "has no checkpoint" not in told


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "seed"), [("diloco", 2), ("diloco", 19), ("scaffnew", 6)])
def test_an_update_that_comes_out_between_join_and_the_first_download_leaves_no_trace(
    scenario: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    find = Place.find

    def late(place: Place, versions: list[int], run_step: int) -> tuple[int, bool]:
        place_module.time.sleep(4.0)
        return find(place, versions, run_step)

    monkeypatch.setattr(Place, "find", late)
    _simulate(scenario, (seed,), (faults.rot, faults.kill_site))


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "seeds"), [("diloco int2", (1, 5)), ("scaffnew", (1, 5))])
def test_steps_taken_again_that_are_not_those_that_were_merged_are_refused(
    scenario: str, seeds: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A refused site has lost its folder: it would take the bad batch again, and learn of it."""
    settle, told = Exchange._settle, list[str]()

    def watched(self: Exchange, flight: Any, receipt: Any, *others: Any) -> None:
        told.append(receipt.text)
        settle(self, flight, receipt, *others)

    monkeypatch.setattr(Exchange, "_settle", watched)
    monkeypatch.setattr(world, "bad_batches_of", lambda kind, scenario: (("s2", 1),))
    _simulate(scenario, seeds, (faults.lose_folder, faults.kill_site))
    assert any("taken again are not those that were merged" in text for text in told)


@pytest.mark.slow
@pytest.mark.parametrize(("scenario", "seed"), [("diloco", 35), ("masked", 41)])
def test_the_steps_after_a_refusal_can_be_taken_again(
    scenario: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By a site that has lost its newest checkpoint, with the data and optimisers of then."""
    load, found = SiteCheckpoints.load, []

    def watched(kept: SiteCheckpoints, version: int, with_model: bool, is_start: bool) -> Ledger:
        found.append(version in kept.starts() and version + 1 not in kept.versions())
        return load(kept, version, with_model, is_start)

    monkeypatch.setattr(SiteCheckpoints, "load", watched)
    _simulate(scenario, (seed,), (faults.rot, faults.kill_site))
    assert any(found)


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


@pytest.mark.slow
def test_a_failing_seed_is_shrunk(capsys: pytest.CaptureFixture[str]) -> None:
    simulate_seed(1)
    with planted("a version is called durable before it is"):
        row = shrink(1)
        words = capsys.readouterr().out.split()
        kinds = words[words.index("--without") + 1].split(",") if "--without" in words else []
        num = int(words[words.index("--faults") + 1])
        again = simulate_seed(1, faults=num, without=kinds)
    assert again.violations and again.faults.total() == row["faults"] < 10
    assert len(kinds) > 5


@pytest.mark.parametrize(
    "words",
    [
        "--seed 5 --seeds 100",
        "--seed 0 --quick",
        "--trace",
        "--bugs --first 3",
        "--shrink 4 --only x",
    ],
)
def test_an_option_without_effect_is_refused(words: str) -> None:
    args = read_arguments(simulation, "simulation", words.split())
    with pytest.raises(UserError, match="has no effect beside"):
        next(simulation.measure(args))


def test_scenarios_are_chosen_and_a_seed_keeps_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    class Here:
        def __init__(self, *_: Any) -> None: ...
        def __enter__(self) -> Here:
            return self

        def __exit__(self, *_: Any) -> None: ...
        def imap_unordered(self, work: Any, seeds: list[int], chunksize: int) -> Iterator[Report]:
            found.extend(seeds)
            return (Report(seed, TURNS[seed % len(TURNS)]) for seed in seeds)

    found: list[int] = []
    monkeypatch.setattr(simulation, "get_context", lambda _: SimpleNamespace(Pool=Here))
    words = "--only own --seeds 6 --first 40".split()
    rows = list(simulation.measure(read_arguments(simulation, "simulation", words)))
    assert {row["scenario"] for row in rows} == {"scaffnew own h", "own h", "own pace"}
    assert len(found) == 6 and min(found) >= 40


def test_a_path_that_is_as_fast_as_ever_is_no_fault() -> None:
    draws, counted = iter((1.0, "s1", 20.0, "s1")), list[str]()
    chance = SimpleNamespace(choice=lambda _: next(draws))
    path = SimpleNamespace(slow=0.0)
    world: Any = SimpleNamespace(
        random=chance, names=["s1"], paths={"s1": path}, count=counted.append
    )
    faults.slow_down(world)
    assert (path.slow, counted) == (1.0, [])
    faults.slow_down(world)
    assert (path.slow, counted) == (20.0, ["slow"])


def test_what_is_left_out_of_a_seed_stays_out_when_it_is_shrunk(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(seed: int, *, faults: int, without: Any) -> Report:
        assert "rot" in without and faults <= 80
        violations = ["it failed"] if faults >= 70 and "cut" not in without else []
        return Report(seed, "diloco", violations, Counter(slow=faults))

    monkeypatch.setattr(simulation, "simulate_seed", fail)
    assert shrink(3, 80, ["rot"])["faults"] == 70


def test_a_seed_that_does_not_fail_is_not_shrunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(simulation, "simulate_seed", lambda seed, **_: Report(seed, "diloco"))
    with pytest.raises(UserError, match="--shrink=3"):
        shrink(3)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("owner", "name", "wrong", "scenario", "text"),
    [
        (Updates, "put", _put_and_keep, "quorum", "updates are kept"),
        (GlobalModel, "save", _save_another, "diloco", "holds other weights"),
    ],
)
def test_what_is_kept_and_saved_is_checked(
    owner: type,
    name: str,
    wrong: Any,
    scenario: str,
    text: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    simulate_seed(1, scenario, faults=1)
    monkeypatch.setattr(owner, name, wrong)
    assert any(text in v for seed in range(8, 12) for v in simulate_seed(seed, scenario).violations)


@pytest.mark.slow
def test_clocks_are_off_and_are_set(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[float] = []
    wall_s = Kernel.wall_s
    monkeypatch.setattr(Kernel, "wall_s", lambda self: seen.append(wall_s(self)) or seen[-1])
    for seed in (30, 31, 35, 37):
        simulate_seed(seed, "diloco")
    assert max(seen) - min(seen) > 3600
