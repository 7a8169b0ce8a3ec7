"""`fedwan export`: files that need no fedwan, and say what they lack."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import fedwan
from fedwan.errors import UserError
from fedwan.export import export
from tests.trained_runs import write_run


def exported(tmp_path: Path, *words: str) -> Path:
    write_run(tmp_path / "run", *words)
    export(fedwan.load(tmp_path / "run"), "safetensors", tmp_path / "weights")
    return tmp_path / "weights"


def test_files_hold_each_network_by_the_names_of_its_module(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    workload = fedwan.load(tmp_path / "run").workload()
    for name, module in workload.networks.items():
        found = load_file(folder / f"{name}.safetensors")
        assert found.keys() == module.state_dict().keys()
        assert all(torch.equal(found[n], v) for n, v in module.state_dict().items())
    about = json.loads((folder / "config.json").read_text())
    assert about["weights"] == "ema" and about["config"]["model"]["width"] == 4
    assert about["missing"] == {"discriminator": [], "generator": []}


def test_the_readmes_code_loads_them(tmp_path: Path) -> None:
    folder = exported(tmp_path, "model.spectral_norm=true", "network.generator.exclude=['*.bias']")
    text = (folder / "README.md").read_text()
    code = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert len(code) == 2  # loading, and spectral norm's vectors
    networks = dict(fedwan.load(tmp_path / "run").workload().networks)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code[0], networks)
    for words in ("`main.0.bias`", "`main.0.parametrizations.weight.0._u`"):
        assert words in text
    missing = json.loads((folder / "config.json").read_text())["missing"]
    assert "main.0.bias" in missing["generator"]


def test_a_run_whose_recipe_is_not_here_is_exported_all_the_same(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("workload: gan", "workload: command"))
    export(fedwan.load(tmp_path / "run"), "safetensors", tmp_path / "weights")
    assert load_file(tmp_path / "weights" / "generator.safetensors")
    assert "never left the sites" in (tmp_path / "weights" / "README.md").read_text()


def test_formats_that_do_not_exist_and_folders_in_use_are_refused(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    trained = fedwan.load(tmp_path / "run")
    with pytest.raises(UserError, match="--to safetensor is none of safetensors; did you mean"):
        export(trained, "safetensor", tmp_path / "other")
    with pytest.raises(UserError, match="holds something already"):
        export(trained, "safetensors", folder)
