"""The folder of a text-to-image pipeline of diffusers: its parts, and what it says of a caption.

Nothing is read but by `Folder`; what is missing, damaged or of another kind is a `ConfigError`.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.rng import lent_generators
from fedwan.workloads.denoising import Denoising, read_json, reading

PIPELINES: Mapping[str, tuple[str, ...]] = {
    "StableDiffusionPipeline": ("encoder_hidden_states",),
    "StableDiffusionXLPipeline": ("encoder_hidden_states", "text_embeds"),
    "StableDiffusion3Pipeline": ("encoder_hidden_states", "pooled_projections"),
}
"""What the denoiser is told of a caption, in the order of the pipeline's `encode_prompt`."""
_VOCABULARIES = ("vocab.json", "merges.txt", "spiece.model")
_ENDS = 1 << 20
_MOST_T5 = 256
"""Tokens of a caption that Stable Diffusion 3's `encode_prompt` has T5 read."""
Told = Mapping[str, Tensor]
"""By name as in `PIPELINES`, (batch, …)."""


class Folder:
    """A pipeline's folder: its classes and settings, without any weights."""

    def __init__(self, path: str, min_snr: float = 0.0) -> None:
        self.path = Path(path)
        if not (self.path / "model_index.json").is_file():
            raise ConfigError(
                f"model.path = {path!r} holds no model_index.json; give a folder that "
                "save_pretrained of a diffusers pipeline wrote"
            )
        self.library = require("diffusers", "diffusers")
        for library in (self.library, require("transformers", "diffusers")):
            library.utils.logging.disable_progress_bar()
            library.utils.logging.set_verbosity_error()
        self.index = read_json(self.path / "model_index.json")
        self.kind = str(self.index.get("_class_name"))
        if self.kind not in PIPELINES:
            raise ConfigError(
                f"model.path = {path!r} is of {self.kind}, which this workload has not; it "
                f"has {', '.join(PIPELINES)}"
            )
        self._is_3 = self.kind == "StableDiffusion3Pipeline"
        self.part = "unet" if "unet" in self.index else "transformer"
        self.settings = read_json(self.path / self.part / "config.json")
        # Folders of before a setting was added are without it.
        known = inspect.signature(self.library.AutoencoderKL).parameters.values()
        vae = {each.name: each.default for each in known}
        vae |= read_json(self.path / "vae" / "config.json")
        self.scale = float(vae["scaling_factor"] or 1)
        self.shift = float(vae["shift_factor"] or 0)
        self.channels = int(vae["latent_channels"])
        self.factor = 2 ** (len(vae["block_out_channels"]) - 1)
        """Pixels a side of one latent value."""
        found = read_json(self.path / "scheduler" / "scheduler_config.json")
        # Latents have no range; schedulers that clip are those of pixels.
        self.denoising = Denoising({"clip_sample": False} | found, "", min_snr)
        self.absent = {n for n, of in self.index.items() if isinstance(of, list) and not of[0]}
        """Parts that such a pipeline may do without, as this one does."""

    def digest(self) -> str:
        """Of what decides on latents, embeddings and targets, but for the networks' weights.

        Of text encoders' weights and of vocabularies the sizes, and how they begin and end.
        """
        found = hashlib.sha256(self.denoising.digest().encode())
        parts = [name for name in self.index if name.startswith(("text_encoder", "tokenizer"))]
        for path in sorted(path for name in parts for path in (self.path / name).glob("*")):
            if path.suffix == ".safetensors" or path.name in _VOCABULARIES:
                found.update(f"{path.relative_to(self.path)} {path.stat().st_size}".encode())
                with path.open("rb") as file:
                    found.update(file.read(_ENDS))
                    file.seek(max(0, path.stat().st_size - _ENDS))
                    found.update(file.read(_ENDS))
        return found.hexdigest()

    def load(
        self, part: str, device: torch.device | str, dtype: torch.dtype = torch.float32
    ) -> nn.Module:
        """A part with its weights, in evaluation mode; on torch's meta device without."""
        kind = getattr(self.library, self.index[part][1])
        if torch.device(device).type == "meta":
            made = kind.from_config(read_json(self.path / part / "config.json"))
        else:
            with reading(self.path, part):
                made = kind.from_pretrained(
                    self.path / part, use_safetensors=True, low_cpu_mem_usage=False
                )
        return made.to(device, dtype).eval()  # type: ignore[no-any-return]

    def encoders(self, device: torch.device, dtype: torch.dtype) -> Any:
        """The pipeline without denoiser and VAE."""
        kind = getattr(self.library, self.kind)
        unused = {self.part, "vae", "safety_checker"} & self.index.keys()
        given = dict.fromkeys(unused | self.absent)
        # Reading draws weights first, or replaces torch.nn.init meanwhile.
        with reading(self.path, "its text encoders"), lent_generators():
            made = kind.from_pretrained(
                self.path, use_safetensors=True, torch_dtype=dtype, **given
            ).to(device)
        if "text_encoder_3" in self.absent:  # it asks for the size of an embedding
            made.transformer = SimpleNamespace(config=SimpleNamespace(**self.settings))
        return made

    def cut(self, encoders: Any, captions: Sequence[str]) -> list[str]:
        """Captions that no text encoder reads to their end."""
        most = _MOST_T5 if "tokenizer_3" in self.index.keys() - self.absent else 0
        tokenizer = encoders.tokenizer_3 if most else encoders.tokenizer
        lengths = [len(ids) for ids in tokenizer(list(captions)).input_ids]
        most = most or tokenizer.model_max_length
        return [text for text, num in zip(captions, lengths, strict=True) if num > most]

    @torch.no_grad()
    def told(self, encoders: Any, captions: Sequence[str] | None = None) -> Told:
        """What the denoiser is told of captions, (batch, …), or of none, (1, …), on the CPU."""
        is_none = captions is None
        more = {"prompt_2": None, "prompt_3": None} if self._is_3 else {}
        with torch.autocast(encoders.device.type, enabled=False):  # T5 overflows in fp16
            found = encoders.encode_prompt(
                prompt=[""] if captions is None else list(captions),
                device=encoders.device,
                num_images_per_prompt=1,
                do_classifier_free_guidance=is_none,
                **more,
            )
        values = zip(PIPELINES[self.kind], found[is_none::2], strict=True)
        return {name: value.float().cpu() for name, value in values}
