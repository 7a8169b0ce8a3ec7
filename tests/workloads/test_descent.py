"""From a batch to a completed step."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig, SiteConfig
from fedwan.errors import FedwanError
from fedwan.workloads.base import Batch, keep_local
from fedwan.workloads.descent import Descent

SGD = InnerConfig("sgd", lr=0.1, beta1=0.0)
BATCH = Batch(torch.randn(8, 3, generator=torch.Generator().manual_seed(0)), torch.zeros(8))


class Game:
    """Two networks, each with a loss that depends on both."""

    def __init__(self, site: SiteConfig, inner: InnerConfig = SGD) -> None:
        torch.manual_seed(0)
        networks = {name: nn.Linear(3, 1) for name in ("first", "second")}
        config = Config(inner={name: copy.copy(inner) for name in networks}, site=site)
        self.descent = Descent(config, networks)
        self.sizes: list[int] = []
        self.dtypes: set[torch.dtype] = set()
        self.overflow_at: tuple[float, ...] = ()
        """Factors of the second network's loss, attempt by attempt."""

    def backward(self, batch: Batch) -> dict[str, Tensor]:
        first, second = (network(batch.x) for network in self.descent.networks.values())
        self.dtypes.add(first.dtype)
        self.sizes.append(len(batch.x))
        losses = {"first": (first - second).square().mean(), "second": (first * second).mean()}
        factor, *self.overflow_at = self.overflow_at or (1.0,)  # type: ignore[assignment]
        self.descent.add_gradients("first", losses["first"], keep_graph=True)
        self.descent.add_gradients("second", losses["second"] * factor)
        return losses

    def step(self, names: Sequence[str] = ("first", "second")) -> dict[str, Tensor]:
        return self.descent.step(names, BATCH, self.backward, self.reduce)

    def reduce(self, names: Sequence[str]) -> None:
        self.reduced = {
            name: [
                p.grad.clone()
                for p in self.descent.networks[name].parameters()
                if p.grad is not None
            ]
            for name in names
        }
        keep_local(names)

    def weights(self) -> list[Tensor]:
        return [p.detach().clone() for n in self.descent.networks.values() for p in n.parameters()]


def test_each_network_gets_the_gradient_of_its_own_loss() -> None:
    game = Game(SiteConfig())
    first, second = game.descent.networks.values()
    out = first(BATCH.x), second(BATCH.x)
    expected = torch.autograd.grad((out[0] - out[1]).square().mean(), list(first.parameters()))
    game.step()
    torch.testing.assert_close(tuple(game.reduced["first"]), expected)


@pytest.mark.parametrize("precision", ["32-true", "16-mixed"])
@pytest.mark.parametrize("parts", [2, 8])
def test_parts_of_a_batch_have_its_mean_gradient_and_losses(parts: int, precision: str) -> None:
    whole, in_parts = Game(SiteConfig(precision)), Game(SiteConfig(precision, accumulate=parts))
    for game in (whole, in_parts):
        for scale in game.descent.kept.values():
            scale.clamp_(max=2**8)  # nothing overflows
    losses = whole.step(), in_parts.step()
    assert in_parts.sizes == [8 // parts] * parts
    tolerance = 1e-6 if precision == "32-true" else 2e-3
    torch.testing.assert_close(
        losses[1], losses[0], rtol=tolerance, atol=tolerance, check_dtype=False
    )
    torch.testing.assert_close(in_parts.reduced, whole.reduced, rtol=tolerance, atol=tolerance)
    whole.step()
    in_parts.step()  # nothing is left over from the step before
    torch.testing.assert_close(in_parts.weights(), whole.weights(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("precision", "dtype"),
    [("32-true", torch.float32), ("bf16-mixed", torch.bfloat16), ("16-mixed", torch.float16)],
)
def test_mixed_precision_computes_in_half_and_keeps_weights_and_gradients_in_full(
    precision: str, dtype: torch.dtype
) -> None:
    game, full = Game(SiteConfig(precision)), Game(SiteConfig())
    game.step()
    full.step()
    assert game.dtypes == {dtype}
    assert all(weight.dtype == torch.float32 for weight in game.weights())
    assert all(g.dtype == torch.float32 for g in game.reduced["first"])
    torch.testing.assert_close(game.reduced, full.reduced, rtol=2e-2, atol=2e-2)


def test_a_step_that_overflows_is_repeated_whole_at_half_the_scale_and_reduced_once() -> None:
    game, calm = Game(SiteConfig("16-mixed")), Game(SiteConfig("16-mixed"))
    for each in (game, calm):
        each.descent.kept["scale"].fill_(2**10)
    game.overflow_at = (float("inf"), float("nan"), 1.0)
    seen: list[int] = []
    game.descent.step(("first", "second"), BATCH, game.backward, lambda names: seen.append(1))
    calm.step()
    assert len(game.sizes) == 3 and seen == [1]
    assert float(game.descent.kept["scale"]) == float(calm.descent.kept["scale"]) / 4
    torch.testing.assert_close(game.weights(), calm.weights(), rtol=1e-3, atol=1e-4)


def test_gradients_that_are_finite_at_no_scale_end_the_run() -> None:
    game = Game(SiteConfig("16-mixed"))
    game.overflow_at = (float("nan"),) * 100
    before = game.weights()
    with pytest.raises(FedwanError, match="not finite"):
        game.step()
    assert all(torch.equal(a, b) for a, b in zip(before, game.weights(), strict=True))


def test_each_networks_gradient_is_clipped_by_its_own_norm_after_unscaling() -> None:
    game = Game(SiteConfig("16-mixed"), InnerConfig("sgd", lr=1.0, beta1=0.0, clip_norm=1e-3))
    before = game.weights()
    game.step()
    moved = [a - b for a, b in zip(before, game.weights(), strict=True)]
    for network in (moved[:2], moved[2:]):
        norm = torch.cat([m.flatten() for m in network]).norm()
        assert float(norm) == pytest.approx(1e-3, rel=1e-2)


def test_gradients_are_accumulated_where_hooks_of_ddp_see_them() -> None:
    game = Game(SiteConfig(accumulate=2))
    weight = game.descent.networks["second"].weight
    accumulation = weight.expand_as(weight).grad_fn.next_functions[0][0]  # as DDP finds it
    seen: list[int] = []
    accumulation.register_hook(lambda *_: seen.append(1))
    game.step()
    assert len(seen) == 2


def test_frozen_parameters_get_no_gradient_and_stay() -> None:
    game = Game(SiteConfig())
    frozen = game.descent.networks["first"].weight
    frozen.requires_grad_(False)  # type: ignore[operator, union-attr]
    before = game.weights()
    game.step()
    moved = [not torch.equal(a, b) for a, b in zip(before, game.weights(), strict=True)]
    assert moved == [False, True, True, True] and len(game.reduced["first"]) == 1
