"""Tiny pipelines with random weights, and pictures with captions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import diffusers
import numpy as np
import torch
import transformers
from PIL import Image

WORDS = 16
"""Values of an embedding."""
BLOCKS: dict[str, Any] = {
    "sample_size": 8,
    "in_channels": 4,
    "out_channels": 4,
    "layers_per_block": 1,
    "block_out_channels": (8, 16),
    "down_block_types": ("DownBlock2D", "CrossAttnDownBlock2D"),
    "up_block_types": ("CrossAttnUpBlock2D", "UpBlock2D"),
    "attention_head_dim": 4,
    "norm_num_groups": 4,
}


def _tokenizer(folder: Path) -> Any:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = ["<|startoftext|>", "<|endoftext|>", *letters, *(f"{letter}</w>" for letter in letters)]
    (folder / "vocab.json").write_text(json.dumps({word: i for i, word in enumerate(words)}))
    (folder / "merges.txt").write_text("#version: 0.2\n")
    files = str(folder / "vocab.json"), str(folder / "merges.txt")
    return transformers.CLIPTokenizer(*files, model_max_length=8)


def _text_config() -> Any:
    return transformers.CLIPTextConfig(
        vocab_size=54,
        hidden_size=WORDS,
        intermediate_size=WORDS,
        projection_dim=WORDS,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=8,
        bos_token_id=0,
        eos_token_id=1,
    )


def clip(folder: Path) -> None:
    """Pictures of 16 x 16 and captions of 8 tokens, each in 8 numbers."""
    words = _tokenizer(folder)
    sizes = {"hidden_size": 8, "num_hidden_layers": 1, "num_attention_heads": 2}
    sizes |= {"intermediate_size": 8}
    text = sizes | {"vocab_size": len(words), "max_position_embeddings": 8}
    text |= {"eos_token_id": words.eos_token_id, "bos_token_id": words.bos_token_id}
    config = transformers.CLIPConfig(
        vision_config=sizes | {"image_size": 16, "patch_size": 8}, text_config=text
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        transformers.CLIPModel(config).save_pretrained(folder)
    (folder / "preprocessor_config.json").write_text("{}")
    words.save_pretrained(folder)


def _vae(**more: Any) -> Any:
    return diffusers.AutoencoderKL(
        **more,
        block_out_channels=(8, 8),
        down_block_types=("DownEncoderBlock2D",) * 2,
        up_block_types=("UpDecoderBlock2D",) * 2,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=16,
    )


def stable_diffusion(folder: Path, **scheduler: Any) -> Path:
    """A `StableDiffusionPipeline` for 16 x 16 pictures."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    diffusers.StableDiffusionPipeline(
        _vae(),
        transformers.CLIPTextModel(_text_config()),
        _tokenizer(folder),
        diffusers.UNet2DConditionModel(**BLOCKS, cross_attention_dim=WORDS),
        diffusers.DDIMScheduler(clip_sample=False, steps_offset=1, **scheduler),
        None,
        None,
        requires_safety_checker=False,
    ).save_pretrained(folder)
    return folder


def stable_diffusion_xl(folder: Path) -> Path:
    """A `StableDiffusionXLPipeline`: two text encoders, and the picture's size."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    unet = diffusers.UNet2DConditionModel(
        **BLOCKS,
        cross_attention_dim=2 * WORDS,
        addition_embed_type="text_time",
        addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + WORDS,
    )
    diffusers.StableDiffusionXLPipeline(
        _vae(),
        transformers.CLIPTextModel(_text_config()),
        transformers.CLIPTextModelWithProjection(_text_config()),
        _tokenizer(folder),
        _tokenizer(folder),
        unet,
        diffusers.DDIMScheduler(clip_sample=False, steps_offset=1),
    ).save_pretrained(folder)
    return folder


def stable_diffusion_3(folder: Path) -> Path:
    """A `StableDiffusion3Pipeline`: a transformer that learns a flow, without the T5 encoder."""
    torch.manual_seed(0)
    folder.mkdir(parents=True)
    transformer = diffusers.SD3Transformer2DModel(
        sample_size=8,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=1,
        attention_head_dim=8,
        num_attention_heads=2,
        joint_attention_dim=2 * WORDS,
        caption_projection_dim=16,
        pooled_projection_dim=2 * WORDS,
    )
    diffusers.StableDiffusion3Pipeline(
        transformer,
        diffusers.FlowMatchEulerDiscreteScheduler(shift=3.0),
        _vae(shift_factor=0.1),
        transformers.CLIPTextModelWithProjection(_text_config()),
        _tokenizer(folder),
        transformers.CLIPTextModelWithProjection(_text_config()),
        _tokenizer(folder),
        None,
        None,
    ).save_pretrained(folder)
    return folder


def captioned(folder: Path, num: int = 40) -> Path:
    """Pictures of one colour each, 16 x 16, that are called by it; some share a caption."""
    folder.mkdir()
    names = ("a red one", "a green one", "a blue one")
    lines = []
    for number in range(num):
        pixels = np.full((16, 16, 3), 40, np.uint8)
        pixels[:, 4:, number % 3] = 100 + 3 * number
        Image.fromarray(pixels).save(folder / f"{number}.png")
        lines.append(json.dumps({"file_name": f"{number}.png", "text": names[number % 3]}))
    (folder / "metadata.jsonl").write_text("\n".join(lines))
    return folder
