"""LightningModules as people write them for a Trainer; none of them knows of fedwan."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits as bce
from torch.nn.functional import cross_entropy, mse_loss


class DigitsGan(pl.LightningModule):
    """Two optimisers in manual optimisation, with all that the documentation's GAN does."""

    def __init__(self, latents: int = 8, width: int = 32, lr: float = 2e-3) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.automatic_optimization = False
        self.generator = nn.Sequential(
            nn.Linear(latents, width), nn.ReLU(), nn.Linear(width, 64), nn.Tanh()
        )
        self.discriminator = nn.Sequential(
            nn.Linear(64, width), nn.LeakyReLU(0.2), nn.Linear(width, 1)
        )
        self.register_buffer("seen", torch.zeros(1))

    def forward(self, z: Tensor) -> Tensor:
        return self.generator(z).view(-1, 1, 8, 8)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), self.hparams.latents).type_as(images)

        self.toggle_optimizer(optimizer_g)
        logits = self.discriminator(self(z).flatten(1))
        loss_g = bce(logits, torch.ones_like(logits))
        self.log("g_loss", loss_g, prog_bar=True)
        self.manual_backward(loss_g)
        optimizer_g.step()
        optimizer_g.zero_grad()
        self.untoggle_optimizer(optimizer_g)

        self.toggle_optimizer(optimizer_d)
        real = self.discriminator(images.flatten(1))
        fake = self.discriminator(self(z).detach().flatten(1))
        loss_d = (bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake))) / 2
        self.log_dict({"d_loss": loss_d, "batch": float(batch_idx)})
        self.manual_backward(loss_d)
        self.clip_gradients(optimizer_d, gradient_clip_val=1.0, gradient_clip_algorithm="norm")
        optimizer_d.step()
        optimizer_d.zero_grad()
        self.untoggle_optimizer(optimizer_d)

    def configure_optimizers(self) -> tuple[list[Any], list[Any]]:
        networks = (self.generator, self.discriminator)
        return [
            torch.optim.Adam(n.parameters(), lr=self.hparams.lr, betas=(0.5, 0.999))
            for n in networks
        ], []

    def on_train_epoch_end(self) -> None:
        self.logger.experiment.add_image("generated", None, self.current_epoch)


class Remembering(DigitsGan):
    """Its samples are made of images that it was trained on."""

    samples_from_inputs = True


class TakingTurns(DigitsGan):
    """The discriminator on even batches, the generator on odd ones."""

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        images, _ = batch
        optimizer_g, optimizer_d = self.optimizers()
        z = torch.randn(len(images), self.hparams.latents)
        fake = self.discriminator(self(z).flatten(1))
        if batch_idx % 2:
            optimizer_g.zero_grad()
            self.manual_backward(bce(fake, torch.ones_like(fake)))
            optimizer_g.step()
            return
        real = self.discriminator(images.flatten(1))
        optimizer_d.zero_grad()
        self.manual_backward(bce(real, torch.ones_like(real)) + bce(fake, torch.zeros_like(fake)))
        optimizer_d.step()


class Autoencoder(pl.LightningModule):
    """One optimiser of two children and a bare parameter, in automatic optimisation, scheduled."""

    def __init__(self, size: int = 8, schedule: str = "step") -> None:
        super().__init__()
        self.schedule = schedule
        self.encoder = nn.Linear(64, size)
        self.decoder = nn.Linear(size, 64)
        self.offset = nn.Parameter(torch.zeros(64))
        self.frozen = nn.Linear(2, 2)

    def training_step(self, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor]:
        x = batch[0].flatten(1)
        return {"loss": mse_loss(self.decoder(torch.tanh(self.encoder(x))) + self.offset, x)}

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        assert not self.training and not torch.is_grad_enabled()
        self.log("val_loss", self.training_step(batch)["loss"])

    def configure_optimizers(self) -> dict[str, Any]:
        trained = [*self.encoder.parameters(), *self.decoder.parameters(), self.offset]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        if self.schedule == "one_cycle":
            scheduler: Any = torch.optim.lr_scheduler.OneCycleLR(
                optimizer, 1e-2, total_steps=self.trainer.estimated_stepping_batches
            )
            return {
                "optimizer": optimizer,
                "lr_scheduler": {"scheduler": scheduler, "interval": "step"},
            }
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
        return {
            "optimizer": optimizer,
            "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 3},
        }


class Classifier(pl.LightningModule):
    """The least that there is."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(64, 10)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return cross_entropy(self.net(batch[0].flatten(1)), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Probe(Classifier):
    """A head on a backbone, in one child, of which the optimiser has the head alone."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 10))

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net[2].parameters(), lr=0.1)


class WithoutOptimizers(Classifier):
    def configure_optimizers(self) -> None:
        return None


class WithoutConfigure(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> None: ...
