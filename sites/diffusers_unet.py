"""Any network of diffusers that denoises images: by its folder, or a small UNet of our own.

The folder is what `save_pretrained` wrote, of a pipeline or of its network alone; its weights are
what training starts from, if it holds any. The scheduler that it names says what is learned, see
`fedwan.workloads.denoising`. A network that knows classes (`num_class_embeds`) is told them; its
samples are of all alike.
"""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fedwan.config import Config, InnerConfig
from fedwan.config_tree import setting, span
from fedwan.data import num_labels, source_of
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.models.layers import at_once, clamp_images
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.uses import Needs
from fedwan.workloads import flow
from fedwan.workloads.base import Batch, NetworkKind
from fedwan.workloads.denoising import Denoising, model_folder, read_json, reading, sealed
from fedwan.workloads.descent import Simple

NETWORKS: dict[str, NetworkKind] = {"denoiser": "regression"}
USES = (
    "site.*",
    Needs(
        "data.labels",
        lambda c, _: Parts(c).num_classes > 0,
        "a network that knows classes (num_class_embeds)",
    ),
    Needs("model.width", lambda c, _: not c.model["path"], "model.path=''"),
    Needs(
        "model.scheduler",
        lambda c, _: _folders(c.model["path"])[1] is None,
        "a model.path that names no scheduler",
    ),
)
DEFAULTS = {
    "data.batch": 32,
    "steps": 4000,
    "eval.every": 1000,  # samples cost dozens of passes
    "eval.num": 256,
    "inner.*": lambda config, kind: InnerConfig(
        name="adamw", lr=1e-4 if config.model["path"] else 1e-3
    ),
}
_README = """\
# {network}, and its scheduler

diffusers has no pipeline for the two; samples are pictures in [-1, 1]:

```python
import torch
from diffusers import {network}, {solver}

network = {network}.from_pretrained("{folder}").eval()  # of this folder
solver = {solver}.from_pretrained("scheduler")
solver.set_timesteps({steps})
x = torch.randn(8, {shape})
with torch.no_grad():
    for t in solver.timesteps:
        out = network(x, timestep=t.expand(8){told}).sample[:, :{channels}]
        x = solver.step(out, t, x).prev_sample
```
"""
AT_ONCE, MOST_PIXELS = 256, 1 << 20
"""Samples that are made together: 256 of 64x64, 16 of 256x256."""


@dataclass
class Model:
    """Settings under `model.*`."""

    path: str = ""
    """A folder of diffusers, at the same path on every machine; a small UNet without."""
    width: int = setting(32, span(8))
    """Channels of that UNet's first level; each of the next ones has twice as many."""
    scheduler: str = "DDPMScheduler"
    """Of diffusers, where the folder names none."""
    sampling_steps: int = setting(50, span(1))
    """From noise to a sample."""


def _folders(path: str) -> tuple[Path | None, Path | None]:
    """Of the network and of the scheduler."""
    if not path:
        return None, None
    root = Path(path)
    if (root / "model_index.json").is_file():
        parts = read_json(root / "model_index.json")
        if latent := sorted(parts.keys() & {"vae", "vqvae", "movq", "text_encoder"}):
            raise ConfigError(
                f"model.path = {str(root)!r} is of {parts.get('_class_name')}, whose {latent[0]} "
                "shows that it denoises latents, and this workload denoises pictures; take "
                "workload=text_to_image, or a pipeline without one"
            )
        name = next((part for part in ("unet", "transformer") if part in parts), "unet")
        return root / name, root / "scheduler"
    if not (root / "config.json").is_file():
        raise ConfigError(
            f"model.path = {str(root)!r} holds no model_index.json and no config.json; give a "
            "folder that diffusers' save_pretrained wrote"
        )
    scheduler = root.parent / "scheduler"
    return root, scheduler if scheduler.is_dir() else None


def _weights(network: Path) -> Path | None:
    """The folder of a network's weights; None if it holds settings alone."""
    if any(network.glob("*.safetensors*")):
        return network
    if pickled := sorted(network.glob("*.bin")):
        raise ConfigError(
            f"{str(pickled[0])!r} is a pickle, which is not read; write it again as safetensors, "
            "by save_pretrained of the network that diffusers' from_pretrained opens there"
        )
    return None


class Parts:
    """What a folder, or its absence, says: the classes of network and scheduler, and settings."""

    def __init__(self, config: Config) -> None:
        self.model = Model(**config.model)
        self.shape = source_of(config.data).shape
        library = require("diffusers", "diffusers")
        if len(self.shape) != 3:
            raise ConfigError(
                f"workload 'diffusers_unet' needs images, which {config.data.name!r} has none of; "
                "set workload=flow"
            )
        network, scheduler = _folders(self.model.path)
        self.settings = read_json(network / "config.json") if network else self._own(config)
        told = ("num_class_embeds", "num_embeds_ada_norm")
        self.num_classes = next((n for key in told if (n := self.settings.get(key))), 0)
        """That the network is told; 0 for none."""
        name = str(self.settings.get("_class_name"))
        self.weights = _weights(network) if network else None
        self.network = getattr(library, name, None)
        if not inspect.isclass(self.network) or not issubclass(self.network, library.ModelMixin):
            raise ConfigError(
                f"{network}: {name!r} is no network of diffusers; give another folder"
            )
        found = {} if scheduler is None else read_json(scheduler / "scheduler_config.json")
        self.denoising = Denoising(found, self.model.scheduler)

    def _own(self, config: Config) -> dict[str, Any]:
        """Of a small UNet: as many levels, up to 3, as leave 4 pixels a side."""
        (channels, *sides), labels = self.shape, num_labels(config)
        levels = max(1, min(3, min(sides).bit_length() - 2))
        return {
            "_class_name": "UNet2DModel",
            "sample_size": sides[0],
            "in_channels": channels,
            "out_channels": channels,
            "layers_per_block": 1,
            "block_out_channels": [self.model.width * 2**level for level in range(levels)],
            "down_block_types": ["DownBlock2D"] * levels,
            "up_block_types": ["UpBlock2D"] * levels,
            "norm_num_groups": 8,
            "num_class_embeds": labels if labels > 1 else None,
        }

    def require_fit(self) -> None:
        """Refuse a network that does not make such images of a timestep and a class alone."""
        try:
            with torch.device("meta") as meta:
                x, none = torch.empty(2, *self.shape), torch.zeros(2, dtype=torch.int64)
                told = {"class_labels": none} if self.num_classes else {}
                out = self.build(meta)(x, timestep=none, return_dict=False, **told)[0]
            if out.shape[2:] != x.shape[2:]:
                raise ValueError(f"it makes some of {tuple(out.shape[2:])}")
        except (RuntimeError, TypeError, ValueError, AttributeError) as error:
            first = (str(error).strip().splitlines() or [type(error).__name__])[0]
            raise ConfigError(
                f"model.path = {self.model.path!r}: {self.settings['_class_name']} makes no images "
                f"of {' x '.join(map(str, self.shape))} of a timestep and a class alone ({first}); "
                "give another folder, data.size or model.width, or write a script of your own, see "
                "docs/own_model.md"
            ) from None

    def build(self, device: torch.device | str) -> nn.Module:
        """The network, with the folder's weights where there are any to read."""
        if self.weights and torch.device(device).type != "meta":
            with reading(self.weights, "its weights"):
                network = self.network.from_pretrained(
                    self.weights, use_safetensors=True, low_cpu_mem_usage=False
                ).train()
        else:
            network = self.network.from_config(self.settings)
        return network.to(device)  # type: ignore[no-any-return]


def check(config: Config) -> None:
    """Refuse what cannot be built, and images that the network does not take."""
    config.model["path"] = model_folder(config.model["path"])
    parts = Parts(config)
    parts.require_fit()
    if 0 < parts.num_classes < num_labels(config):
        raise ConfigError(
            f"model.path = {parts.model.path!r} knows {parts.num_classes} classes, and data have "
            f"{num_labels(config)}; choose fewer with data.classes"
        )


class Diffusion(Simple):
    """One denoising network."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.parts = parts = Parts(config)
        self._denoising = parts.denoising
        self._told = min(parts.num_classes, num_labels(config))
        with seeded_init(config.seed):
            network = parts.build(device)
        super().__init__(config, "denoiser", network, self._loss, self._draw)
        self.networks["scheduler"] = sealed(parts.denoising.digest())

    def _predict(self, x: Tensor, timestep: Tensor, labels: Tensor) -> Tensor:
        told = {"class_labels": labels} if self._told else {}
        out = self.networks["denoiser"](x, timestep=timestep, return_dict=False, **told)[0]
        return out[:, : x.shape[1]]  # type: ignore[no-any-return]  # without learned variances

    def _loss(self, batch: Batch, rng: NamedGenerators) -> Tensor:
        given = self._denoising.noised(batch.x, rng)
        return given.loss(self._predict(given.x, given.timestep, batch.y))

    def _draw(self, num: int, seed: int) -> Tensor:
        """From fixed noise, (num, channels, height, width); as many of each class."""
        return self.sample_like(flow.balanced_labels(num, max(1, self._told), seed), seed)

    @torch.no_grad()
    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """See `Descent`."""
        noise = torch.Generator().manual_seed(derive_seed(seed, "sample"))
        noises = torch.randn(len(labels), *self.parts.shape, generator=noise).to(self.device)
        made, num = [], min(AT_ONCE, at_once(self.parts.shape, MOST_PIXELS))
        for x, y in zip(noises.split(num), labels.split(num), strict=True):
            predict = partial(self._predict, labels=y.to(self.device))
            made.append(self._denoising.sample(predict, x, self.parts.model.sampling_steps))
        return clamp_images(torch.cat(made))

    def save_pretrained(self, folder: Path) -> None:
        """As diffusers opens it: a `DDPMPipeline` where one can be, else network and scheduler."""
        library, network = require("diffusers", "diffusers"), self.networks["denoiser"]
        if isinstance(network, library.UNet2DModel) and not (self._denoising.is_flow or self._told):
            library.DDPMPipeline(network, self._denoising.scheduler).save_pretrained(folder)
        else:
            name = "unet" if isinstance(network, library.UNet2DModel) else "transformer"
            network.save_pretrained(folder / name)
            self._denoising.scheduler.save_pretrained(folder / "scheduler")
            text = _README.format(
                network=type(network).__name__,
                solver=self._denoising.solver.__name__,
                folder=name,
                steps=self.parts.model.sampling_steps,
                shape=", ".join(map(str, self.parts.shape)),
                told=f", class_labels=torch.arange(8) % {self._told}" if self._told else "",
                channels=self.parts.shape[0],
            )
            (folder / "README.md").write_text(text)


build = Diffusion
