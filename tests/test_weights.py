"""Weights in files: `init.NETWORK=path`, `fedwan.load` and `fedwan export`."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from torch.nn.utils.parametrizations import spectral_norm

import fedwan
from fedwan.app import load_run
from fedwan.config import Config, NetworkConfig
from fedwan.config import load as load_config
from fedwan.coordinator.model import newest_whole
from fedwan.errors import CheckpointError, ConfigError, FedwanError, UserError
from fedwan.weights import export, load_initial
from sites import gan
from tests.trained_runs import POINTS, save_checkpoint, write_run

KEPT = ("model.spectral_norm=true", "network.generator.exclude=['*.bias']")


def become_a_script(run: Path) -> None:
    path = run / "config.yaml"
    text = path.read_text().replace("workload: gan", "workload: command")
    text = text.replace("name: ring8", "name: digits").replace("  num: 0\n", "")
    path.write_text(text)
    assert load_config(path).workload == "command"


def test_networks_are_plain_state_dicts_of_the_moving_average_or_of_the_last_weights(
    tmp_path: Path,
) -> None:
    config, state = write_run(tmp_path / "run")
    trained = fedwan.load(tmp_path / "run")
    assert trained.config == config and trained.is_ema
    assert set(trained.networks) == {"discriminator", "generator"}
    for network, tensors in trained.networks.items():
        for name, value in tensors.items():
            assert torch.equal(value, state[f"{network}/{name}"])
    last = fedwan.load(tmp_path / "run", ema=False)
    assert all(not value.any() for value in last.networks["generator"].values())
    workload = trained.workload()
    generator = workload.networks["generator"]
    assert not generator.training
    for name, value in generator.named_parameters():
        assert torch.equal(value, state[f"generator/{name}"])
    assert torch.equal(workload.sample(4, 3), workload.sample(4, 3))
    assert not torch.equal(workload.sample(4, 3), last.workload().sample(4, 3))


def test_a_module_of_the_users_own_takes_a_networks_weights(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    write_run(tmp_path / "run")
    save_checkpoint(tmp_path / "run", {f"net/{n}": v + 1 for n, v in net.state_dict().items()})
    trained = fedwan.load(tmp_path / "run")
    assert trained.load_into(net, "net") == []
    for name, value in net.state_dict().items():
        assert torch.equal(value, trained.networks["net"][name])
    tied = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    tied[1].weight = tied[0].weight
    save_checkpoint(tmp_path / "run", {f"net/{n}": v.detach() for n, v in tied.named_parameters()})
    trained = fedwan.load(tmp_path / "run")
    assert "1.weight" not in trained.networks["net"]
    assert trained.load_into(tied, "net") == []
    tied[1].weight.data.zero_()
    wrapped = nn.DataParallel(tied)
    assert trained.load_into(wrapped, "net") == [] and tied[1].weight.any()
    refused(lambda: trained.load_into(tied.to("meta"), "net"), UserError, "lies on meta")


def test_what_stayed_at_the_sites_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    write_run(tmp_path / "run", *KEPT)
    trained = fedwan.load(tmp_path / "run")
    workload = trained.workload()
    generator, discriminator = (workload.networks[n] for n in ("generator", "discriminator"))
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    missing = trained.load_into(generator, "generator")
    assert missing and all(name.endswith(".bias") for name in missing)
    assert all(torch.equal(before[name], generator.state_dict()[name]) for name in missing)
    missing = trained.load_into(discriminator, "discriminator")
    assert missing and all(name.endswith(("._u", "._v")) for name in missing)


def refused(call: Callable[[], object], error: type[FedwanError], *words: str) -> None:
    with pytest.raises(error) as caught:
        call()
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    assert all(word in str(caught.value) for word in words)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    refused(lambda: fedwan.load(tmp_path / "none"), ConfigError, "holds no run")
    run, linear = tmp_path / "run", nn.Linear(1, 1)
    write_run(run)
    trained = fedwan.load(run)
    refused(lambda: trained.load_into(linear, "genrator"), UserError, "did you mean 'generator'?")
    words = ("'main.", "which the module has not")
    refused(lambda: trained.load_into(linear, "generator"), UserError, *words)
    save_checkpoint(run, {"net/weight": torch.ones(2, 1)})
    says = "'weight' is of shape (2, 1), which the module has as (1, 1)"
    refused(lambda: fedwan.load(run).load_into(linear, "net"), UserError, says)
    path = run / "checkpoint" / "coordinator.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    refused(lambda: fedwan.load(run, ema=False), CheckpointError, "is damaged")
    path.write_bytes(whole[:50])
    refused(lambda: fedwan.load(run), CheckpointError, "cannot be read")
    before = path.with_name("coordinator.previous.safetensors")
    before.write_bytes(whole[:50])
    refused(lambda: fedwan.load(run), CheckpointError, "; restore it from a copy, or start")
    before.write_bytes(whole)
    says = f"; {before.name} beside it is whole: --resume of a run that has not ended goes on "
    refused(lambda: fedwan.load(run), CheckpointError, says)
    assert newest_whole(path.parent)[1].endswith("); the one before it takes its place")
    path.unlink()
    refused(lambda: fedwan.load(run), CheckpointError, "holds no checkpoint yet")


def test_a_recipe_that_calls_its_networks_otherwise_now_is_one_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = tmp_path / "run"
    write_run(run)
    monkeypatch.setattr(gan, "NETWORKS", {"critic": "adversarial", "generator": "adversarial"})
    mend = ("has other networks now than", "'critic' for one", "bring back its page")
    refused(lambda: fedwan.load(run).workload(), UserError, *mend)
    export(fedwan.load(run), "safetensors", tmp_path / "weights")  # which need no recipe
    assert {path.suffix for path in (tmp_path / "weights").iterdir()} == {
        *(".safetensors", ".json", ".md")
    }


def exported(tmp_path: Path, *words: str) -> Path:
    write_run(tmp_path / "run", *words)
    export(fedwan.load(tmp_path / "run"), "safetensors", tmp_path / "weights")
    return tmp_path / "weights"


def test_exported_files_hold_each_network_by_the_names_of_its_module(tmp_path: Path) -> None:
    folder = exported(tmp_path)
    trained = fedwan.load(tmp_path / "run")
    for name, module in trained.workload().networks.items():
        found = load_file(folder / f"{name}.safetensors")
        assert found.keys() == module.state_dict().keys()
        assert all(torch.equal(found[n], v) for n, v in module.state_dict().items())
    about = json.loads((folder / "config.json").read_text())
    assert about["weights"] == "ema" and about["config"]["model"]["width"] == 4
    assert about["missing"] == {"discriminator": [], "generator": []}
    assert "out" not in about["config"]
    other = tmp_path / "other"
    says = "--to safetensor is none of safetensors, diffusers; did you mean"
    refused(lambda: export(trained, "safetensor", other), UserError, says)
    refused(lambda: export(trained, "safetensors", folder), UserError, "holds something already")
    says = "holds the moving average alone; export the run with --last"
    refused(lambda: fedwan.load(folder, ema=False), ConfigError, says)


def test_the_readmes_code_loads_them_and_what_is_missing_is_listed(tmp_path: Path) -> None:
    folder = exported(tmp_path, *KEPT)
    text = (folder / "README.md").read_text()
    (code,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    networks = dict(fedwan.load(tmp_path / "run").workload().networks)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        exec(code, networks)
    assert "of `fedwan.models.gan`, as workload `gan` builds it" in text
    missing = json.loads((folder / "config.json").read_text())["missing"]
    assert "main.0.bias" in missing["generator"]
    assert "main.0.parametrizations.weight.0._u" in missing["discriminator"]


def test_a_run_of_a_script_has_networks_and_files_but_no_workload(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    become_a_script(tmp_path / "run")
    trained = fedwan.load(tmp_path / "run")
    assert trained.networks["generator"]
    refused(trained.workload, UserError, "has no recipe to build")
    export(trained, "safetensors", tmp_path / "weights")
    assert load_file(tmp_path / "weights" / "generator.safetensors")
    text = (tmp_path / "weights" / "README.md").read_text()
    assert "never left them" in text
    assert 'generator.load_state_dict(load_file("generator.safetensors"))' in text
    settings = json.loads((tmp_path / "weights" / "config.json").read_text())["config"]
    assert "outer" in settings and not {"out", "data", "model", "site"} & settings.keys()


# Initial weights ---------------------------------------------------------------------------------


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), spectral_norm(nn.Linear(3, 2)))


def saved(path: Path, module: nn.Module, without: str = "-") -> dict[str, str]:
    state = {n: v.contiguous() for n, v in module.state_dict().items() if without not in n}
    save_file(state, path)
    return {"net": str(path)}


def test_a_network_takes_the_weights_of_a_file_in_its_own_dtype(tmp_path: Path) -> None:
    init = saved(tmp_path / "net.safetensors", network())
    target = network().bfloat16()
    weight = target[0].weight
    load_initial({"net": target}, Config(init=init))
    assert target[0].weight is weight and weight.dtype is torch.bfloat16
    other = network()
    load_initial({"net": other}, Config(init=init))
    assert torch.equal(weight, other[0].weight.bfloat16())


def test_vectors_of_spectral_norm_and_frozen_and_excluded_tensors_may_be_missing(
    tmp_path: Path,
) -> None:
    init = saved(tmp_path / "a.safetensors", network(), "._")
    load_initial({"net": network()}, Config(init=init))
    init = saved(tmp_path / "b.safetensors", network(), "0.weight")
    with pytest.raises(ConfigError, match="lacks '0.weight', which is trained"):
        load_initial({"net": network()}, Config(init=init))
    stays = {"net": NetworkConfig(exclude=["0.*"])}
    load_initial({"net": network()}, Config(init=init, network=stays))
    frozen = network()
    frozen[0].requires_grad_(False)
    load_initial({"net": frozen}, Config(init=init))
    unheld = network()  # no optimiser steps its first layer
    held = {id(param) for param in unheld[2].parameters()}
    load_initial({"net": unheld}, Config(init=init), held)
    held.add(id(unheld[0].weight))
    with pytest.raises(ConfigError, match="lacks '0.weight', which is trained"):
        load_initial({"net": unheld}, Config(init=init), held)


def test_a_file_that_does_not_fit_is_one_line_and_changes_nothing(tmp_path: Path) -> None:
    def says(networks: dict[str, nn.Module], init: dict[str, str], words: str) -> None:
        refused(lambda: load_initial(networks, Config(init=init)), ConfigError, words)

    init = saved(tmp_path / "net.safetensors", network())
    says({"nets": network()}, init, "init.net: networks are nets; did you mean 'nets'?")
    says({"net": network()}, {"net": "nowhere"}, "is no file on this machine")
    (tmp_path / "text").write_text("no tensors")
    says({"net": network()}, {"net": str(tmp_path / "text")}, "is no safetensors file")
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(4))
    before = other[0].weight.clone()
    says({"net": other}, init, "'1.bias' is of shape (3,), which the module has as (4,)")
    del other[1]
    says({"net": other}, init, "'1.bias' is of shape (3,), which the module has not")
    assert torch.equal(before, other[0].weight)
    odd = network()
    odd[0].weight.data[0, 0] = torch.nan
    init = saved(tmp_path / "nan.safetensors", odd)
    says({"net": network()}, init, "'0.weight' holds values that are not finite in torch.float32")
    odd[0].weight.data[0, 0] = 1e6
    odd[1].running_mean.fill_(-torch.inf)  # a buffer may
    init = saved(tmp_path / "large.safetensors", odd)
    says({"net": network().half()}, init, "'0.weight' holds values that are not finite in torch.f")
    load_initial({"net": network()}, Config(init=init))
    coded = {n: v.to(torch.int8) for n, v in network().state_dict().items()}
    save_file(coded, tmp_path / "coded.safetensors")
    init = {"net": str(tmp_path / "coded.safetensors")}
    says({"net": other}, init, "'1.bias' is of shape (3,)")
    says({"net": network()}, init, "is torch.int8 for torch.float32; give weights as they were")


def test_a_file_that_a_run_started_from_is_read_again_where_the_run_lacks_something_alone(
    tmp_path: Path,
) -> None:
    whole = exported(tmp_path / "a") / "generator.safetensors"
    write_run(tmp_path / "b", f"init.generator={whole}")
    write_run(tmp_path / "c", f"init.generator={whole}", "network.generator.exclude=['*.bias']")
    whole.unlink()
    assert fedwan.load(tmp_path / "b").workload().networks["generator"]
    export(fedwan.load(tmp_path / "b"), "safetensors", tmp_path / "weights")
    assert "missing" in json.loads((tmp_path / "weights" / "config.json").read_text())
    refused(fedwan.load(tmp_path / "c").workload, ConfigError, "is no file on this machine")


def test_a_run_is_refused_before_it_starts_where_a_file_does_not_fit(tmp_path: Path) -> None:
    init = saved(tmp_path / "net.safetensors", network())
    for word, says in (
        (f"init.generator={init['net']}", "which the module has not"),
        ("init.genrator=x", "did you mean 'generator'?"),
        ("init.generator=[1]", "init.generator = "),
    ):
        with pytest.raises(ConfigError) as caught:
            load_run(None, [*POINTS, word])
        assert says in str(caught.value), str(caught.value)
