"""What distillation is made of: the trained teacher, the judge's heads, a student's moving average.

A teacher is read from the folder of the run that trained it. Every site has its own copy, of
`config.yaml` and `checkpoint/coordinator.safetensors` at least, and all must hash alike.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.functional import layer_norm

from fedwan.app import num_experts
from fedwan.config import DataConfig, load_dumped
from fedwan.errors import ConfigError, FedwanError
from fedwan.models.velocity import VelocitySizes
from fedwan.weights import load as load_trained

_HIDDEN = 64  # values between a block's features and its logit


class FeatureHeads(nn.Module):
    """Discriminator heads on a frozen network's features (Sauer et al. 2024, 2403.12015).

    Features of each block, (batch, …, width) -> logits (batch, blocks, …), high for what looks
    real. What the frozen network sees in a sample is fixed, so the heads are small.
    """

    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.heads = nn.ModuleList(
            nn.Sequential(nn.Linear(width, _HIDDEN), nn.SiLU(), nn.Linear(_HIDDEN, 1))
            for _ in range(blocks)
        )

    def forward(self, features: Sequence[Tensor]) -> Tensor:
        """Logits of all blocks."""
        pairs = zip(self.heads, features, strict=True)
        logits = [head(layer_norm(f, f.shape[-1:])).squeeze(-1) for head, f in pairs]
        return torch.stack(logits, dim=1)


class Followed(nn.Module):
    """A network and a moving average of its weights, the target of consistency training.

    With parameters p and decay d, after each step

        average' = d average + (1 - d) p'     kept as     lag' = d (lag + p - p')

    The average, p + lag, moves along where a merge moves the parameters. The lag is a site's own:
    it is in checkpoints, and never travels. A half-life of 0 steps makes the average the network
    itself. Memory: one more copy of the parameters, two while `target` runs.
    """

    def __init__(self, network: nn.Module, half_life: float) -> None:
        super().__init__()
        self.network = network
        self.decay = 0.5 ** (1 / half_life) if half_life else 0.0
        for index, param in enumerate(network.parameters()):
            # Not persistent: it stays at home.
            self.register_buffer(f"lag{index}", torch.zeros_like(param), persistent=False)

    def forward(self, *inputs: Tensor) -> Tensor:
        """The network's output."""
        return self.network(*inputs)  # type: ignore[no-any-return]

    @torch.no_grad()
    def target(self, *inputs: Tensor) -> Tensor:
        """What the averaged weights make of the inputs; no gradient."""
        names = [name for name, _ in self.network.named_parameters()]
        average = [param + lag for param, lag in self._pairs()]
        named = dict(zip(names, average, strict=True))
        return functional_call(self.network, named, inputs)  # type: ignore[no-any-return]

    def follow(self, optimizer: torch.optim.Optimizer) -> None:
        """Have the average follow every step that the parameters take."""

        def begin(*_: object) -> None:
            for param, lag in self._pairs():
                lag.add_(param.detach())

        def end(*_: object) -> None:
            for param, lag in self._pairs():
                lag.sub_(param.detach()).mul_(self.decay)

        optimizer.register_step_pre_hook(begin)
        optimizer.register_step_post_hook(end)

    def _pairs(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Parameters and their lags."""
        return zip(self.network.parameters(), self.buffers(recurse=False), strict=True)


class Teacher(NamedTuple):
    """What a flow's run says of its network."""

    folder: Path
    data: DataConfig
    sizes: VelocitySizes
    label_dropout: float
    shift: float
    """Of the schedule that it was trained and sampled with."""
    euler_steps: int
    """That it is sampled with."""


def read_teacher(folder: Path) -> Teacher:
    """What a run's folder says of the flow that was trained there; weights are not read yet."""

    def refused(what: str) -> ConfigError:
        return ConfigError(f"model.teacher = {str(folder)!r} {what}")

    if not (folder / "config.yaml").is_file():
        raise refused(
            "holds no config.yaml on this machine; name the folder of a run with workload=flow, "
            f"which every site has a copy of (`fedwan demo workload=flow out={folder}` makes one)"
        )
    config = load_dumped(folder)
    if config.workload != "flow":
        raise refused(f"is of a run with workload = {config.workload!r}; name one of workload=flow")
    if config.data.labels == "site" or config.excluded or num_experts(config):
        raise refused(
            "is of a run with data.labels=site, network.velocity.exclude or strategy=experts, "
            "which has no one flow of classes; name the folder of one without"
        )
    model = config.model
    sizes = VelocitySizes(*(model[field] for field in VelocitySizes._fields))
    rest = (model[field] for field in ("label_dropout", "shift", "euler_steps"))
    if not (folder / "checkpoint" / "coordinator.safetensors").is_file():
        raise refused("holds no checkpoint/coordinator.safetensors; wait until that run is done")
    return Teacher(folder, config.data, sizes, *rest)


def load_teacher(teacher: Teacher, network: nn.Module) -> None:
    """Put the moving average of the teacher's weights into a network, in place."""
    try:
        missing = load_trained(teacher.folder).load_into(network, "velocity")
    except FedwanError as error:
        raise ConfigError(f"model.teacher: {error} (copy both files from one run)") from None
    if missing:
        raise ConfigError(
            f"model.teacher = {str(teacher.folder)!r}: weight {missing[0]!r} is missing; copy both "
            "files from the same run"
        )
