"""The recipe that distils a flow."""

from __future__ import annotations

import dataclasses
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.config import Config, DataConfig, dump, load
from fedwan.site.replica import Replica
from fedwan.state import hash_state, read_tensors, select_prefix
from fedwan.workloads.base import Batch
from sites import distill, flow
from tests.sites.support import Run, equal, refused


@pytest.fixture(params=["mlp_teacher", "dit_teacher"])
def teacher(request: pytest.FixtureRequest) -> Path:
    return request.getfixturevalue(request.param)


def config(teacher: Path, **model: Any) -> Config:
    data = DataConfig(load(teacher / "config.yaml").data.name, batch=8)
    return Config("distill", data=data, model={"teacher": str(teacher), **model})


def ema(folder: Path) -> dict[str, Tensor]:
    tensors, _ = read_tensors(folder / "checkpoint" / "coordinator.safetensors")
    return select_prefix("ema", tensors)


@pytest.mark.slow
def test_the_judges_weight_changes_the_students_gradient_alone(mlp_teacher: Path) -> None:
    # With as many phases as solver steps every jump is one step of the teacher's.
    chosen = [{"student_steps": 6, "adversarial": 0.0}, {"adversarial": 0.0}, {"adversarial": 0.1}]
    runs = [Run(distill, config(mlp_teacher, **model)) for model in chosen]
    _, without, judged = (run.gradients(next(run.stream), run.rng) for run in runs)
    assert equal(without["heads"], judged["heads"])
    assert not equal(without["student"], judged["student"])
    at_edges, between = (
        float(Run(distill, config(mlp_teacher, **model)).step()["student"]) for model in chosen[:2]
    )
    assert at_edges == pytest.approx(0.0, abs=1e-6) and between > 1e-5


def test_a_student_whose_samples_are_nearly_alike_is_seen(teacher: Path) -> None:
    run = Run(distill, config(teacher, student_steps=6))
    held_out = Batch(run.held_out.x[:8], run.held_out.y[:8])
    look = partial(run.workload.examine, held_out, held_out, 0)  # type: ignore[attr-defined]
    # It is the teacher still, and takes the teacher's steps.
    assert float(look()["spread/student"]) == pytest.approx(1.0, rel=1e-4)
    assert float(look()["memory/heads"]) == 0.5

    def draw_to_a_point(module: torch.nn.Module, args: tuple[Tensor, ...], out: Tensor) -> Tensor:
        """The velocity that leads any noise to one sample."""
        x, sigma = args[0], args[1]
        return (x - 0.5) / sigma.reshape(-1, *[1] * (x.dim() - 1)).clamp(min=1e-3)

    run.workload.networks["student"].register_forward_hook(draw_to_a_point)
    assert float(look()["spread/student"]) < 0.05


def test_everything_starts_from_the_teachers_average_and_the_student_alone_travels(
    teacher: Path,
) -> None:
    workload, average = Run(distill, config(teacher)).workload, ema(teacher)
    for prefix, name in (("", "teacher"), ("network.", "student")):
        state = workload.networks[name].state_dict()
        assert {f"velocity/{n.removeprefix(prefix)}" for n in state} == set(average)
        for key, value in average.items():
            assert torch.equal(state[prefix + key.partition("/")[2]], value)
    replica = Replica(workload.networks, workload.optimizers)
    assert {name.partition("/")[0] for name in replica.layout} == {"student", "heads"}
    assert not any("lag" in name for name in replica.layout)
    assert sum("lag" in name for name in replica.local) == len(average)
    frozen = {f"teacher/{n.partition('/')[2]}": v for n, v in average.items()}
    assert replica.frozen_sha256 == hash_state(frozen)
    assert not any(p.requires_grad for p in workload.networks["teacher"].parameters())


def test_quality_stands_beside_the_teachers_own(teacher: Path) -> None:
    run = Run(distill, config(teacher, student_steps=6))
    figures = run.workload.evaluate(run.held_out, seed=0)
    trained = load(teacher / "config.yaml")
    own = Run(flow, Config(data=trained.data, model=trained.model))
    velocity = own.workload.networks["velocity"]
    velocity.load_state_dict({n.partition("/")[2]: v for n, v in ema(teacher).items()})
    again = own.workload.evaluate(run.held_out, seed=0)["fd"]
    assert figures["teacher_fd"] == pytest.approx(again, rel=1e-9)  # other addresses, other bits
    # It has not stepped yet, and takes the teacher's steps.
    assert figures["fd"] == pytest.approx(figures["teacher_fd"], rel=1e-4)


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"teacher": ""}, "model.teacher names no teacher.*workload=flow.*add model.teacher="),
        ({"teacher": "/nowhere"}, "model.teacher = '/nowhere' holds no config.yaml on this mach"),
        ({"student_steps": 0}, "model.student_steps = 0 is out of range"),
        ({"student_steps": 7}, "model.student_steps = 7 is more .* 6,.*model.student_steps=6"),
        ({"guidance": 2.0}, "model.guidance = 2.0 needs a teacher .*; leave it out"),
        ({"data": "digits"}, "data.name = 'ring8', not of 'digits'; set data.name=ring8"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_in_one_line(
    mlp_teacher: Path, model: dict[str, Any], text: str
) -> None:
    asked = config(mlp_teacher)
    asked.data.name = model.pop("data", "ring8")
    asked.model |= model
    refused(distill, asked, text)


@pytest.mark.parametrize(
    ("data", "text"),
    [
        ({"size": 16}, "of data.size = 8, not of 16; set data.size=8"),
        ({"classes": "dog,cat"}, "data.classes = 'cat,dog', not of 'dog,cat'; set data"),
    ],
)
def test_a_teacher_of_pictures_of_another_size_or_of_classes_in_another_order_is_refused(
    dit_teacher: Path, data: dict[str, Any], text: str, tmp_path: Path
) -> None:
    copy = Path(shutil.copytree(dit_teacher, tmp_path / "teacher"))
    trained = load(copy / "config.yaml")
    trained.data = DataConfig("folder", path="/pictures", size=8, classes="cat,dog", batch=8)
    dump(trained, copy / "config.yaml")
    of_data = dataclasses.replace(trained.data, **data)
    refused(distill, Config("distill", data=of_data, model={"teacher": str(copy)}), text)
