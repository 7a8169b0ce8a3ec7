"""LightningModules and a whole fit, for tests; as a program, the script of a site."""

from __future__ import annotations

import json
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from pytorch_lightning import Callback, LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from fedwan.lightning import FedwanCallback


class Points(Dataset[Tensor]):
    """24 points, blurred anew whenever one is read."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> Tensor:
        return torch.tensor([index / 24.0, 1.0]) + 0.1 * torch.randn(2)


class Stream(IterableDataset[Tensor]):
    """Points that are read once, of a number or without an end; it can tell its place."""

    def __init__(self, length: int = sys.maxsize) -> None:
        self._length, self._at = length, 0

    def __iter__(self) -> Iterator[Tensor]:
        while self._at < self._length:
            self._at += 1
            yield torch.tensor([self._at / 24.0, 1.0])

    def state_dict(self) -> dict[str, int]:
        return {"at": self._at}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self._at = state["at"]


def loader_of(kind: str) -> Any:
    """Shuffled by global generators, or by one of its own."""
    generator = torch.Generator().manual_seed(4) if kind == "seeded" else None
    made = DataLoader if kind == "plain" else StatefulDataLoader
    return made(Points(), 4, shuffle=True, generator=generator)


class Net(LightningModule):
    """One network and one optimiser; draws from torch's global generator."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.frozen = nn.Linear(2, 2).requires_grad_(False)

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = (self.net(batch) - self.frozen(batch)).square().mean()
        self.log("loss", loss, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Tensor, batch_idx: int) -> None:
        """Returns nothing, logs nothing."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        linear = torch.optim.lr_scheduler.LinearLR(optimizer, 0.5, total_iters=9)
        schedules = [
            {"scheduler": torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.8)},
            {
                "scheduler": torch.optim.lr_scheduler.ChainedScheduler([linear]),
                "interval": "step",
            },
        ]
        return [optimizer], schedules


class Plain(Net):
    """Without schedules."""

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam([p for p in self.parameters() if p.requires_grad], lr=0.01)


class Annealed(Plain):
    """Its loss falls with the steps that are left."""

    def __init__(self) -> None:
        super().__init__()
        self.left: list[float] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.left.append(1 - self.global_step / self.trainer.max_steps)
        return super().training_step(batch, batch_idx) * self.left[-1]


class Clipping(Plain):
    """By itself."""

    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.01, gradient_clip_algorithm="norm")


class Scaling(Plain):
    """Its hook changes gradients, after the callback's."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for param in self.net.parameters():
            param.grad.mul_(0.01)  # type: ignore[union-attr]


class Falling(Plain):
    """A rate that falls from the run's own."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Cycle(Plain):
    """A rate whose schedule is as long as the fit."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        total_steps = int(self.trainer.estimated_stepping_batches)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 0.02, total_steps)
        return [optimizer], [{"scheduler": schedule, "interval": "step"}]


class Loose(Plain):
    """Trains a parameter that is in no network."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(1))


class Keeping(Plain):
    """Holds outside of its network what changes as it trains, and a megabyte that does not."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("scale", torch.ones(()))
        self.register_buffer("bank", torch.zeros(0, 2))
        self.register_buffer("last", None)
        self.norm = nn.BatchNorm1d(2, affine=False)
        self.ema = AveragedModel(self.net, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.vae = nn.Linear(512, 512).requires_grad_(False)

    def on_train_batch_start(self, batch: Tensor, batch_idx: int) -> None:
        if self.global_step == 0:
            self.scale.copy_(1 / batch.std())

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        self.bank, self.last = torch.cat([self.bank, batch[:1]]), batch[0].clone()
        return super().training_step(self.norm(batch) * self.scale, batch_idx)

    def on_train_batch_end(self, *_: Any) -> None:
        self.ema.update_parameters(self.net)

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.net.parameters(), lr=0.01)


class Renewing(Plain):
    """Its optimiser is made anew for the second epoch."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.trainer.strategy.setup_optimizers(self.trainer)


class Thawing(Plain):
    """Trains a second network from the second epoch on."""

    def on_train_epoch_start(self) -> None:
        if self.current_epoch == 1:
            self.frozen.requires_grad_(True)
            self.optimizers().add_param_group({"params": self.frozen.parameters()})


class Gan(LightningModule):
    """Two networks in manual optimisation: in every batch both, or in turns."""

    automatic_optimization = False

    def __init__(self, in_turns: bool = False) -> None:
        super().__init__()
        self.in_turns = in_turns
        self.generator = nn.Sequential(nn.Linear(2, 8), nn.ReLU(), nn.Linear(8, 2))
        self.discriminator = nn.Sequential(nn.Linear(2, 8), nn.Dropout(0.3), nn.Linear(8, 1))

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        wanted = [batch_idx % 2] if self.in_turns else [0, 1]
        for index in wanted:
            fake = self.generator(torch.randn(len(batch), 2))
            score = self.discriminator(fake)
            loss = -score.mean() if index else (score - self.discriminator(batch)).mean()
            optimizer = self.optimizers()[index]
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.log(f"loss_{index}", loss)

    def configure_optimizers(self) -> Any:
        nets = (self.discriminator, self.generator)
        return [torch.optim.Adam(net.parameters(), lr=0.01) for net in nets]


class Together(Gan):
    """Both networks' gradients before either steps."""

    def training_step(self, batch: Tensor, batch_idx: int) -> None:
        discriminator, generator = self.optimizers()
        discriminator.zero_grad()
        generator.zero_grad()
        fake = self.generator(torch.randn(len(batch), 2))
        self.manual_backward(self.discriminator(fake).mean() + self.discriminator(batch).mean())
        discriminator.step()
        generator.step()


MODULES: dict[str, Callable[[], LightningModule]] = {
    "net": Net,
    "plain": Plain,
    "clipping": Clipping,
    "scaling": Scaling,
    "falling": Falling,
    "keeping": Keeping,
    "cycle": Cycle,
    "loose": Loose,
    "renewing": Renewing,
    "thawing": Thawing,
    "gan": Gan,
    "turns": partial(Gan, in_turns=True),
    "together": Together,
}


def fit(
    folder: Path,
    module: str | Callable[[], LightningModule] = "net",
    loader: Any = "plain",
    callbacks: Sequence[Callback] = (),
    with_fedwan: bool = True,
    ckpt_path: Path | None = None,
    **settings: Any,
) -> LightningModule:
    """A script's whole work, from its seed on."""
    seed_everything(7, verbose=False)
    made = (MODULES[module] if isinstance(module, str) else module)()
    own = [FedwanCallback()] if with_fedwan else []
    trainer = Trainer(
        default_root_dir=folder,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        callbacks=[*own, *callbacks],
        **{"max_epochs": -1, "logger": False, "enable_checkpointing": False} | settings,
    )
    validation = DataLoader(Points(), 6) if module == "net" else None
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        given = loader_of(loader) if isinstance(loader, str) else loader
        trainer.fit(made, given, validation, ckpt_path=ckpt_path)
    return made


class Dawdle(Callback):
    """Leaves time to be killed in."""

    def on_train_batch_start(self, *_: Any) -> None:
        time.sleep(0.05)


class Order(Callback):
    """Tells what this process reads in its first epoch."""

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        path = Path(trainer.default_root_dir) / f"order{trainer.global_rank}.json"
        order = list(trainer.train_dataloader.sampler)
        path.write_text(json.dumps({"order": order, "seed": torch.initial_seed()}))


if __name__ == "__main__":
    folder, module, loader, *ddp = sys.argv[1:]
    shared: dict[str, Any] = {"strategy": "ddp", "devices": 2} if ddp else {"val_check_interval": 4}
    fit(Path(folder), module, loader, [Order() if ddp else Dawdle()], **shared)
