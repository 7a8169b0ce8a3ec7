"""How a LightningModule's steps are taken."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader

from fedwan.config import Config, InnerConfig, SiteConfig
from fedwan.errors import ConfigError, UserError
from fedwan.lightning.fit import Fit
from fedwan.workloads.base import Batch, keep_local
from tests.lightning.modules import (
    Autoencoder,
    Classifier,
    DigitsGan,
    TakingTurns,
    WithoutOptimizers,
)


def batch(num: int = 8, seed: int = 0) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 1, 8, 8, generator=generator) * 2 - 1
    return Batch(x, torch.arange(num) % 10)


def fit(module: Any, site: SiteConfig | None = None, **inner: InnerConfig) -> Fit:
    config = Config(steps=20, sites=2, site=site or SiteConfig())
    config.data.batch = 8
    own = {name: InnerConfig("own") for name in ("generator", "discriminator", "model", "net")}
    config.inner = own | inner
    return Fit(module, config)


def seeded(module_class: type, *args: Any) -> Any:
    torch.manual_seed(0)
    return module_class(*args)


def params(module: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in module.parameters()]


def same(a: Sequence[Tensor], b: Sequence[Tensor]) -> bool:
    return all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


class Seeded(DigitsGan):
    """Draws the same, whatever drew before."""

    def training_step(self, batch: Any, batch_idx: int) -> None:
        torch.manual_seed(batch_idx)
        super().training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None: ...


def test_a_manual_gan_moves_to_the_bits_that_lightnings_own_trainer_leads_to(
    tmp_path: Path,
) -> None:
    ours, theirs = seeded(Seeded), seeded(Seeded)
    batches = [batch(seed=index) for index in range(5)]
    driver = fit(ours)
    for each in batches:
        driver.step(each, keep_local)
    off = dict.fromkeys(
        ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False
    )
    trainer = pl.Trainer(max_epochs=1, accelerator="cpu", default_root_dir=tmp_path, **off)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(theirs, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    assert same(params(ours), params(theirs))
    assert not same(params(ours), params(seeded(Seeded)))


def test_an_automatic_module_takes_the_step_of_its_optimiser() -> None:
    module, twin = seeded(Classifier), seeded(Classifier)
    losses = fit(module).step(batch(), keep_local)
    loss = twin.training_step(batch(), 0)
    loss.backward()
    torch.optim.SGD(twin.parameters(), lr=0.1).step()
    assert same(params(module), params(twin))
    assert float(losses["loss"]) == pytest.approx(loss.item())


def test_parts_of_a_batch_make_one_step_of_an_automatic_module() -> None:
    whole, in_parts = seeded(Classifier), seeded(Classifier)
    fit(whole).step(batch(), keep_local)
    driver = fit(in_parts, SiteConfig(accumulate=4))
    driver.step(batch(), keep_local)
    torch.testing.assert_close(params(in_parts), params(whole))


def test_networks_are_reduced_before_they_step_and_clipped_by_their_own_norm() -> None:
    seen: list[tuple[str, ...]] = []
    module = seeded(DigitsGan)
    before = params(module)
    driver = fit(module, generator=InnerConfig("own", clip_norm=1e-6))
    driver.module.on_before_optimizer_step = lambda optimizer: norms.append(
        float(
            torch.cat(
                [p.grad.flatten() for g in optimizer.param_groups for p in g["params"]]
            ).norm()
        )
    )
    norms: list[float] = []

    def reduce(names: Sequence[str]) -> None:
        seen.append(tuple(names))
        if len(seen) == 1:
            assert same(params(module), before)

    driver.step(batch(), reduce)
    assert seen == [("generator",), ("discriminator",)]
    assert norms[0] == pytest.approx(1e-6, rel=1e-3) and norms[1] > 1e-4


def test_networks_that_take_turns_make_one_step_together() -> None:
    module = seeded(TakingTurns)
    driver = fit(module, SiteConfig(accumulate=2))
    for step in range(3):
        before = params(module)
        driver.begin(step)
        driver.step(batch(), keep_local)
        assert not any(torch.equal(a, b) for a, b in zip(before, params(module), strict=True))


def test_a_step_in_which_an_optimiser_takes_none_is_refused() -> None:
    driver = fit(seeded(TakingTurns))
    with pytest.raises(UserError, match="called 1 times .*'generator' took no step; set site.acc"):
        driver.step(batch(), keep_local)


@pytest.mark.parametrize("precision", ["bf16-mixed", "16-mixed"])
@pytest.mark.parametrize("module_class", [DigitsGan, Classifier])
def test_half_precision_comes_near(module_class: type, precision: str) -> None:
    full, half = seeded(module_class), seeded(module_class)
    for module, name in ((full, "32-true"), (half, precision)):
        torch.manual_seed(1)
        fit(module, SiteConfig(name)).step(batch(), keep_local)
    for a, b in zip(params(full), params(half), strict=True):
        assert b.dtype == torch.float32
        torch.testing.assert_close(b, a, rtol=0.1, atol=5e-3)
    assert not same(params(full), params(half))


def test_an_overflow_skips_its_optimiser_and_the_step_is_taken_again() -> None:
    module = seeded(DigitsGan)
    driver = fit(module, SiteConfig("16-mixed"))
    driver.kept["scale"].fill_(2.0**10)
    calls: list[int] = []
    real = driver.unscale

    def unscale(optimizer: torch.optim.Optimizer) -> bool:
        calls.append(len(calls))
        if len(calls) <= 2:  # the generator's, asked for by the step alone
            for group in optimizer.param_groups:
                for p in group["params"]:
                    p.grad.fill_(float("inf"))
        return real(optimizer)

    driver.unscale = unscale  # type: ignore[method-assign]
    driver.step(batch(), keep_local)
    assert float(driver.kept["scale"]) == 2.0**9
    assert all(torch.isfinite(p).all() for p in params(module))


def test_an_automatic_schedule_follows_the_run_wherever_it_goes() -> None:
    driver = fit(seeded(Autoencoder))
    rates = []
    for step in (0, 1, 2, 3, 6, 2, 7):
        driver.begin(step)
        driver.step(batch(), keep_local)
        rates.append(driver.optimizers["model"].param_groups[0]["lr"])
    assert rates == pytest.approx([1e-2, 1e-2, 1e-2, 5e-3, 2.5e-3, 1e-2, 2.5e-3])


def test_a_schedule_may_need_the_number_of_steps() -> None:
    driver = fit(seeded(Autoencoder, 8, "one_cycle"))
    rates = []
    for step in range(20):
        driver.begin(step)
        driver.step(batch(), keep_local)
        rates.append(driver.optimizers["model"].param_groups[0]["lr"])
    assert max(rates) == pytest.approx(1e-2) and rates[0] < 1e-3 and rates[-1] < 1e-5


class Manual(Classifier):
    """Steps its own schedule."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[override]
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()
        self.lr_schedulers().step()

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)]


def test_what_a_module_did_with_its_own_schedule_is_kept() -> None:
    first, second = fit(seeded(Manual)), fit(seeded(Manual))
    for _ in range(3):
        first.step(batch(), keep_local)
    assert int(first.kept["scheduler0"]) == 3
    second.kept["scheduler0"].copy_(first.kept["scheduler0"])
    second.step(batch(), keep_local)
    first.step(batch(), keep_local)
    rates = [driver.optimizers["net"].param_groups[0]["lr"] for driver in (first, second)]
    assert rates == pytest.approx([0.1 / 16, 0.1 / 16])


def test_what_it_validates_is_what_it_logs_and_returns() -> None:
    driver = fit(seeded(Autoencoder))
    driver.module.eval()
    found = driver.validate(batch())
    assert set(found) == {"val_loss"} and found["val_loss"] > 0
    assert fit(seeded(Classifier)).validate(batch()) == {}


class Plateau(Classifier):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        scheduler = torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer)
        return {"optimizer": optimizer, "lr_scheduler": scheduler, "monitor": "loss"}


class TwoAutomatic(DigitsGan):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = True


class ReturnsText(Classifier):
    def configure_optimizers(self) -> Any:
        return "adam"


class ReadsTrainer(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        assert not hasattr(self.trainer, "fit_loop")
        return self.trainer.fit_loop


class ReturnsNothing(Classifier):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return None


@pytest.mark.parametrize(
    ("module_class", "error", "text"),
    [
        (WithoutOptimizers, ConfigError, "returns no optimiser"),
        (Plateau, ConfigError, "ReduceLROnPlateau, whose rates would differ between sites"),
        (TwoAutomatic, ConfigError, "configure_optimizers: Training with multiple optimizers"),
        (ReturnsText, ConfigError, "configure_optimizers: Unknown configuration"),
        (ReadsTrainer, UserError, "reads trainer.fit_loop, which a site has none of"),
        (ReturnsNothing, UserError, "training_step returned no loss"),
    ],
)
def test_what_cannot_be_trained_is_refused_in_one_line(
    module_class: type, error: type, text: str
) -> None:
    with pytest.raises(error, match=text) as caught:
        fit(seeded(module_class)).step(batch(), keep_local)
    assert "\n" not in str(caught.value)


def test_a_module_may_be_copied_away_from_its_trainer() -> None:
    module = seeded(Classifier)
    fit(module)
    assert same(params(copy.deepcopy(module.net)), params(module.net))
