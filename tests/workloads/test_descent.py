"""From a batch to a completed step."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fedwan import app
from fedwan.config import Config, DataConfig, InnerConfig, SiteConfig
from fedwan.errors import ConfigError, FedwanError
from fedwan.rng import NamedGenerators
from fedwan.workloads.base import Batch
from fedwan.workloads.descent import Descent, Simple

SGD = InnerConfig("sgd", lr=0.1, beta1=0.0)
BATCH = Batch(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8))
BOTH = ("first", "second")


class Game(Descent):
    """Two networks, each with a loss that depends on both."""

    def __init__(self, site: SiteConfig | None = None, inner: InnerConfig = SGD) -> None:
        torch.manual_seed(0)
        networks = {name: nn.Linear(3, 1) for name in BOTH}
        inners = {name: copy.copy(inner) for name in networks}
        super().__init__(Config(inner=inners, site=site or SiteConfig()), networks)
        self.sizes: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        self.factors: list[float] = []
        """Of the second network's loss, attempt by attempt; then 1."""
        self.reduced: list[dict[str, list[Tensor]]] = []

    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        first, second = (network(batch.x) for network in self.networks.values())
        self.dtypes.add(first.dtype)
        self.sizes.append(len(batch.x))
        losses = {"first": (first - second).square().mean(), "second": (first * second).mean()}
        factor = self.factors.pop(0) if self.factors else 1.0
        self.add_gradients("first", losses["first"], keep_graph=True)
        self.add_gradients("second", losses["second"] * factor)
        return losses

    def sample(self, num: int, seed: int) -> Tensor:
        raise NotImplementedError

    def scale_by(self, scale: float) -> None:
        self.scaler.load_state_dict(self.scaler.state_dict() | {"scale": scale})

    def once(self) -> dict[str, Tensor]:
        return self.step(BATCH, NamedGenerators(0, "s1"), self._reduce)

    def _reduce(self) -> None:
        params = {name: network.parameters() for name, network in self.networks.items()}
        self.reduced.append(
            {n: [p.grad.clone() for p in ps if p.grad is not None] for n, ps in params.items()}
        )

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for n in self.networks.values() for p in n.parameters()]


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_a_batch_have_its_mean_gradient_and_losses(parts: int, precision: str) -> None:
    whole, in_parts = Game(SiteConfig(precision)), Game(SiteConfig(precision, accumulate=parts))
    for game in (whole, in_parts):
        game.scale_by(2.0**8)  # nothing overflows
    tolerance = 1e-6 if precision == "32-true" else 2e-3
    close = {"rtol": tolerance, "atol": tolerance, "check_dtype": False}
    torch.testing.assert_close(in_parts.once(), whole.once(), **close)
    assert in_parts.sizes == [8 // parts] * parts
    torch.testing.assert_close(in_parts.reduced, whole.reduced, **close)
    whole.once()
    in_parts.once()  # nothing is left over from the step before
    torch.testing.assert_close(in_parts.weights(), whole.weights(), **close)


def test_a_step_that_overflows_is_repeated_whole_at_half_the_scale_and_reduced_once() -> None:
    game, calm = Game(SiteConfig("16-mixed")), Game(SiteConfig("16-mixed"))
    for each in (game, calm):
        each.scale_by(2.0**10)
    game.factors = [float("inf"), float("nan"), 1.0]
    game.once()
    calm.once()
    assert len(game.sizes) == 3 and len(game.reduced) == 1
    assert game.scaler.get_scale() == calm.scaler.get_scale() / 4
    torch.testing.assert_close(game.weights(), calm.weights(), rtol=1e-3, atol=1e-4)


def test_gradients_that_are_finite_at_no_scale_end_the_run_in_one_line() -> None:
    game = Game(SiteConfig("16-mixed"))
    game.factors = [float("nan")] * 100
    before = game.weights()
    with pytest.raises(FedwanError, match="not finite at any loss scale.*bf16-mixed") as caught:
        game.once()
    assert "\n" not in str(caught.value)
    assert all(torch.equal(a, b) for a, b in zip(before, game.weights(), strict=True))


def test_each_networks_gradient_is_clipped_by_its_own_norm_after_unscaling() -> None:
    game = Game(SiteConfig("16-mixed"), InnerConfig("sgd", lr=1.0, beta1=0.0, clip_norm=1e-3))
    game.config.inner["second"].clip_norm = 1e-2
    before = game.weights()
    game.once()
    moved = [a - b for a, b in zip(before, game.weights(), strict=True)]
    norms = [
        float(torch.cat([m.flatten() for m in part]).norm()) for part in (moved[:2], moved[2:])
    ]
    assert norms == pytest.approx([1e-3, 1e-2], rel=1e-2)


def test_gradients_are_accumulated_where_hooks_of_ddp_see_them() -> None:
    game = Game(SiteConfig(accumulate=2))
    weight = game.networks["second"].weight
    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]  # as DDP finds it
    seen: list[int] = []
    accumulation.register_hook(lambda *_: seen.append(1))
    game.once()
    assert len(seen) == 2


def test_frozen_parameters_get_no_gradient_and_stay() -> None:
    game = Game()
    game.networks["first"].weight.requires_grad_(False)  # type: ignore[operator, union-attr]
    before = game.weights()
    game.once()
    moved = [not torch.equal(a, b) for a, b in zip(before, game.weights(), strict=True)]
    assert moved == [False, True, True, True] and len(game.reduced[0]["first"]) == 1


@pytest.mark.parametrize(
    ("precision", "dtype"), [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16)]
)
def test_samples_are_computed_as_steps_are_and_come_in_full(
    precision: str, dtype: torch.dtype
) -> None:
    net, dtypes = nn.Linear(2, 2), []
    net.register_forward_hook(lambda _, given, out: dtypes.append(out.dtype))
    config = Config(data=DataConfig("ring8"), inner={"net": SGD}, site=SiteConfig(precision))

    def sample(num: int, seed: int) -> Tensor:
        return net(torch.ones(num, 2))

    simple = Simple(config, "net", net, lambda *_: torch.zeros(()), sample)
    assert simple.sample(2, 0).dtype == torch.float32
    assert simple.evaluate(Batch(torch.ones(16, 2), torch.zeros(16).long()), 0)["fd"] > 0
    assert dtypes == [dtype, dtype]


def test_a_recipe_s_own_pictures_are_measured_as_files_are_and_other_samples_are_not(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(app, "load_workload", lambda name: SimpleNamespace(dataset=None))
    loss, sample = lambda *_: torch.zeros(()), lambda num, seed: torch.zeros(num, 1, 12, 12)
    config = Config(workload="mine", inner={"net": SGD})
    workload = Simple(config, "net", nn.Linear(1, 1), loss, sample)
    greys = torch.linspace(-1, 1, 20)
    real = Batch(greys[:, None, None, None].expand(-1, 1, 12, 12), torch.zeros(20).long())
    found = workload.evaluate(real, 0)
    assert found["num_real"] == 10 and "moments" in found and "histogram" not in found
    assert found["fd"] > found["fd_floor"]
    assert workload.evaluate(Batch(greys[:, None], real.y), 0) == {}
    bare: Any = real.x
    assert workload.evaluate(bare, 0)["fd"] == found["fd"]
    pair: Any = [real.x, real.y]
    with pytest.raises(ConfigError, match="'mine' come as a list; give tensors, or a fedwan"):
        workload.evaluate(pair, 0)
