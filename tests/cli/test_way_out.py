"""`fedwan verify`, `sample`, `export` and `new`, from the command line."""

from __future__ import annotations

import errno
import json
import runpy
import sys
from pathlib import Path

import pytest
import torch
from safetensors import SafetensorError

from fedwan.config import load as load_config
from fedwan.errors import DiskFull
from fedwan.files import replace_bytes
from fedwan.output.journal import JOURNAL, Journal
from fedwan.site import joining
from tests.cli.conftest import Command, mistake
from tests.trained_runs import write_run


def test_the_same_seed_draws_the_same_picture_and_other_weights_another(
    tmp_path: Path, fedwan: Command
) -> None:
    run = str(tmp_path / "run")
    write_run(tmp_path / "run")
    pictures = []
    for index, options in enumerate(("--seed=3", "--seed=3", "--seed=4", "--seed=3 --last")):
        path = tmp_path / "new" / f"{index}.png"
        words = ["sample", run, "--num=9", f"--out={path}", *options.split()]
        assert fedwan(*words) == (0, f"{path}\n", "")
        pictures.append(path.read_bytes())
    assert pictures[0] == pictures[1]
    assert len(set(pictures)) == 3


def test_an_exported_folder_draws_the_pictures_of_its_run(tmp_path: Path, fedwan: Command) -> None:
    write_run(tmp_path / "run")
    for index, last in enumerate(([], ["--last"])):
        folder, pictures = tmp_path / f"weights{index}", []
        assert fedwan("export", str(tmp_path / "run"), str(folder), *last)[0] == 0
        (tmp_path / "run").rename(tmp_path / "moved")
        for place in ("moved", folder.name):
            path = tmp_path / f"{place}.png"
            words = ["sample", str(tmp_path / place), f"--out={path}", "--num=9", *last]
            assert fedwan(*words)[0] == 0
            pictures.append(path.read_bytes())
        assert pictures[0] == pictures[1]
        (tmp_path / "moved").rename(tmp_path / "run")
    told = mistake(fedwan, "sample", str(tmp_path / "weights0"), "--last")
    assert "holds the moving average alone; export the run with --last" in told
    about = tmp_path / "weights0" / "config.json"
    for text in ("{", "[]", "{}", about.read_text().replace('"workload"', '"wrkload"')):
        about.write_text(text)
        mistake(fedwan, "sample", str(tmp_path / "weights0"))


def test_no_option_writes_over_what_a_run_has_made(
    tmp_path: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(run := tmp_path / "run")
    monkeypatch.chdir(run)
    assert fedwan("sample", ".", "--num=1")[0] == 0  # nothing was there
    held = Path("samples.png").read_bytes()
    says = "--out samples.png is a file of the run in its folder; name ano"
    assert says in mistake(fedwan, "sample", ".", "--num=2")
    assert Path("samples.png").read_bytes() == held
    plan = "params=1e6 step_s=0.1 h=20 link.rate_mbit=100 link.rtt_ms=100 --json".split()
    told = mistake(fedwan, "plan", *plan, "../run/config.yaml")
    assert "--json ../run/config.yaml is a file of the run" in told
    assert load_config(Path("config.yaml")).h
    for _ in range(2):  # its own it may replace
        assert fedwan("plan", *plan, "plan.json")[0] == 0
    monkeypatch.chdir(tmp_path)  # a folder of the user's own, as of a project
    Path("config.yaml").write_text("steps: 40\n")
    for _ in range(2):
        assert fedwan("sample", "run", "--num=1")[0] == 0


def test_samples_are_made_on_a_gpu_where_there_is_one(
    tmp_path: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_run(tmp_path / "run")
    asked: list[str] = []
    monkeypatch.setattr(joining, "choose_device", lambda name: asked.append(name) or "cpu")
    assert fedwan("sample", str(tmp_path / "run"), f"--out={tmp_path / 'a.png'}")[0] == 0
    assert asked == ["auto"]
    told = mistake(fedwan, "sample", str(tmp_path / "run"), "--prompt=a cat")
    assert "samples of workload 'gan' are made of none" in told
    monkeypatch.setattr("sites.gan.Gan.sample", lambda self, num, seed: torch.zeros(num, 3))
    told = mistake(fedwan, "sample", str(tmp_path / "run"), "--num=4")
    assert "samples of shape (4, 3) are neither images nor points; fedwan.load(RUN)" in told


def test_export_writes_a_folder_and_says_where(tmp_path: Path, fedwan: Command) -> None:
    write_run(tmp_path / "run")
    folder = tmp_path / "weights"
    words = ["export", str(tmp_path / "run"), "--to", "safetensors", str(folder)]
    assert fedwan(*words) == (0, f"{folder}\n", "")
    assert {path.name for path in folder.iterdir()} == {
        "README.md",
        "config.json",
        "discriminator.safetensors",
        "discriminator.txt",
        "generator.safetensors",
        "generator.txt",
    }
    assert "Linear(in_features=16," in (folder / "generator.txt").read_text()
    modes = {path.stat().st_mode & 0o777 for path in folder.glob("*.safetensors")}
    assert modes == {(folder / "README.md").stat().st_mode & 0o777}
    told = mistake(fedwan, "export", str(tmp_path / "run"), "--to", "onnx", "x")
    assert "--to onnx is none of safetensors, diffusers" in told


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (OSError(errno.EROFS, "Read-only file system", "/cd"), "/cd: Read-only file system"),
        (SafetensorError("Permission denied"), "weights cannot be written: Permission denied;"),
    ],
)
def test_an_export_to_where_nothing_can_be_written_is_one_line(
    tmp_path: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch, error: Exception, says: str
) -> None:
    def fail(*_: object) -> None:
        raise error

    write_run(tmp_path / "run")
    monkeypatch.setattr("fedwan.weights.save_file", fail)
    assert says in mistake(fedwan, "export", str(tmp_path / "run"), str(tmp_path / "weights"))


def test_a_new_project_bears_its_folders_name_and_its_own_test_passes(
    tmp_path: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    code, out, _ = fedwan("new", str(tmp_path / "mine"))
    assert code == 0 and out.endswith("mine && python train.py\n")
    config = load_config(tmp_path / "mine" / "config.yaml")
    assert (config.workload, config.out) == ("command", "runs/mine")
    assert "holds something already" in mistake(fedwan, "new", str(tmp_path / "mine"))
    monkeypatch.syspath_prepend(tmp_path / "mine")
    monkeypatch.setitem(sys.modules, "train", None)
    del sys.modules["train"]
    runpy.run_path(str(tmp_path / "mine" / "test_train.py"))["test_the_loss_falls"]()


def test_a_project_that_a_full_disk_has_cut_off_leaves_nothing_in_the_way(
    tmp_path: Path, fedwan: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_up(path: Path, data: bytes) -> None:
        if path.name == "site.yaml":
            raise DiskFull("the disk is full")
        replace_bytes(path, data)

    with monkeypatch.context() as patch:
        patch.setattr("fedwan.cli.results.replace_bytes", fill_up)
        code, shown, err = fedwan("new", str(tmp_path / "mine"))
        assert (code, shown) == (1, "") and "the disk is full" in err
    assert fedwan("new", str(tmp_path / "mine"))[0] == 0


def test_verify_tells_what_it_found_or_the_first_bad_line(tmp_path: Path, fedwan: Command) -> None:
    path, found = tmp_path / JOURNAL, tmp_path / "found.json"
    assert "holds no run" in mistake(fedwan, "verify", str(tmp_path))
    (tmp_path / "config.yaml").touch()
    says = "holds no journal.jsonl: the run has not begun"
    assert says in mistake(fedwan, "verify", str(tmp_path))
    journal = Journal(path, is_new=True)
    for version in (0, 1):
        journal.append({"event": "version", "fragment": 0, "version": version, "weights": "a"})
    journal.close()
    path.write_text((text := path.read_text()) + '{"kind"')
    code, out, _ = fedwan("verify", str(tmp_path), "--json", str(found))
    facts = json.loads(found.read_text())
    assert code == 0 and facts["versions"] == [1] and facts["hash"] in out
    assert "2 version" in out and "7 bytes at the end are no whole line yet" in out
    path.write_text(text.replace('"version":1', '"version":2'))
    code, out, err = fedwan("verify", str(tmp_path))
    assert (code, out) == (1, "") and f"{path} line 2: it does not" in err
