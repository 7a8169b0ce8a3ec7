"""CLIP's score of pictures and their captions (Hessel et al. 2021, 2104.08718): 100 cos(E_x, E_c).

As torchmetrics gives it: the paper's equation has a weight of 2.5 in place of 100, and takes no
cosine below 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedwan.errors import ConfigError, FedwanError
from fedwan.extras import require
from fedwan.metrics.network import Network, pixels_of, whole_model

_CHUNK = 64


def is_clip(features: str) -> bool:
    """Whether `eval.features` names a CLIP model's folder."""
    path = Path(features) / "config.json"
    if not features or not path.is_file():
        return False
    return bool(json.loads(path.read_text()).get("model_type") == "clip")


@torch.no_grad()
def clip_score(folder: str, pictures: Tensor, captions: Sequence[str]) -> float:
    """The mean of pictures (n, 3, height, width) in [-1, 1], each with its caption.

    `folder` is a transformers CLIP model's, with its tokenizer; a `ConfigError` if it is not.
    """
    assert len(pictures) == len(captions) > 0
    device, cosines = pictures.device, list[Tensor]()
    model, tokenizer, pixels = _load(folder, device)
    longest = model.config.text_config.max_position_embeddings
    for start in range(0, len(captions), _CHUNK):
        x = pictures[start : start + _CHUNK].to(torch.float32)
        texts = list(captions[start : start + _CHUNK])
        words = tokenizer(
            texts, padding=True, truncation=True, max_length=longest, return_tensors="pt"
        )
        told = {name: words[name].to(device) for name in ("input_ids", "attention_mask")}
        seen = model(pixel_values=pixels(x), **told)
        # Both are of length 1.
        cosines.append((seen.image_embeds * seen.text_embeds).sum(dim=1))
    return float(100 * torch.cat(cosines).double().mean())


@cache
def _load(folder: str, device: torch.device) -> tuple[Any, Any, Network]:
    transformers = require("transformers", "diffusers")
    try:
        model = whole_model(transformers.CLIPModel, Path(folder))
        tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)
        pixels = pixels_of(Path(folder), model.config.vision_config, device)
    except FedwanError:
        raise
    except Exception as error:
        text = " ".join(str(error).split())
        raise ConfigError(
            f"{folder!r} is no folder of a transformers CLIP model with its tokenizer and image "
            f"processor ({text}); give one that save_pretrained of all three wrote"
        ) from None
    return model.to(device).eval(), tokenizer, pixels
