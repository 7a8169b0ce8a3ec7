"""A GAN: non-saturating, hinge or relativistic loss, R1 and R2 penalties, spectral norm, classes.

Both gradients are taken at the present weights, exchanged together if the strategy exchanges
gradients, and then both networks step: simultaneous descent, the game that the R1 penalty was shown
to make converge (Mescheder et al. 2018). So one step costs one exchange.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from fedwan.app import num_experts
from fedwan.config import Config, InnerConfig
from fedwan.config_tree import NOT_NEGATIVE, one_of, setting, span
from fedwan.data import num_labels, source_of
from fedwan.errors import ConfigError
from fedwan.models.experts import build_experts, draw_experts, forward_drawn
from fedwan.models.gan import SIDES, build_discriminator, build_generator, normalize_spectra
from fedwan.models.layers import at_once, clamp_images
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.uses import Needs
from fedwan.workloads.adversarial import LOSSES, GanLoss, gradient_penalty
from fedwan.workloads.base import Batch, NetworkKind, share_above, spread
from fedwan.workloads.descent import Descent

NETWORKS: dict[str, NetworkKind] = {"discriminator": "adversarial", "generator": "adversarial"}
HAS_EXPERTS = True

_LR, _LR_DEEP = 3e-3, 3e-4  # at 32 pixels a side 3e-3 diverges within 200 steps


@dataclass
class Model:
    """Settings under `model.*`."""

    latents: int = setting(16, span(1))
    """Normal values that a sample is made from."""
    width: int = setting(24, span(1))
    """Channels of both networks' finest layer; each coarser one has twice as many, 8 times at
    most."""
    loss: str = one_of(*LOSSES)
    """`non_saturating`, `hinge` or `relativistic`, see `fedwan.workloads.adversarial`."""
    gamma: float = setting(0.3, NOT_NEGATIVE)
    """Weight of the R1 penalty: less lets the discriminator chase single samples."""
    gamma_fake: float = setting(0.0, NOT_NEGATIVE)
    """Weight of the R2 penalty, the same at generated samples."""
    spectral_norm: bool = False
    """Whether the discriminator's layers are kept at spectral norm 1 (Miyato et al. 2018)."""
    conditional: bool = False
    """Whether both networks are told the class, or the site (`data.labels=site`): generated samples
    are then judged as the classes of the real ones beside them, so that a site trains the generator
    for the classes it has."""


def _lr(config: Config) -> float:
    shape = source_of(config.data).shape
    return _LR_DEEP if len(shape) == 3 and shape[-1] > min(SIDES) else _LR


def _has_private_part(config: Config, _: str) -> bool:
    """Whether all that the real samples do is a term of D's loss for each, and one step."""
    model = Model(**config.model)
    is_each = not (model.conditional or model.spectral_norm or model.loss == "relativistic")
    return is_each or config.privacy.name == "site"


USES = (
    *("site.precision*", "site.accumulate", "site.partition", "site.partition=weights"),
    Needs("data.labels", lambda c, _: c.model["conditional"], "model.conditional=true"),
    Needs(
        "model.spectral_norm",
        lambda c, _: c.site.partition != "weights",
        "site.partition=gradients",
    ),
    Needs(
        "privacy.epsilon",
        _has_private_part,
        "a GAN without classes, spectral norm and relativistic loss",
    ),
)
DEFAULTS = {
    "data.batch": 32,
    "steps": 2800,
    "inner.*": lambda config, kind: InnerConfig(lr=_lr(config), beta1=0.0, beta2=0.99),
}


def check(config: Config) -> None:
    """Refuse what cannot be built."""
    sides = source_of(config.data).shape[1:]
    if sides and not (sides[0] == sides[1] and sides[0] in SIDES):
        below, above = [s for s in SIDES if s < sides[0]], [s for s in SIDES if s > sides[0]]
        nearest = " or ".join(map(str, (*below[-1:], *above[:1])))
        raise ConfigError(
            f"workload 'gan' makes images of {', '.join(map(str, SIDES))} pixels a side, and those "
            f"of {config.data.name!r} are {sides[0]} x {sides[1]}; set data.size={nearest}"
        )


class Gan(Descent):
    """A generator and a discriminator."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.model = model = Model(**config.model)
        self.num_classes = num_labels(config) if model.conditional else 0
        """That both networks are told; 0 for none."""
        self.shape, told = source_of(config.data).shape, self.num_classes
        with seeded_init(config.seed):
            discriminator = build_discriminator(self.shape, model.width, told)
            generator = build_generator(self.shape, model.latents, model.width, told)
            if model.spectral_norm:
                normalize_spectra(discriminator)
        networks = {
            name: build_experts(network, num_experts(config), told).to(device)
            for name, network in (("discriminator", discriminator), ("generator", generator))
        }
        super().__init__(config, networks, twice=("discriminator",))

    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """Of both networks, each against the other as it was."""
        if self.privacy is not None:
            return self._private_backward(batch, rng)
        generator, discriminator = self.networks["generator"], self.networks["discriminator"]
        fake = generator(self._latents(len(batch.x), rng.on("latent", self.device)), batch.y)
        real = batch.x.detach().requires_grad_()
        real_logits, fake_logits = discriminator(real, batch.y), discriminator(fake, batch.y)
        loss: GanLoss = LOSSES[self.model.loss]
        losses = {"discriminator": loss.discriminator(real_logits, fake_logits)}
        losses["r1"] = gradient_penalty(real, real_logits)
        total = losses["discriminator"] + self.model.gamma / 2 * losses["r1"]
        if self.model.gamma_fake:
            losses["r2"] = gradient_penalty(fake, fake_logits)
            total = total + self.model.gamma_fake / 2 * losses["r2"]
        losses["generator"] = loss.generator(real_logits, fake_logits)
        self.add_gradients("discriminator", total, keep_graph=True)
        self.add_gradients("generator", losses["generator"])
        return losses

    def _private_backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """As `backward`: noise on what comes of real samples, which the generator never sees.

        How many are generated does not depend on how many real ones were drawn.
        """
        discriminator, loss = self.networks["discriminator"], LOSSES[self.model.loss]
        fake = self.networks["generator"](
            self._latents(self.config.data.batch, rng.on("latent", self.device))
        )
        fake_logits = discriminator(fake)
        no_logits = torch.zeros_like(fake_logits)  # their term has no gradient
        total = loss.discriminator(no_logits, fake_logits)
        if self.model.gamma_fake:
            total = total + self.model.gamma_fake / 2 * gradient_penalty(fake, fake_logits)
        losses = {"generator": loss.generator(no_logits, fake_logits)}
        self.add_gradients("discriminator", total, keep_graph=True)
        self.add_gradients("generator", losses["generator"])
        self.add_private_gradients("discriminator", self._real_loss, batch)
        return losses

    def _real_loss(self, real: Batch) -> Tensor:
        """D's loss of real samples alone, with R1, as `torch.func` can differentiate it."""
        discriminator = self.networks["discriminator"]
        logits = discriminator(real.x)
        gradient = torch.func.grad(lambda x: discriminator(x).sum())(real.x)
        penalty = gradient.square().flatten(1).sum(dim=1).mean()
        loss = LOSSES[self.model.loss].discriminator(logits, torch.zeros_like(logits))
        return loss + self.model.gamma / 2 * penalty

    def sample(self, num: int, seed: int) -> Tensor:
        """Samples from fixed latents, (num, …); as many of each class, if classes are told."""
        return self.sample_like(torch.arange(num) % max(1, self.num_classes), seed)

    @torch.no_grad()
    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """See `Descent`."""
        num = len(labels)
        latents = self._latents(num, torch.Generator().manual_seed(derive_seed(seed, "sample")))
        generator = self.networks["generator"]
        told = (draw_experts(generator, labels, seed), latents, labels.to(self.device))
        parts = zip(*(tensor.split(at_once(self.shape)) for tensor in told), strict=True)
        return torch.cat([clamp_images(forward_drawn(generator, *part)) for part in parts])

    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        """See `fedwan.workloads.base`: has D learnt its shard, has G collapsed?"""
        discriminator = self.networks["discriminator"]
        latents = self._latents(len(train.x), torch.Generator().manual_seed(seed))
        fake = self.networks["generator"](latents, train.y)
        held_out_logits = discriminator(held_out.x, held_out.y)
        return {
            "memory/discriminator": share_above(discriminator(train.x, train.y), held_out_logits),
            "separation/discriminator": share_above(held_out_logits, discriminator(fake, train.y)),
            "spread/generator": spread(fake) / spread(held_out.x),
        }

    def _latents(self, num: int, generator: torch.Generator) -> Tensor:
        drawn = {"generator": generator, "device": generator.device}
        return torch.randn(num, self.model.latents, **drawn).to(self.device)


build = Gan
