"""A LoRA on a U-Net of SDXL's size, 2.57 billion frozen weights in bf16, drawn at random.

Latents, embeddings of captions and noise are drawn on the device: no picture is read. The adapters
of every attention's projections learn, in fp32, as `sites/text_to_image.py` has them under
`site.precision=bf16-mixed`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import mse_loss

from benchmarks.harness.stopwatch import Ungenerative
from fedwan.config import Config, InnerConfig
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.workloads.base import Batch, NetworkKind, Reduce
from fedwan.workloads.optim import build_optimizers

NETWORKS: dict[str, NetworkKind] = {"denoiser": "regression"}
DEFAULTS = {"data.batch": 1, "steps": 100, "inner.*": InnerConfig(name="adamw", lr=1e-4)}
SDXL: dict[str, Any] = {
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": (5, 10, 20),
    "use_linear_projection": True,
    "addition_embed_type": "text_time",
    "addition_time_embed_dim": 256,
    "projection_class_embeddings_input_dim": 2816,
}
TARGETS = ["to_q", "to_k", "to_v", "to_out.0"]
TOKENS = 77


@dataclass
class Model:
    rank: int = 16
    """Of the adapters."""
    width: int = 320
    """Channels of the first level; 320 is SDXL."""
    depth: int = 10
    """Transformer layers of the last level; 10 is SDXL."""
    side: int = 128
    """Of latents; 128 is an image of 1024 x 1024."""


def build(config: Config, device: torch.device | str) -> Lora:
    from diffusers import UNet2DConditionModel
    from diffusers.training_utils import cast_training_params
    from peft import LoraConfig

    model = Model(**config.model)
    kept = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with seeded_init(config.seed), torch.device(device):
            network: Any = UNet2DConditionModel(
                **SDXL,
                sample_size=model.side,
                block_out_channels=[model.width * 2**level for level in range(3)],
                transformer_layers_per_block=(1, 2, model.depth),
                cross_attention_dim=2048,
            )
    finally:
        torch.set_default_dtype(kept)
    network.requires_grad_(False)
    with torch.device(device):
        network.add_adapter(LoraConfig(r=model.rank, lora_alpha=model.rank, target_modules=TARGETS))
    cast_training_params(network, torch.float32)
    networks = {"denoiser": network}
    lora = Lora(networks, build_optimizers(config.inner, networks))
    lora.shape = (config.data.batch, 4, model.side, model.side)
    lora.device = torch.device(device)
    return lora


class Lora(Ungenerative):
    shape: tuple[int, ...]
    device: torch.device

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        """Of epsilon at a random timestep."""
        (network,), device = self.networks.values(), self.device
        drawn = {"generator": rng.on("noise", device), "device": device}
        x, noise = torch.randn(2, *self.shape, **drawn)
        step = torch.randint(1000, self.shape[:1], **drawn)
        kept = (1 - step / 1000).view(-1, 1, 1, 1)
        told = torch.randn(len(x), TOKENS, 2048, **drawn)
        added = {
            "text_embeds": torch.randn(len(x), 1280, **drawn),
            "time_ids": torch.zeros(len(x), 6, device=device),
        }
        with torch.autocast(device.type, torch.bfloat16):
            given = kept.sqrt() * x + (1 - kept).sqrt() * noise
            out = network(given, step, told, added_cond_kwargs=added, return_dict=False)[0]
            loss = mse_loss(out.float(), noise)
        loss.backward()
        reduce()
        for optimizer in self.optimizers.values():
            optimizer.step()
            optimizer.zero_grad()
        return {"denoiser": loss.detach()}
