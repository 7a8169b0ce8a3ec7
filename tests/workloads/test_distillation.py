"""Teachers, heads and the moving average of a student."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan.config import Config, DataConfig, NetworkConfig, dump
from fedwan.errors import ConfigError
from fedwan.models.velocity import VelocitySizes, build_velocity
from fedwan.rng import seeded_init
from fedwan.state import State, state_of
from fedwan.workloads.distillation import Followed, load_teacher, read_teacher
from tests.trained_runs import save_checkpoint


def followed(half_life: float) -> Followed:
    with seeded_init(0):
        return Followed(nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)), half_life)


def move(network: Followed, *moves: float) -> None:
    optimizer = torch.optim.SGD(network.parameters(), lr=1.0)
    network.follow(optimizer)
    for by in moves:
        for index, param in enumerate(network.parameters()):
            param.grad = torch.full_like(param, -by * (index + 1))
        optimizer.step()


def average(network: Followed) -> list[Tensor]:
    lags = network.buffers()
    return [p.detach() + lag for p, lag in zip(network.parameters(), lags, strict=True)]


def test_the_target_is_the_moving_average_of_the_parameters() -> None:
    network, decay = followed(half_life=2.0), 0.5**0.5
    expected = [p.detach().clone() for p in network.parameters()]
    passed = [value.clone() for value in expected]
    moves = [0.1 * (step - 2) for step in range(6)]
    move(network, *moves)
    for by in moves:
        for index, (value, param) in enumerate(zip(expected, passed, strict=True)):
            value.lerp_(param.add_(by * (index + 1)), 1 - decay)
    torch.testing.assert_close(average(network), expected)
    x = torch.randn(5, 3)
    found = network.target(x)
    assert not found.requires_grad
    with torch.no_grad():
        for param, value in zip(network.parameters(), expected, strict=True):
            param.copy_(value)
    torch.testing.assert_close(network(x), found)


def test_a_merge_takes_the_target_along() -> None:
    network = followed(half_life=5.0)
    move(network, 0.3)
    before = average(network)
    with torch.no_grad():
        for param in network.parameters():
            param.add_(1.0)
    torch.testing.assert_close(average(network), [value + 1.0 for value in before])


SIZES = VelocitySizes("mlp", 8, 2, 4, 4)
MODEL = {**SIZES._asdict(), "label_dropout": 0.1, "shift": 2.0, "euler_steps": 7}


def network(width: int = 8) -> torch.nn.Module:
    return build_velocity((2,), 8, SIZES._replace(width=width))


def folder(path: Path, state: State | None = None, **config: Any) -> Path:
    """As a run leaves it."""
    path.mkdir(exist_ok=True)
    asked = {"workload": "flow", "data": DataConfig("ring8"), "model": MODEL} | config
    dump(Config(**asked), path / "config.yaml")
    state = state_of({"velocity": network()}) if state is None else state
    save_checkpoint(path, state)
    return path


def test_a_teacher_is_what_its_run_says_with_the_average_of_its_weights(tmp_path: Path) -> None:
    weights = state_of({"velocity": network()})
    teacher = read_teacher(folder(tmp_path, weights))
    assert (teacher.data.name, *teacher[2:]) == ("ring8", SIZES, 0.1, 2.0, 7)
    target = network()
    load_teacher(teacher, target)
    for name, value in state_of({"velocity": target}).items():
        assert torch.equal(value, weights[name])


def refused(path: Path, text: str, width: int = 8) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        load_teacher(read_teacher(path), network(width))
    assert "\n" not in str(caught.value) and str(path) in str(caught.value)


def test_what_is_no_teacher_is_refused_in_one_line(tmp_path: Path) -> None:
    refused(tmp_path / "none", r"holds no config.yaml .*workload=flow")
    refused(folder(tmp_path / "gan", workload="gan"), r"workload = 'gan'; .*workload=flow")
    site = DataConfig("ring8", labels="site")
    refused(folder(tmp_path / "site", data=site), r"with data.labels=site, .* the folder of one w")
    own = folder(tmp_path / "own", network={"velocity": NetworkConfig(exclude=["read.*"])})
    refused(own, r"network.velocity.exclude.* the folder of one w")
    refused(folder(tmp_path / "small"), r"of shape \(8,\), which .* \(16,\).*copy both", 16)
    empty = folder(tmp_path / "empty", {"velocity/other": torch.zeros(1)})
    refused(empty, r"'other' is of shape .* which the module has not")
    few = folder(tmp_path / "few", {"velocity/read.bias": torch.zeros(8)})
    refused(few, r"weight '.*' is missing; copy both files")
    file = few / "checkpoint" / "coordinator.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    refused(few, r"coordinator.safetensors cannot be read .*copy both files")
    file.unlink()
    refused(few, r"holds no checkpoint/coordinator.safetensors; wait until")
