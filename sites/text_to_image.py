"""A text-to-image pipeline of diffusers, by its folder: all of its denoiser, or a LoRA.

The folder is what `save_pretrained` wrote of a Stable Diffusion 1, 2, XL or 3 pipeline. A site has
pictures with captions. Before its first step it encodes both, once, into files in its own folder,
by the folder's VAE and text encoders; steps read latents and embeddings alone. With `lora` = r the
denoiser is frozen, and low-rank adapters of its layers learn (Hu et al. 2021, 2106.09685): these
alone travel. What the scheduler learns: `fedwan.workloads.denoising`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
import os
import shutil
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from filelock import FileLock
from torch import Tensor, nn

from fedwan.config import FILE_NAMES, Config, InnerConfig
from fedwan.config_tree import NOT_NEGATIVE, SHARE, setting, span
from fedwan.data import Shard, source_of
from fedwan.errors import ConfigError
from fedwan.extras import require
from fedwan.files import on_disk, replace_text, stamp_of, write_atomically
from fedwan.metrics.clip_score import clip_score, is_clip
from fedwan.models.layers import at_once, clamp_images
from fedwan.rng import NamedGenerators, derive_seed, seeded_init
from fedwan.uses import Needs
from fedwan.workloads.base import Batch, NetworkKind
from fedwan.workloads.denoising import model_folder, sealed
from fedwan.workloads.descent import Simple
from fedwan.workloads.pipelines import PIPELINES, Folder, Told

_log = logging.getLogger(__name__)

NETWORKS: dict[str, NetworkKind] = {"denoiser": "regression"}
CAPTIONS = True
USES = (
    *("site.precision", "site.accumulate", "site.recompute"),
    Needs("model.lora_targets", lambda c, _: c.model["lora"], "a model.lora of 1 or more"),
    Needs(
        "data.classes",
        lambda c, _: c.data.split not in ("iid", "own"),
        "data.split=by_label or dirichlet:A",
    ),
)
DEFAULTS = {
    "data.batch": 8,
    "steps": 2000,
    # A picture costs as many passes as six steps: of all held-out ones a run would take longer to
    # measure than to train.
    "eval.every": 1000,
    "eval.num": 16,
    "inner.*": lambda config, kind: InnerConfig(
        name="adamw", lr=1e-4 if config.model["lora"] else 1e-5
    ),
}
AT_ONCE, MOST_PIXELS = 16, 1 << 20
"""Pictures that are encoded, made or decoded together: 16 of 256x256, 4 of 512x512."""
_NOTE, _BEGUN = "made_of.json", "begun.json"
_SAVE_EVERY_S = 30.0
_README = """\
# A LoRA of {path}

`pytorch_lora_weights.safetensors` holds an adapter of rank {rank}, whose scale is 1. It goes with
the weights of that `{kind}` alone:

```python
from diffusers import {kind}

pipeline = {kind}.from_pretrained({path!r}{absent})
pipeline.load_lora_weights(".", weight_name="pytorch_lora_weights.safetensors")  # this folder
```
"""


@dataclass
class Model:
    """Settings under `model.*`."""

    path: str = ""
    """The pipeline's folder, at the same path on every machine."""
    lora: int = setting(8, NOT_NEGATIVE)
    """Rank of the adapters; 0 trains all of the denoiser."""
    lora_targets: list[str] = field(default_factory=lambda: ["to_q", "to_k", "to_v", "to_out.0"])
    """Layers that have an adapter, by the ends of their names."""
    caption_dropout: float = setting(0.1, SHARE)
    """Share of captions that are left out in training, as guidance needs."""
    min_snr: float = setting(0.0, NOT_NEGATIVE)
    """Most that a timestep weighs, as a ratio of signal and noise; usual is 5, 0 is off."""
    noise_offset: float = setting(0.0, NOT_NEGATIVE)
    """Of the noise, what is one draw for all of a channel; usual is 0.05, 0 is off."""
    prompts: list[str] = field(default_factory=list)
    """Of `samples.png` and `fedwan sample`, in turn; without them samples have no caption."""
    guidance: float = setting(4.0, NOT_NEGATIVE)
    """How closely samples follow their caption, at twice the cost unless it is 1."""
    sampling_steps: int = setting(25, span(1))
    """From noise to a sample."""


def check(config: Config) -> None:
    """Refuse what cannot be built, and pictures that it does not take."""
    config.model["path"] = model_folder(config.model["path"])
    model = Model(**config.model)
    if config.data.name not in (*FILE_NAMES, "emoji"):
        raise ConfigError(
            f"data.name = {config.data.name!r} has no captions; set data.name=folder and "
            "data.path, or data.name=emoji"
        )
    if config.data.workers:
        raise ConfigError(
            f"data.workers = {config.data.workers} has no effect: pictures are read once, before "
            "the first step; leave it out"
        )
    folder = Folder(model.path, model.min_snr)
    takes = folder.settings.get("in_channels", folder.channels)
    if takes != folder.channels:
        raise ConfigError(
            f"model.path = {model.path!r}: the denoiser takes {takes} channels and the VAE makes "
            f"{folder.channels}; give a folder of a plain text-to-image pipeline"
        )
    levels = len(folder.settings.get("block_out_channels", [0])) - 1
    unit = folder.factor * (folder.settings.get("patch_size") or 2**levels)
    size = source_of(config.data).shape[-1]
    if size % unit:
        raise ConfigError(
            f"data.size = {size} is no multiple of {unit}, as {model.path!r} needs; set "
            f"data.size={size + -size % unit}"
        )
    most = folder.settings.get("pos_embed_max_size") or size
    if size > most * unit:
        raise ConfigError(
            f"data.size = {size} is above the {most * unit} that {model.path!r} has places for; "
            f"set data.size={most * unit}"
        )
    if model.lora:
        with torch.device("meta") as meta:
            _adapt(folder.load(folder.part, meta), model)


def _adapt(network: Any, model: Model) -> None:
    """Freeze a denoiser and add adapters in fp32, in place."""
    peft, targets = require("peft", "diffusers"), list(model.lora_targets)
    layers = dict(network.named_modules())
    linear = [name for name, layer in layers.items() if isinstance(layer, nn.Linear)]
    mend = f"the denoiser has layers like {linear[0]!r} and {linear[-1]!r}"
    for end in targets:  # peft takes those that match, without a word of the others
        if not any(f".{name}".endswith(f".{end}") for name in layers):
            raise ConfigError(f"model.lora_targets = {targets}: {end!r} matches no layer; {mend}")
    network.requires_grad_(False)
    try:
        network.add_adapter(
            peft.LoraConfig(r=model.lora, lora_alpha=model.lora, target_modules=targets)
        )
    except ValueError as error:  # of another kind of layer, printed over several lines, or none
        why = str(error).splitlines()[0].rstrip("(")
        raise ConfigError(
            f"model.lora_targets = {targets} cannot be adapted ({why}); {mend}"
        ) from None
    require("diffusers.training_utils", "diffusers").cast_training_params(network, torch.float32)


class TextToImage(Simple):
    """One denoiser, beside the VAE that its latents are of."""

    def __init__(self, config: Config, device: torch.device | str) -> None:
        self.model = Model(**config.model)
        self.folder = folder = Folder(self.model.path, self.model.min_snr)
        # What never moves needs no more than what it is multiplied in.
        self._frozen = torch.bfloat16 if config.site.precision == "bf16-mixed" else torch.float32
        with seeded_init(config.seed):
            dtype = self._frozen if self.model.lora else torch.float32
            network = folder.load(folder.part, device, dtype).train()
            if self.model.lora:
                _adapt(network, self.model)
            self._vae: Any = folder.load("vae", device).requires_grad_(False)
        side = source_of(config.data).shape[-1]
        self._side, self._shape = side, (folder.channels, *[side // folder.factor] * 2)
        self._at_once = min(AT_ONCE, at_once((side, side), MOST_PIXELS))
        self._table: dict[str, Any] = {}
        self._captions: dict[int, str] = {}
        sizes = [side, side, 0, 0, side, side]  # of the picture, its corner, and what is asked for
        self._time_ids = torch.tensor(sizes, dtype=torch.float32, device=device)
        self._without: Told = {}
        self._shown: Told | None = None
        super().__init__(config, "denoiser", network, self._loss, self._draw)
        # Frozen, and the same at every site.
        self.networks |= {"vae": self._vae, "folder": sealed(folder.digest())}

    def prepare(self, shard: Shard, folder: Path) -> Shard:
        """Encode a site's pictures and captions into `folder`/encoded, if the same are not there.

        Batches are `Encoded`, then; held-out `x` stay pictures, and `y` is the number of a caption
        in a table of embeddings, whose first is of no caption.
        """
        made, of = folder / "encoded", self._made_of(shard)
        folder.mkdir(parents=True, exist_ok=True)
        with FileLock(folder / "encoded.lock"), torch.no_grad():  # the first process encodes
            if _noted(made / _NOTE) != of:
                self._encode(shard, made, of)
                replace_text(made / _NOTE, json.dumps(of))
                (made / _BEGUN).unlink()
        names = PIPELINES[self.folder.kind]
        files = {path.stem: np.load(path, mmap_mode="r") for path in sorted(made.glob("*.npy"))}
        self._table = {name: files[name] for name in names}
        self._without = self._of(torch.zeros(1, dtype=torch.int64))
        numbers, texts = files["held_out"].tolist(), shard.held_out["caption"]
        self._captions = dict(zip(numbers, texts, strict=True))
        held_out = Batch(shard.held_out["x"], torch.tensor(numbers))
        train = _Encoded(files["latents"], files["captions"], self._table)
        return dataclasses.replace(shard, train=train, held_out=held_out, workers=0, flip=False)

    def _made_of(self, shard: Shard) -> dict[str, Any]:
        """What decides which latents and embeddings there are, for `_noted`."""
        folder = Path(self.model.path)
        model = {"model": str(folder), "files": stamp_of(folder)}
        told = "\n".join(shard.held_out["caption"])  # of those that could be read
        model["held_out"] = hashlib.sha256(told.encode()).hexdigest()
        data = {"data": shard.train.stamp(), "size": self._side, "flip": shard.flip}
        return {**model, **data, "embeddings": str(self._frozen)}

    def _encode(self, shard: Shard, made: Path, of: dict[str, Any]) -> None:
        """Write the files of `prepare`, a batch at a time; goes on where a process was killed."""
        captions, numbers = self._encode_pictures(shard, made, of)
        held_out = [numbers.setdefault(t, 1 + len(numbers)) for t in shard.held_out["caption"]]
        for name, of in {"captions": captions, "held_out": held_out}.items():
            write_atomically(made / f"{name}.npy", partial(np.save, arr=np.array(of, np.int64)))
        encoders, done = self.folder.encoders(self.device, self._frozen), 1
        tables: dict[str, Any] = {}
        for name, values in self.folder.told(encoders).items():
            shape = (1 + len(numbers), *values.shape[1:])
            tables[name] = _new(made / f"{name}.npy", shape, np.float16)
            tables[name][:1] = values
        cut: list[str] = []
        for texts in _chunks(list(numbers)):
            cut += self.folder.cut(encoders, texts)
            for name, values in self.folder.told(encoders, texts).items():
                tables[name][done : done + len(texts)] = values
            done += len(texts)
        for table in tables.values():
            table.flush()
        if cut:
            _log.warning(
                "%d of %d captions are longer than the text encoders read, such as %r; their ends "
                "are left out",
                *(len(cut), len(numbers), cut[0]),
            )

    def _encode_pictures(
        self, shard: Shard, made: Path, of: dict[str, Any]
    ) -> tuple[list[int], dict[str, int]]:
        """The number of each picture's caption, and of each caption."""
        begun, path = _noted(made / _BEGUN), made / "latents.npy"
        if not isinstance(begun, dict) or begun.get("of") != of or not path.exists():
            (made / _NOTE).unlink(missing_ok=True)  # before what it is of
            shutil.rmtree(made, ignore_errors=True)
            made.mkdir()
            begun = {"of": of, "captions": [], "texts": []}
        captions: list[int] = begun["captions"]
        numbers = {text: 1 + index for index, text in enumerate(begun["texts"])}
        count = len(shard.train) * (1 + shard.flip)
        _log.info("encodes %s pictures and their captions into %s", count - len(captions), made)
        shape = (count, *self._shape)
        latents = np.load(path, mmap_mode="r+") if captions else _new(path, shape, np.float32)

        def save() -> float:
            latents.flush()
            now = {"of": of, "captions": captions, "texts": list(numbers)}
            replace_text(made / _BEGUN, json.dumps(now))
            return time.monotonic()

        saved_s = time.monotonic()
        for pictures, texts in _read(shard.train, len(captions), count):
            latents[len(captions) : len(captions) + len(texts)] = self._latents(pictures)
            captions += [numbers.setdefault(text, 1 + len(numbers)) for text in texts]
            if time.monotonic() > saved_s + _SAVE_EVERY_S:
                saved_s = save()
        save()
        return captions, numbers

    def _latents(self, pictures: Tensor) -> Tensor:
        """Means of the VAE's distribution, scaled, (batch, channels, side, side), on the CPU."""
        parts = pictures.to(self.device).split(self._at_once)
        found = torch.cat([self._vae.encode(part).latent_dist.mode() for part in parts])
        return ((found - self.folder.shift) * self.folder.scale).cpu()

    def _pictures(self, latents: Tensor) -> Tensor:
        values = latents / self.folder.scale + self.folder.shift
        with torch.autocast(self.device.type, enabled=False):  # SDXL's overflows in fp16
            return clamp_images(self._vae.decode(values).sample)

    def _of(self, numbers: Tensor) -> Told:
        """What the denoiser is told of captions by number, (batch,) int64."""
        rows = numbers.cpu().numpy()
        found = {name: torch.from_numpy(table[rows]) for name, table in self._table.items()}
        return {name: value.to(self.device).float() for name, value in found.items()}

    def _predict(self, x: Tensor, timestep: Tensor, told: Told) -> Tensor:
        more: dict[str, Any] = dict(told)
        if "text_embeds" in more:
            more["added_cond_kwargs"] = {
                "text_embeds": more.pop("text_embeds"),
                "time_ids": self._time_ids.expand(len(x), -1),
            }
        out = self.networks["denoiser"](x, timestep=timestep, return_dict=False, **more)[0]
        return out  # type: ignore[no-any-return]

    def _loss(self, batch: Any, rng: NamedGenerators) -> Tensor:
        given = self.folder.denoising.noised(batch.x, rng, self.model.noise_offset)
        kept = torch.rand(len(batch.x), generator=rng["captions"]) >= self.model.caption_dropout
        kept = kept.to(self.device, non_blocking=True)
        told = {
            name: torch.where(kept.view(-1, *[1] * (value.dim() - 1)), value, self._without[name])
            for name, value in batch.told.items()
        }
        return given.loss(self._predict(given.x, given.timestep, told))

    def _draw(self, num: int, seed: int) -> Tensor:
        """Of the prompts in turn, (num, 3, size, size)."""
        if self._shown is None:
            encoders = self.folder.encoders(self.device, self._frozen)
            both = [self.folder.told(encoders)]
            both += [self.folder.told(encoders, self.model.prompts)] if self.model.prompts else []
            self._shown = {name: torch.cat([told[name] for told in both]) for name in both[0]}
        last = len(self.model.prompts)
        turns = 1 + torch.arange(num) % last if last else torch.zeros(num, dtype=torch.int64)
        shown = {name: value.to(self.device) for name, value in self._shown.items()}
        return self._make(turns, seed, lambda rows: {n: v[rows] for n, v in shown.items()})

    def _make(self, captions: Tensor, seed: int, told: Any) -> Tensor:
        """Pictures of captions by number, (num,) int64, from fixed noise."""
        generator = torch.Generator().manual_seed(derive_seed(seed, "sample"))
        noise = torch.randn(len(captions), *self._shape, generator=generator).to(self.device)
        parts = zip(noise.split(self._at_once), captions.split(self._at_once), strict=True)
        return torch.cat([self._denoise(x, told(rows), told(rows * 0)) for x, rows in parts])

    def _denoise(self, x: Tensor, told: Told, without: Told) -> Tensor:
        guidance = self.model.guidance

        def predict(x: Tensor, timestep: Tensor) -> Tensor:
            if guidance == 1:
                return self._predict(x, timestep, told)
            both = {name: torch.cat([without[name], told[name]]) for name in told}
            found = self._predict(torch.cat([x, x]), torch.cat([timestep, timestep]), both)
            base, led = found.to(x).chunk(2)
            return base + guidance * (led - base)

        steps = self.model.sampling_steps
        return self._pictures(self.folder.denoising.sample(predict, x, steps))

    @torch.no_grad()
    def sample_like(self, labels: Tensor, seed: int) -> Tensor:
        """Pictures of a site's captions, by number."""
        return self._make(labels, seed, self._of)

    def measure_told(self, labels: Tensor, made: Tensor) -> dict[str, float]:
        """CLIP's score of pictures and their captions, where images are seen through a CLIP."""
        if not is_clip(self.config.eval.features):
            return {}
        captions = [self._captions[number] for number in labels.tolist()]
        return {"clip_score": clip_score(self.config.eval.features, made, captions)}

    def save_pretrained(self, folder: Path) -> None:
        """As diffusers opens it: an adapter for `load_lora_weights`, or the whole pipeline."""
        network: Any = self.networks["denoiser"]
        kind, part = getattr(self.folder.library, self.folder.kind), self.folder.part
        if not self.model.lora:
            given = {part: network} | dict.fromkeys(self.folder.absent)
            kind.from_pretrained(self.folder.path, **given).save_pretrained(folder)
            return
        peft = require("peft", "diffusers")
        layers = {
            f"{part}_lora_layers": peft.get_peft_model_state_dict(network),
            f"{part}_lora_adapter_metadata": network.peft_config["default"].to_dict(),
        }
        kind.save_lora_weights(folder, **layers)
        told = {"kind": self.folder.kind, "path": self.model.path, "rank": self.model.lora}
        absent = "".join(f", {name}=None" for name in sorted(self.folder.absent))
        (folder / "README.md").write_text(_README.format(**told, absent=absent))


class Encoded(NamedTuple):
    """A batch of what is trained on. Captions come with it, so that no step waits for the GPU."""

    x: Tensor
    """Latents, (batch, …)."""
    y: Tensor
    """Numbers of captions, (batch,) int64."""
    told: dict[str, Tensor]
    """What the denoiser is told of them, in fp16."""


class _Encoded(torch.utils.data.Dataset[Encoded]):
    """Latents (N, …), captions' numbers (N,) and the table of these, in files."""

    def __init__(self, latents: Any, captions: Any, table: dict[str, Any]) -> None:
        self._latents, self._captions, self._table = latents, captions, table

    def __len__(self) -> int:
        return len(self._captions)

    def __getitem__(self, place: int) -> Encoded:
        x, number = torch.from_numpy(self._latents[place].copy()), int(self._captions[place])
        told = {name: torch.from_numpy(rows[number].copy()) for name, rows in self._table.items()}
        return Encoded(x, torch.tensor(number), told)


def _read(train: Any, start: int, end: int) -> Iterator[tuple[Tensor, list[str]]]:
    """Pictures (batch, 3, size, size) and captions: all as they are, then all mirrored."""
    for numbers in _chunks(range(start, end)):
        rows = [(train[n % len(train)], n >= len(train)) for n in numbers]
        x = torch.stack([row["x"].flip(-1) if mirrored else row["x"] for row, mirrored in rows])
        yield x, [row["caption"] for row, _ in rows]


def _chunks(items: Sequence[Any]) -> Iterator[Any]:
    return (items[start : start + AT_ONCE] for start in range(0, len(items), AT_ONCE))


def _noted(path: Path) -> Any:
    """What a note beside latents and embeddings holds; None if there is none."""
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError):
        return None


def _new(path: Path, shape: tuple[int, ...], kind: Any) -> Any:
    """An array in a file, all of which has its room on the disk: who writes it later is killed."""
    made = np.lib.format.open_memmap(path, "w+", dtype=kind, shape=shape)
    with on_disk(path.parent, made.nbytes), path.open("r+b") as file:
        os.posix_fallocate(file.fileno(), 0, path.stat().st_size)
    return made


build = TextToImage
