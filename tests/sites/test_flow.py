"""The flow recipe: a perceptron, and a transformer that is told the class."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.workloads import flow as of_flow
from sites import flow
from tests.sites.support import DIT, Run, refused

TINY = {name: value for name, value in DIT.items() if name != "euler_steps"}


def config(batch: int = 8, **model: Any) -> Config:
    return Config(data=DataConfig("digits", batch=batch), model={**TINY, **model})


class Asked:
    """What a run's network is asked: the levels and the labels of every call."""

    def __init__(self, run: Run) -> None:
        self.sigmas: list[Tensor] = []
        self.labels: list[Tensor] = []
        run.workload.networks["velocity"].register_forward_pre_hook(self._keep)

    def _keep(self, module: object, args: tuple[Tensor, Tensor, Tensor]) -> None:
        self.sigmas.append(args[1])
        self.labels.append(args[2])


def test_a_tenth_of_the_samples_train_the_null_class_and_samples_are_of_all_alike() -> None:
    run = Run(flow, config(batch=350, euler_steps=4, shift=3.0))
    asked = Asked(run)
    run.step(4)
    null = torch.cat(asked.labels) == 10
    assert float(null.double().mean()) == pytest.approx(0.1, abs=0.03)
    asked = Asked(run)
    run.workload.sample(20, seed=0)
    assert torch.equal(torch.bincount(asked.labels[0]), torch.full((10,), 2))
    levels = torch.stack([sigma[0] for sigma in asked.sigmas])
    torch.testing.assert_close(levels, torch.tensor([1, 0.9, 0.75, 0.5]))


def test_guidance_asks_for_both_classes_and_changes_the_samples() -> None:
    samples = {}
    for guidance, size in ((1.0, 6), (3.0, 12)):
        run = Run(flow, config(guidance=guidance, euler_steps=3))
        run.step(4)
        asked = Asked(run)
        samples[guidance] = run.workload.sample(6, seed=0)
        assert [len(labels) for labels in asked.labels] == [size] * 3
        assert torch.equal(asked.labels[0][6:], torch.full((size - 6,), 10))
    assert not torch.equal(samples[1.0], samples[3.0])


def test_large_pictures_are_made_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(flow, config(guidance=3.0, euler_steps=2))
    run.step(4)
    whole = run.workload.sample(7, seed=0)
    monkeypatch.setattr(of_flow, "at_once", lambda shape: 3)
    asked = Asked(run)
    torch.testing.assert_close(run.workload.sample(7, seed=0), whole)
    assert [len(labels) for labels in asked.labels] == [2 * n for n in (3, 3, 3, 3, 1, 1)]


def test_it_learns_the_ring_in_seconds() -> None:
    data, inner = DataConfig("ring8", batch=128), {"velocity": InnerConfig(lr=4e-3)}
    run = Run(flow, Config(data=data, model={"width": 64, "depth": 2}, inner=inner))
    run.step(200)
    figures = run.workload.evaluate(run.held_out, seed=0)
    assert figures["modes"] >= 6 and figures["fd"] < 1.0


@pytest.mark.parametrize(
    ("model", "text"),
    [
        ({"network": "dlt"}, "model.network = 'dlt' is none of mlp, dit; did you mean 'dit'"),
        ({"width": 18}, "model.width = 18 is no multiple of 4 and of .*heads = 2; .*width=16"),
        ({"heads": 0}, "model.heads = 0 is out of range; choose 1 or more"),
        ({"patch": 3}, "model.patch = 3 does not divide images of 8 x 8; choose one of 1, 2, 4, 8"),
        ({"guidance": 2.0, "label_dropout": 0.0}, "model.guidance = 2.0 needs .*label_dropout=0.1"),
        ({"data": "ring8"}, "'dit' needs images.*; set model.network=mlp"),
        ({"network": "mlp", "patch": 2}, "model.patch = 2 needs model.network=dit"),
    ],
    ids=str,
)
def test_what_cannot_be_built_is_refused_in_one_line(model: dict[str, Any], text: str) -> None:
    asked = config(6, **({"patch": 4, "heads": 4} if model.get("network") == "mlp" else {}))
    asked.data.name = model.pop("data", "digits")
    asked.model |= model
    refused(flow, asked, text)
