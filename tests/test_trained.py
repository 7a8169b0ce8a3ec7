"""`fedwan.load`: a run's weights as plain state dicts, into modules, and as its recipe has them."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

import fedwan
from fedwan.config import load as load_config
from fedwan.errors import CheckpointError, FedwanError, UserError
from tests.trained_runs import save_checkpoint, write_run


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


def test_a_workload_has_the_weights_and_samples_as_the_recipe_does(tmp_path: Path) -> None:
    _, state = write_run(tmp_path / "run", "seed=5")
    workload = fedwan.load(tmp_path / "run").workload()
    generator = workload.networks["generator"]
    assert not generator.training
    for name, value in generator.named_parameters():
        assert torch.equal(value, state[f"generator/{name}"])
    assert torch.equal(workload.sample(4, 3), workload.sample(4, 3))
    zero = fedwan.load(tmp_path / "run", ema=False).workload()
    assert not torch.equal(workload.sample(4, 3), zero.sample(4, 3))


def test_a_module_of_the_users_own_takes_a_networks_weights(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    write_run(tmp_path / "run")
    save_checkpoint(tmp_path / "run", {f"net/{n}": v + 1 for n, v in net.state_dict().items()})
    trained = fedwan.load(tmp_path / "run")
    other = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3))
    assert trained.load_into(other, "net") == []
    for name, value in other.state_dict().items():
        assert torch.equal(value, trained.networks["net"][name])


def test_what_stayed_at_the_sites_is_named_and_left_as_it_was(tmp_path: Path) -> None:
    words = ("model.spectral_norm=true", "network.generator.exclude=['*.bias']")
    write_run(tmp_path / "run", *words)
    trained = fedwan.load(tmp_path / "run")
    workload = trained.workload()
    generator, discriminator = (workload.networks[n] for n in ("generator", "discriminator"))
    before = {name: value.clone() for name, value in generator.state_dict().items()}
    missing = trained.load_into(generator, "generator")
    assert missing and all(name.endswith(".bias") for name in missing)
    assert all(torch.equal(before[name], generator.state_dict()[name]) for name in missing)
    missing = trained.load_into(discriminator, "discriminator")
    assert missing and all(name.endswith(("._u", "._v")) for name in missing)


def test_tied_tensors_count_as_one(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3))
    net[1].weight = net[0].weight
    write_run(tmp_path / "run")
    save_checkpoint(tmp_path / "run", {f"net/{n}": v.detach() for n, v in net.named_parameters()})
    trained = fedwan.load(tmp_path / "run")
    assert "1.weight" not in trained.networks["net"]
    assert trained.load_into(net, "net") == []


def refused(call: object, error: type[FedwanError]) -> str:
    with pytest.raises(error) as caught:
        call()  # type: ignore[operator]
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2
    return str(caught.value)


def test_what_does_not_fit_is_one_line(tmp_path: Path) -> None:
    assert "holds no run" in refused(lambda: fedwan.load(tmp_path / "none"), CheckpointError)
    run = tmp_path / "run"
    write_run(run)
    trained = fedwan.load(run)
    line = refused(lambda: trained.load_into(nn.Linear(1, 1), "genrator"), UserError)
    assert "did you mean 'generator'?" in line
    line = refused(lambda: trained.load_into(nn.Linear(1, 1), "generator"), UserError)
    assert "holds 'main." in line and "which the module has not" in line
    save_checkpoint(run, {"net/weight": torch.ones(2, 1)})
    line = refused(lambda: fedwan.load(run).load_into(nn.Linear(1, 1), "net"), UserError)
    assert "'weight' is of shape (2, 1), and the module's of (1, 1)" in line
    path = run / "checkpoint" / "coordinator.safetensors"
    path.write_bytes(path.read_bytes()[:50])
    assert "cannot be read" in refused(lambda: fedwan.load(run), CheckpointError)
    path.unlink()
    assert "holds no checkpoint yet" in refused(lambda: fedwan.load(run), CheckpointError)


def test_a_run_of_a_script_has_networks_and_no_workload(tmp_path: Path) -> None:
    write_run(tmp_path / "run")
    path = tmp_path / "run" / "config.yaml"
    path.write_text(path.read_text().replace("workload: gan", "workload: command"))
    assert load_config(path).workload == "command"
    trained = fedwan.load(tmp_path / "run")
    assert trained.networks["generator"]
    assert "has no recipe to build" in refused(trained.workload, UserError)
