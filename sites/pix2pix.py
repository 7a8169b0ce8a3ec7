"""pix2pix (Isola et al. 2017): a U-Net translates images, a PatchGAN judges input and output.

L_D = (bce(D(x, y), 1) + bce(D(x, G(x)), 0)) / 2
L_G = bce(D(x, G(x)), 1) + 100 * |y - G(x)|

The paper lets G step against the D that has just stepped. Here both step at once, as in
`sites/gan.py`.

Images are made as in training, with the statistics of their own batch (section 3.3), but without
dropout. Running statistics do not belong to weights that were merged or averaged: with them,
distances of short runs were four to eight times as large.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.func import functional_call
from torch.nn.functional import l1_loss

from fedwan.config import Config, InnerConfig
from fedwan.config_tree import NOT_NEGATIVE, SHARE, one_of, setting, span
from fedwan.data import held_out_of, source_of
from fedwan.errors import ConfigError
from fedwan.metrics import measure_translation
from fedwan.models.pix2pix import PatchDiscriminator, UNetGenerator
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.adversarial import LOSSES
from fedwan.workloads.base import Batch, NetworkKind, spread
from fedwan.workloads.descent import Descent

NETWORKS: dict[str, NetworkKind] = {"discriminator": "adversarial", "generator": "adversarial"}


@dataclass
class Model:
    """Settings under `model.*`."""

    width: int = setting(16, span(1))
    """Channels of both networks' first layer; the paper has 64."""
    depth: int = setting(5, span(2))
    """Times that the generator halves an image; the paper, for 256x256 pixels, has 8."""
    l1: float = setting(100.0, NOT_NEGATIVE)
    """Weight of the distance to the target, beside the adversarial loss."""
    dropout: float = setting(0.5, SHARE)
    """Share of values dropped in the generator's inner layers; 0 drops none."""
    norm: str = one_of("batch", "instance")
    """What layers normalise: a `batch`, or each image by itself, `instance`, whatever else a site
    has; small images learn far slower with it."""


USES = ("site.*",)
DEFAULTS = {
    "data.batch": 16,
    "steps": 2000,
    "inner.*": InnerConfig(lr=2e-4, beta1=0.5, beta2=0.999),
}
PAIRS = True


def check(config: Config) -> None:
    """Refuse what cannot be built."""
    model = Model(**config.model)
    side = source_of(config.data).shape[-1]
    if side % 2**model.depth:
        deepest = (side & -side).bit_length() - 1  # the power of 2 in it
        raise ConfigError(
            f"model.depth = {model.depth} halves images more often than the {side} pixels a side "
            f"of {config.data.name} allow; choose {deepest} or less"
        )


class Pix2Pix(Descent):
    """Both networks step at once."""

    samples_from_inputs = True
    """Near the target, they show what a site holds."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.model = model = Model(**config.model)
        self.source = source = source_of(config.data)
        channels = source.shape[0]
        with seeded_init(config.seed):
            discriminator = PatchDiscriminator(channels, model.width, model.norm)
            sizes = (model.width, model.depth, model.dropout, model.norm)
            generator = UNetGenerator(source.inputs, channels - source.inputs, *sizes)
        networks = {"discriminator": discriminator.to(device), "generator": generator.to(device)}
        super().__init__(config, networks)

    def backward(self, batch: Batch, rng: NamedGenerators) -> dict[str, Tensor]:
        """Of both networks, each against the other as it was before."""
        generator, discriminator = self.networks["generator"], self.networks["discriminator"]
        inputs, targets = self._part(batch.x)
        fake = generator(inputs, rng.on("dropout", self.device))
        # Apart, so that batch norm sees real pairs or generated ones, never both.
        real_logits = discriminator(batch.x)
        fake_logits = discriminator(torch.cat([inputs, fake], dim=1))
        loss = LOSSES["non_saturating"]
        losses = {
            "discriminator": loss.discriminator(real_logits, fake_logits) / 2,
            "generator": loss.generator(real_logits, fake_logits),
            "l1": l1_loss(fake, targets),
        }
        total = losses["generator"] + self.model.l1 * losses["l1"]
        self.add_gradients("discriminator", losses["discriminator"], keep_graph=True)
        self.add_gradients("generator", total)
        return losses

    def sample(self, num: int, seed: int) -> Tensor:
        """Images for the first held-out inputs, (num, …), over again; nothing is drawn."""
        inputs, _ = self._part(held_out_of(self.config.data).x[:num])
        images = self._translate(inputs)
        return images[torch.arange(num) % len(images)]

    def evaluate(self, real: Batch, seed: int) -> dict[str, Any]:
        """See `fedwan.metrics.measure_translation`."""
        inputs, targets = self._part(real.x)
        features, is_file = self.config.eval.features, not self.source.public
        images = self._translate(inputs)
        return measure_translation(targets, images, features, with_moments=is_file)

    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        """Has G come to make one image of all inputs? Of D nothing is told: see docs/doctor.md.

        Inputs are alike at all sites that read the same data: some are learnt sooner than others.
        """
        pairs = held_out_of(self.config.data).x
        num = len(train.x)
        inputs, targets = self._part(pairs[:: -(-len(pairs) // num)])
        return {"variety/generator": spread(self._translate(inputs)) / spread(targets)}

    def _part(self, pairs: Tensor) -> tuple[Tensor, Tensor]:
        return pairs[:, : self.source.inputs], pairs[:, self.source.inputs :]

    @torch.no_grad()
    def _translate(self, inputs: Tensor) -> Tensor:
        """Images for inputs, (num, …), in batches as in training."""
        generator = self.networks["generator"]
        # Batch norm moves its running statistics: it is lent others to move.
        lent = {name: buffer.clone() for name, buffer in generator.named_buffers()}
        was_training = generator.training
        generator.train()
        try:
            parts = inputs.to(self.device).split(self.config.data.batch)
            return torch.cat([functional_call(generator, lent, (part,)) for part in parts])
        finally:
            generator.train(was_training)


build = Pix2Pix
