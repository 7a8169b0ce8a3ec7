"""A rectified flow (Liu et al. 2022): a velocity network, drawn noise levels, Euler sampling.

The network is a perceptron, or a transformer that is told the class of each sample and, for
classifier-free guidance, learns to do without. Its samples are of all classes alike.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from fedwan.app import num_experts
from fedwan.config import Config, DataConfig, InnerConfig
from fedwan.config_tree import NOT_NEGATIVE, POSITIVE, SHARE, one_of, setting, span
from fedwan.data import num_labels, source_of
from fedwan.errors import ConfigError
from fedwan.models.experts import build_experts, draw_experts, forward_drawn
from fedwan.models.velocity import VelocitySizes, build_velocity
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.uses import Needs
from fedwan.workloads import flow
from fedwan.workloads.base import Batch, NetworkKind, share_above
from fedwan.workloads.descent import Simple

NETWORKS: dict[str, NetworkKind] = {"velocity": "regression"}
HAS_EXPERTS = True


@dataclass
class Model:
    """Settings under `model.*`."""

    network: str = one_of("mlp", "dit")
    """`mlp`, or `dit`, a transformer on patches of images that is told their class."""
    width: int | None = setting(None, span(4))
    """Values of its residual stream, or of each token of `dit`; null takes 256, or 64."""
    depth: int | None = setting(None, span(1))
    """Its blocks; null takes 3, or 4 of `dit`."""
    patch: int = 4
    """Side of the patches that `dit` cuts images into."""
    heads: int = setting(4, span(1))
    """Of each attention of `dit`."""
    label_dropout: float = setting(0.1, SHARE)
    """Share of samples whose class `dit` is not told in training."""
    guidance: float = setting(1.0, NOT_NEGATIVE)
    """How closely samples of `dit` follow their class, at twice the cost unless it is 1."""
    shift: float = setting(1.0, POSITIVE)
    """Above 1 moves noise levels of training and sampling towards the noise, as large images
    need."""
    euler_steps: int = setting(20, span(1))
    """Steps from noise to a sample."""


_OWN = {"mlp": (256, 3, 5e-4), "dit": (64, 4, 3e-3)}
"""(width, depth, learning rate) of each network."""


def _own(config: Config) -> tuple[int, int, float]:
    return _OWN[config.model["network"]]


def _is_dit(config: Config, _: str) -> bool:
    return bool(config.model["network"] == "dit")


_OF_DIT = ("data.labels", *(f"model.{k}" for k in ("patch", "heads", "label_dropout", "guidance")))
USES = ("site.*", "privacy.*", *(Needs(key, _is_dit, "model.network=dit") for key in _OF_DIT))
DEFAULTS = {
    "data.batch": 64,
    "steps": 4000,
    "model.width": lambda config: _own(config)[0],
    "model.depth": lambda config: _own(config)[1],
    "inner.*": lambda config, kind: InnerConfig(lr=_own(config)[2], beta1=0.9, beta2=0.99),
}


def check(config: Config) -> None:
    """Refuse what cannot be built."""
    model = Model(**config.model)
    if model.guidance != 1 and not model.label_dropout:
        raise ConfigError(
            f"model.guidance = {model.guidance!r} needs velocities without a class, which "
            "model.label_dropout=0 never trains; set model.label_dropout=0.1"
        )
    if model.network == "dit":
        _check_patches(model, config.data)


def _check_patches(model: Model, data: DataConfig) -> None:
    """Refuse images that cannot be cut into patches, and tokens that heads cannot share."""
    shape = source_of(data).shape
    if len(shape) != 3:
        raise ConfigError(
            f"model.network = 'dit' needs images, which {data.name!r} has none of; "
            "set model.network=mlp"
        )
    side = math.gcd(*shape[1:])
    if model.patch < 1 or side % model.patch:
        fitting = ", ".join(str(patch) for patch in range(1, side + 1) if side % patch == 0)
        raise ConfigError(
            f"model.patch = {model.patch} does not divide images of {shape[1]} x {shape[2]}; "
            f"choose one of {fitting}"
        )
    unit = math.lcm(4, model.heads)
    if model.width % unit:
        raise ConfigError(
            f"model.width = {model.width} is no multiple of 4 and of model.heads = {model.heads}; "
            f"set model.width={max(1, round(model.width / unit)) * unit}"
        )


class Flow(Simple):
    """One velocity network."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.model = model = Model(**config.model)
        assert model.width and model.depth, "filled in by DEFAULTS"
        self.shape, num_classes = source_of(config.data).shape, num_labels(config)
        self.num_classes = num_classes if model.network == "dit" else 0
        """That the network is told; 0 for none."""
        sizes = VelocitySizes(model.network, model.width, model.depth, model.patch, model.heads)
        with seeded_init(config.seed):
            velocity = build_velocity(self.shape, num_classes, sizes)
        velocity = build_experts(velocity, num_experts(config), self.num_classes).to(device)
        super().__init__(config, "velocity", velocity, self._loss, self._draw)

    def _loss(self, batch: Batch, rng: NamedGenerators) -> Tensor:
        """Regression on the velocity at random noise levels."""
        device = self.device
        noise = torch.randn(batch.x.shape, generator=rng.on("noise", device), device=device)
        sigma = flow.draw_sigma(len(noise), rng["sigma"], self.model.shift)
        told = [sigma.to(device, non_blocking=True)]
        x, target = flow.interpolate(batch.x, noise, *told)
        if self.num_classes:
            share = self.model.label_dropout
            told.append(flow.drop_labels(batch.y, share, self.num_classes, rng["labels"]))
        return mse_loss(self.networks["velocity"](x, *told), target)

    def _draw(self, num: int, seed: int) -> Tensor:
        """Samples from fixed noise, (num, …); as many of each class, if classes are told."""
        return self.sample_like(flow.balanced_labels(num, max(1, self.num_classes), seed), seed)

    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """See `Descent`."""
        sigmas = flow.flow_sigmas(self.model.euler_steps, self.model.shift).to(self.device)
        told = (self.num_classes, self.model.guidance)
        network, solver = self.networks["velocity"], flow.EulerSolver(sigmas)
        velocity, drawn = partial(forward_drawn, network), draw_experts(network, labels, seed)
        return flow.sample_flow(velocity, solver, self.shape, labels, seed, *told, drawn)

    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        """See `fedwan.workloads.base`: has the network learnt its shard by heart?"""
        generator = torch.Generator().manual_seed(seed)
        noise = torch.randn(train.x.shape, generator=generator).to(self.device)
        sigma = flow.draw_sigma(len(noise), generator, self.model.shift)
        errors = [self._errors(batch, noise, sigma.to(self.device)) for batch in (held_out, train)]
        return {"memory/velocity": share_above(*errors)}

    def _errors(self, batch: Batch, noise: Tensor, sigma: Tensor) -> Tensor:
        """Squared error of the velocity for each sample, (batch,)."""
        x, target = flow.interpolate(batch.x, noise, sigma)
        told = [sigma, batch.y] if self.num_classes else [sigma]
        return (self.networks["velocity"](x, *told) - target).square().flatten(1).mean(1)


build = Flow
