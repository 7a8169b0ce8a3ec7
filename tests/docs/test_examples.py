"""The Python blocks of start.md, own_model.md and data.md of docs run, in the order of the page."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fedwan.app import load_run, load_strategy, load_workload
from fedwan.simulation import simulate
from fedwan.weights import load
from tests.support import spec

ROOT = Path(__file__).resolve().parents[2]


def blocks(page: str) -> list[str]:
    """The page's Python."""
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    return re.findall(r"^```python\n(.*?)^```", text, re.DOTALL | re.MULTILINE)


def run(*words: str, folder: Path) -> str:
    """Output of a command in a folder; it ends well."""
    env = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(words, cwd=folder, env=env, capture_output=True, text=True, timeout=280)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    return ended.stdout


@pytest.fixture
def own_app(no_recipes: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The examples' pages, in the present folder."""
    for folder, name in (("strategies", "fed_adam.py"), ("sites", "moons.py")):
        (tmp_path / folder).mkdir()
        shutil.copy(ROOT / "docs" / "examples" / name, tmp_path / folder)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_the_lines_of_own_model_train_and_resume(tmp_path: Path) -> None:
    script = tmp_path / "own.py"
    script.write_text("\n".join(blocks("own_model.md")))
    run(sys.executable, str(script), folder=tmp_path)


@pytest.mark.slow
def test_sites_of_the_example_step_on_batches_of_their_own(tmp_path: Path) -> None:
    text = (ROOT / "docs" / "examples" / "train_unet.py").read_text(encoding="utf-8")
    asks = "            loss.backward()\n"
    assert len(text.splitlines()) <= 60 and asks in text
    (tmp_path / "train.py").write_text(text.replace(asks, f"{asks}{' ' * 12}print(images.sum())\n"))
    words = ("launch", "--sites", "2", "h=20", "--", "python", "train.py")
    run(sys.executable, "-m", "fedwan", *words, folder=tmp_path)
    logs = [
        (tmp_path / "runs" / "launch" / "sites" / name / "logs" / "clientapp.log").read_text()
        for name in ("s1", "s2")
    ]
    first, second = (re.findall(r"tensor\((\S+)\)", log) for log in logs)
    assert len(first) == len(second) == 40
    assert not set(first) & set(second)


@pytest.mark.slow
def test_the_strategy_of_the_example_trains_and_sends_half(own_app: Path) -> None:
    words = "workload=flow data.name=ring8 model.width=64 sites=2 h=6 steps=24 eval.every=0".split()
    config = load_run(None, ["strategy=fed_adam", *words])
    assert config.outer["velocity"].lr == 0.01
    runs = {
        name: simulate(load_run(None, [f"strategy={name}", *words]), own_app / name)
        for name in ("fed_adam", "local_sgd")
    }
    ended = runs["fed_adam"]
    assert len(set(ended.site_sha256.values())) == 1
    up = [sum(row["bytes_up"] for row in run.records if "bytes_up" in row) for run in runs.values()]
    assert up[0] < 0.6 * up[1]
    losses = [row["losses"]["velocity"] for row in ended.records if "losses" in row]
    assert losses[-1] < losses[0]


@pytest.mark.slow
def test_the_recipe_of_the_example_learns_its_own_data(own_app: Path) -> None:
    words = "workload=moons sites=2 h=20 steps=200 inner.velocity.lr=0.01 site.accumulate=2".split()
    simulate(load_run(None, words), own_app / "run")
    points, _ = load_workload("moons").moons(1000, 1)
    made = load(own_app / "run").workload().sample(200, 0)
    noise = torch.randn(200, 2, generator=torch.Generator().manual_seed(0))
    away, before = (torch.cdist(x, points).amin(1).mean() for x in (made, noise))
    assert made.shape == (200, 2) and away < 0.5 * before


def test_the_data_set_of_the_page_on_data_is_measured(own_app: Path) -> None:
    (own_app / "sites" / "stripes.py").write_text(blocks("data.md")[-1])
    words = "workload=stripes sites=2 h=20 steps=40 eval.every=20 inner.maker.lr=0.01".split()
    ran = simulate(load_run(None, words), own_app / "run")
    assert ran.totals.quality["num_real"] == 20
    # Each site measures by samples of its own: no other one is asked whether it finds the same.
    asked = [row for row in ran.records if row.get("event") == "measuring"]
    assert len(asked) == len([row for row in ran.records if row["kind"] == "quality"])


@pytest.mark.slow
def test_the_way_of_start_leads_from_pictures_to_samples(tmp_path: Path) -> None:
    pictures, train, result = blocks("start.md")
    (tmp_path / "train.py").write_text(train.replace("steps=1000", "steps=40"))
    run(sys.executable, "-c", pictures, folder=tmp_path)
    assert len(list((tmp_path / "pictures").rglob("*.png"))) == 360
    assert "step 40 of 40" in run(sys.executable, "train.py", folder=tmp_path)
    fedwan = (sys.executable, "-m", "fedwan")
    run(*fedwan, "launch", "--sites", "2", "h=20", "--", "python", "train.py", folder=tmp_path)
    assert (tmp_path / "runs" / "launch" / "samples.png").exists()
    assert "[16, 1, 16, 16]" in run(sys.executable, "-c", result, folder=tmp_path)
    run(*fedwan, "export", "runs/launch", "weights", folder=tmp_path)
    assert (tmp_path / "weights" / "velocity.safetensors").exists()


def test_half_precision_of_the_example_keeps_what_is_not_finite(own_app: Path) -> None:
    codec = load_strategy("fed_adam").fp16()
    layout = {"net/w": spec((3,))}
    payload, _ = codec.encode({"net/w": torch.tensor([torch.inf, 1e9, -1e9])}, {}, layout)
    assert codec.decode(payload, layout)["net/w"].tolist() == [torch.inf, 65504, -65504]
