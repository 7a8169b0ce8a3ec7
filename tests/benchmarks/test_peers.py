"""The comparison with peers: its workloads, its arithmetic, and whole runs where they can run."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from benchmarks.peers.app import ROOT, lay_app
from benchmarks.peers.plot import draw
from benchmarks.peers.recipes import timed
from benchmarks.peers.stopwatch import STOPWATCH, Stopwatch

from benchmarks import wan
from benchmarks.peers import rows as table
from benchmarks.peers.curve import Curve
from benchmarks.peers.run import BARE, Outcome, Traffic
from benchmarks.peers.spec import Spec
from benchmarks.peers.workload import Part, open_part
from benchmarks.wan import WanLink
from fedwan.coordinator.ema import update_ema
from fedwan.data.shard import open_shard
from fedwan.errors import FedwanError
from fedwan.rng import NamedGenerators
from fedwan.state import clone, hash_state, layout_of, state_of
from fedwan.workloads.base import Batch, keep_local

PEERS = ROOT / ".venv-peers" / "bin" / "python"
SCRIPT = ROOT / "benchmarks" / "peers.py"
LINK = WanLink(rate_mbit=200, rtt_ms=100)


@pytest.fixture
def app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The benchmark's app, entered as its processes enter it; nothing of it is left behind."""

    def recipes() -> list[str]:
        return [n for n in sys.modules if n.partition(".")[0] in ("sites", "strategies")]

    threads = torch.get_num_threads()
    kept = {name: sys.modules.pop(name) for name in recipes()}
    monkeypatch.syspath_prepend(str(folder := lay_app(tmp_path / "app")))
    monkeypatch.chdir(folder)
    yield folder
    for name in recipes():
        del sys.modules[name]
    sys.modules.update(kept)
    torch.set_num_threads(threads)
    STOPWATCH.forget()
    STOPWATCH.nominal_s = None


def tiny(steps: int = 300, step_s: float = 0.0) -> Spec:
    return Spec("fedwan", "timed", steps, 50, words=("model.width=4", f"model.step_s={step_s}"))


# The workloads ------------------------------------------------------------------------------------


def test_the_timed_workload_has_the_tensors_of_pix2pix() -> None:
    def count(shapes: timed.Shapes) -> int:
        return sum(torch.Size(tensor).numel() for module in shapes for tensor in module)

    assert count(timed.unet_shapes(64)) == 54_413_955
    assert count(timed.patchgan_shapes(64)) == 2_768_705


def test_a_round_of_timed_steps_moves_every_value(app: Path) -> None:
    part = open_part(tiny(), 0)
    before = clone(part.state)
    for _ in range(timed.MOST_SLICES - 1):
        part.step()
    assert any((part.state[name] == value).all() for name, value in before.items())
    part.step()
    for name, value in before.items():  # noise below a weight's last bit moves nothing
        assert (part.state[name] != value).float().mean() > 0.999


def test_a_timed_step_takes_as_long_as_it_says_and_counts_as_that(app: Path) -> None:
    part = open_part(tiny(step_s=0.05), 0)
    began = time.monotonic()
    for _ in range(4):
        part.step()
    assert 0.2 <= time.monotonic() - began < 1.0
    assert STOPWATCH.computed == [0.05] * 4


def test_the_timed_backward_pass_reaches_every_value(app: Path) -> None:
    part = open_part(tiny(step_s=0.01), 0)
    networks = part.workload.networks
    both = timed.Layers([])
    both.layers = torch.nn.ModuleList(networks.values())
    began = time.monotonic()
    part.workload.inner.backward(both)
    assert time.monotonic() - began >= 0.01
    for network in networks.values():
        for parameter in network.parameters():
            assert parameter.grad is not None and (parameter.grad > 0).all()


def test_the_digits_flow_is_fedwans_own_to_the_bit(app: Path) -> None:
    spec = Spec("ddp", "digits_flow", 40, 1, seed=3)
    part = open_part(spec, 1)
    from sites import flow

    own = flow.build(part.config, "cpu")
    rng = NamedGenerators(3, "s2")
    batches = open_shard(part.config.data, 1, 2, 3).batches(part.config.data.batch, rng["data"])
    for _ in range(3):
        part.step()
        own.step(batches.next_batch(), rng, keep_local)
    assert hash_state(part.state) == hash_state(state_of(own.networks))
    assert part.config.data.batch == 64 and part.config.inner["velocity"].lr == 5e-4


# The clock and the curve --------------------------------------------------------------------------


class Patient:
    """A workload that computes 20 ms and waits 60 ms for its gradients' mean."""

    def __init__(self) -> None:
        self.networks: dict[str, torch.nn.Module] = {"net": torch.nn.Linear(2, 2)}
        self.optimizers: dict[str, torch.optim.Optimizer] = {}

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Any) -> dict[str, torch.Tensor]:
        time.sleep(0.02)
        reduce(("net",))
        return {}

    def sample(self, num: int, seed: int) -> torch.Tensor:
        raise NotImplementedError

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        return {"fd": float(self.networks["net"].weight.sum()), "fd_floor": 0.5}  # type: ignore[union-attr,operator]


def patient_part(app_config: Any = None) -> Part:
    workload = Stopwatch().watch(Patient())
    config: Any = dataclasses.make_dataclass("C", ["data", "sites", "ema", "seed"])(
        dataclasses.make_dataclass("D", ["batch"])(8),
        2,
        dataclasses.make_dataclass("E", ["half_life"])(64.0),
        0,
    )
    shard: Any = dataclasses.make_dataclass("S", ["held_out"])(None)
    nothing: Any = None
    return Part(config, workload, shard, nothing, nothing)


def test_waiting_inside_a_step_is_no_computing() -> None:
    watched = patient_part().workload
    nothing: Any = None
    watched.step(nothing, nothing, lambda networks: time.sleep(0.06))
    (computed,) = watched.stopwatch.computed
    assert 0.02 <= computed < 0.05


def test_a_step_with_an_exchange_counts_as_long_as_the_others_computed() -> None:
    watch = Stopwatch()
    for seconds in (1.0, 9.0, 3.0, 2.0, 8.0):
        watch.count(0.0, seconds)
    watch.discount({1, 4})
    assert watch.computed == [1.0, 2.0, 3.0, 2.0, 2.0]


def test_the_curve_is_of_the_average_that_fedwan_keeps_and_is_measured_afterwards() -> None:
    part = patient_part()
    spec = Spec("ddp", "digits_flow", 8, 1, points=2, options={"hash_at": 5})
    layout = layout_of(part.workload.networks)
    ema = clone(part.state)
    curve = Curve(part, spec)
    expected, hashes = [], {}
    for step in range(1, 9):
        weights = {name: value + step for name, value in part.state.items()}
        curve.update(step, weights)
        update_ema(ema, weights, layout, 16, 64.0)
        hashes[step] = hash_state(weights)
        if step in (4, 8):
            expected.append((step, float(ema["net/weight"].sum())))
    result = curve.measure()
    assert [(p["step"], p["fd"]) for p in result["curve"]] == expected
    assert result["hash"] == hashes[5] and result["fd_floor"] == 0.5


# From runs to rows --------------------------------------------------------------------------------


def outcome(
    *, h: int = 2, steps: int = 8, stop_at: int = 0, hash_: str = "aa", is_star: bool = True
) -> Outcome:
    """Two sites whose steps compute 1 s; after every H of them they wait 3 s."""
    spec = Spec("fedwan", "digits_flow", steps, h, stop_at=stop_at)
    sites = []
    for late in (0.0, 0.5):
        began = [100 + late + step + 3 * (step // h) for step in range(spec.num_steps)]
        sites.append(
            {
                "began": began,
                "computed": [1.0] * spec.num_steps,
                "ended": began[-1] + 4,
                "sha256": "f",
            }
        )
    curve = [{"step": 4, "at": 108.5, "fd": 2.0}, {"step": 8, "at": 118.5, "fd": 1.0}]
    sites[0] |= {"curve": curve, "fd_floor": 0.7, "hash": hash_}
    traffic = Traffic(is_star)
    for second in range(0, 40):
        link = {"up": {"bytes": 10 * second}, "down": {"bytes": second}}
        traffic.add(90 + second, [link, link])
    return Outcome(spec, "tun", "cubic", sites, traffic)


def test_a_row_has_the_columns_and_times_from_the_last_sites_first_step() -> None:
    row = table.make_row("fedwan", outcome(), LINK, target_fd=1.5)
    assert list(row)[: len(table.COLUMNS)] == list(table.COLUMNS)
    assert (row["link"], row["rate_mbit"], row["rtt_ms"], row["loss"]) == ("wan", 200, 100, 0)
    assert row["wall_s"] == 20.0  # from 100.5 to 120.5
    assert row["time_to_fd_s"] == 18.0 and row["fd"] == 1.0 and row["fd_from"] == "itself"
    # 10 and 1 bytes a second, on one link from 100 on, on the other from 100.5.
    assert (row["bytes_up"], row["bytes_down"]) == (405, 40)
    assert json.loads(json.dumps(row)) == row


def test_utilisation_is_of_whole_rounds_between_the_first_and_the_last() -> None:
    row = table.make_row("fedwan", outcome(), LINK, 1.5)
    assert row["utilisation"] == pytest.approx(2 / 5)  # 2 s of steps, 3 s of waiting
    assert row["s_per_step"] == pytest.approx(5 / 2)
    with pytest.raises(FedwanError, match="take 8 or more"):
        table.make_row("fedwan", outcome(steps=6), LINK, 1.5)


def test_what_one_site_sends_to_another_counts_as_sent_and_as_received() -> None:
    row = table.make_row("ddp", outcome(is_star=False), LINK, 1.5)
    assert row["bytes_up"] == row["bytes_down"] == 440


def test_a_curve_is_borrowed_only_from_the_same_training() -> None:
    fast = table.make_row("ddp", outcome(steps=10), BARE, 1.5)
    short = table.make_row("ddp", outcome(steps=10, stop_at=8), LINK, 1.5)
    row = table.borrow_curve(short, fast)
    assert row["fd_from"] == "fast link" and row["steps"] == 8 and row["fd_steps"] == 10
    assert row["time_to_fd_s"] == pytest.approx(8 * short["s_per_step"])
    other = table.make_row("ddp", outcome(steps=10, hash_="bb"), BARE, 1.5)
    with pytest.raises(FedwanError, match="no curve can be borrowed"):
        table.borrow_curve(short, other)


def test_the_table_shows_medians_and_marks_what_was_borrowed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    rows = [table.make_row("ddp", outcome(), LINK, 1.5) | {"wall_s": s} for s in (9.0, 1.0, 2.0)]
    (merged,) = table.summarise(rows)
    assert merged["wall_s"] == 2.0 and merged["starts"] == 3
    table.print_table([merged | {"fd_from": "fast link"}])
    text = capsys.readouterr().out
    assert "18*" in text and "* steps of the same training" in text


def test_the_picture_is_drawn_from_rows_with_and_without_quality(tmp_path: Path) -> None:
    rows = [table.make_row("fedwan", outcome(), link, 1.5) for link in (LINK, BARE)]
    draw(rows, tmp_path / "quality.png")
    draw([row | {"curve": [], "time_to_fd_s": None} for row in rows], tmp_path / "timed.png")
    for name in ("quality.png", "timed.png"):
        assert (tmp_path / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_a_spec_comes_back_from_its_file(tmp_path: Path) -> None:
    spec = Spec("torchft", "timed", 100, 50, words=("model.width=4",), options={"fragments": 5})
    spec.save(tmp_path)
    assert Spec.load(tmp_path) == spec


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--systems", "ddp,fedwann"], "choose from ddp, torchft"),
        (["--systems", "fedwan", "--steps", "70", "--h", "20"], "no multiple"),
    ],
)
def test_a_wrong_command_line_is_refused_with_the_mend(words: list[str], message: str) -> None:
    command = [sys.executable, str(SCRIPT), "--json", "rows.json", *words]
    result = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert result.returncode == 2 and message in result.stderr


# Whole runs ---------------------------------------------------------------------------------------

unavailable = wan.available()
needs_wan = pytest.mark.skipif(unavailable is not None, reason=f"no emulated WAN: {unavailable}")
needs_peers = pytest.mark.skipif(not PEERS.exists(), reason="no .venv-peers: make bench-peers")


def measure(tmp_path: Path, *words: str) -> dict[tuple[str, str], dict[str, Any]]:
    path = tmp_path / "out" / "rows.json"
    command = [str(PEERS), str(SCRIPT), "--json", str(path), "--starts", "1", *words]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert path.with_suffix(".png").exists()
    read = [json.loads(line) for line in path.read_text().splitlines()]
    return {(row["system"], row["link"]): row for row in read}


@pytest.mark.slow
@pytest.mark.timeout(900)
@needs_wan
@needs_peers
def test_all_systems_train_the_same_flow_and_diloco_is_the_same_in_torchft_and_fedwan(
    tmp_path: Path,
) -> None:
    systems = "ddp,torchft,flower,fedwan-diloco"
    words = ["--workload", "digits_flow", "--steps", "80", "--points", "4", "--rtt-ms", "40"]
    rows = measure(tmp_path, "--systems", systems, *words)
    assert len(rows) == 8
    for row in rows.values():
        assert 0 < row["utilisation"] < 1 and row["fd_floor"] < row["fd"] < 80
    # Two independent programs, one algorithm.
    ours, theirs = rows["fedwan-diloco", "wan"], rows["torchft", "wan"]
    assert ours["fd"] == pytest.approx(theirs["fd"], rel=1e-4)
    assert ours["fd"] == rows["fedwan-diloco", "none"]["fd"]
    # 4 exchanges of 2.1 MB by 2 sites, and headers; DDP's 80.
    assert 16.9e6 < theirs["bytes_up"] < 20e6 and 16.9e6 < ours["bytes_up"] < 20e6
    assert rows["ddp", "wan"]["bytes_up"] > 15 * theirs["bytes_up"]
    assert rows["ddp", "wan"]["wall_s"] > 3 * rows["ddp", "none"]["wall_s"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@needs_wan
@needs_peers
def test_the_timed_workload_runs_on_every_system(tmp_path: Path) -> None:
    systems = "ddp,torchft,torchft-streaming,fedwan-diloco,fedwan"
    words = ["--workload", "timed", "--words", "model.width=8", "model.step_s=0.02"]
    rows = measure(tmp_path, "--systems", systems, *words, "--steps", "80", "--h", "20")
    assert len(rows) == 10
    for system in systems.split(","):
        slow, fast = rows[system, "wan"], rows[system, "none"]
        assert 0 < slow["utilisation"] < fast["utilisation"] <= 1
    assert rows["fedwan", "wan"]["bytes_up"] < rows["fedwan-diloco", "wan"]["bytes_up"] / 4
