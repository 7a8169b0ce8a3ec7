"""Ways to merge LoRA adapters of sites, on emoji by caption, beside one site that has all data.

Before the first run a base is made, once, in `--folder`: an autoencoder, a tokenizer of the
captions, a random text encoder, and a denoiser that fedwan trains on faces, people, objects,
symbols and flags. The adapters learn animals, food, travel and activities, dealt to three sites.
Each way takes the same local steps and merges every H of them:

    both       means of both factors, as `workload=text_to_image` does under `local_sgd`
    b          A stays as it began, means of B alone: exact (FFA-LoRA, 2403.12313)
    alternate  A and B learn in turns, a round each: exact (RoLoRA, 2502.01755)
    product    mean of the products, cut to the rank by its singular values (FlexLoRA, 2402.11505)
    exact      means of both, and what these lack of the mean product goes into the frozen weights
               (FedEx-LoRA, 2410.09432); this is dense, so that bytes are the model's
    one        one site that has all data, with the sites' batches as one

`loss` is that of all the adapters' pictures at fixed noise levels and noise; `accuracy` the share
of pictures made of their captions that emoji's own classifier puts into the caption's group, `real`
that of pictures that nobody trained on.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from torch import Tensor, nn
from torch.nn.functional import mse_loss

from benchmarks.harness.table import Row, columns_of, means
from fedwan.app import load_run, load_workload
from fedwan.data import open_shard
from fedwan.data.toys import listed_emoji, load_emoji
from fedwan.metrics.features import load_classifier
from fedwan.rng import NamedGenerators, seeded_init
from fedwan.simulation import simulate
from fedwan.weights import load

SEEDS = 5
SITES, H, RANK, BATCH = 3, 20, 4, 8
NEW = (2, 3, 4, 5)
"""Groups that adapters learn: animals, food, travel, activities."""
WAYS = ("both", "b", "alternate", "product", "exact", "one")
NUM_MADE = 96


class Case(NamedTuple):
    split: str
    way: str


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--folder", type=Path, default=Path("runs/lora"), help="keeps the base")
    parser.add_argument("--steps", type=int, default=400, help="of each site")


def cases(args: argparse.Namespace) -> dict[str, Case]:
    return {f"{split} {way}": Case(split, way) for split in ("iid", "by_label") for way in WAYS}


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    torch.set_num_threads(2)
    base, held_out = _base(args.folder, args.quick), load_emoji()[1]
    is_new = torch.isin(held_out.y, torch.tensor(NEW))
    load_classifier("emoji")  # where it is not kept it is trained, which is no time of a case
    started = time.monotonic()
    num = 1 if case.way == "one" else SITES
    words = [
        *("workload=text_to_image", f"model.path={base}", f"model.lora={RANK}", "model.guidance=3"),
        *("data.name=folder", f"data.path={args.folder / 'new'}", "data.size=32", f"sites={num}"),
        *(f"data.batch={BATCH * SITES // num}", "model.sampling_steps=20", f"seed={seed}"),
        "inner.denoiser.lr=2e-3",
    ]
    if num > 1 and case.split == "by_label":
        words += ["data.split=by_label", f"data.classes={','.join(map(str, NEW))}"]
    config = load_run(None, words)
    recipe = load_workload("text_to_image")
    sites = []
    for place in range(num):
        workload = recipe.build(config, torch.device("cpu"))
        shard = open_shard(config.data, place, num, seed, captions=True)
        cache = args.folder / "encoded" / f"{case.split}-{num}-{seed}-{place}"
        rng = NamedGenerators(seed, f"s{place + 1}")
        loader = workload.prepare(shard, cache).loader(config.data.batch, rng["data"])
        sites.append((workload, loader, rng))
    every = _Everything(args, base, config, recipe)
    untrained = every.loss(sites[0][0])
    for number in range(args.steps // H // (10 if args.quick else 1)):
        for workload, loader, rng in sites:
            _choose(workload, case.way, number)
            for _ in range(H):
                workload.step(next(loader), rng, lambda: None)
        if num > 1:
            _merge([workload.networks["denoiser"] for workload, *_ in sites], case.way)
    made, groups = every.make(sites[0][0])
    return {
        **columns_of(case, "split way"),
        **{"rank": RANK, "h": H, "seed": seed, "loss": every.loss(sites[0][0])},
        "untrained_loss": untrained,
        "accuracy": _accuracy(made, groups),
        "real": _accuracy(held_out.x[is_new], held_out.y[is_new]),
        "seconds": time.monotonic() - started,
    }


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    return means(rows, "split way", "loss accuracy")


# One run -----------------------------------------------------------------------------------------


def _choose(workload: Any, way: str, number: int) -> None:
    """Which factors learn in a round."""
    for name, param in workload.networks["denoiser"].named_parameters():
        if ".lora_" in name:
            is_a = ".lora_A." in name
            turn = {"b": not is_a, "alternate": is_a == bool(number % 2)}
            param.requires_grad_(turn.get(way, True))


@torch.no_grad()
def _merge(networks: Sequence[nn.Module], way: str) -> None:
    layers = [
        [module for module in network.modules() if hasattr(module, "lora_A")]
        for network in networks
    ]
    for at_sites in zip(*layers, strict=True):
        down = torch.stack([layer.lora_A["default"].weight for layer in at_sites])
        up = torch.stack([layer.lora_B["default"].weight for layer in at_sites])
        a, b, product = down.mean(0), up.mean(0), (up @ down).mean(0)
        if way == "product":
            u, s, v = torch.linalg.svd(product, full_matrices=False)
            root = s[: len(a)].sqrt()
            a, b = root[:, None] * v[: len(a)], u[:, : len(a)] * root
        for layer in at_sites:
            if way == "exact":
                layer.base_layer.weight += product - b @ a
            layer.lora_A["default"].weight.copy_(a)
            layer.lora_B["default"].weight.copy_(b)


class _Everything:
    """All pictures that the adapters should learn."""

    def __init__(self, args: argparse.Namespace, base: Path, config: Any, recipe: Any) -> None:
        data = load_run(None, [*_WORDS, f"model.path={base}", f"data.path={args.folder / 'new'}"])
        shard = open_shard(data.data, 0, 1, 0, captions=True)
        one = recipe.build(data, torch.device("cpu"))
        self._shard = one.prepare(shard, args.folder / "encoded" / "all")
        self._table = one._table
        names = {e.name: e.group for e in listed_emoji()}
        self._groups = {
            int(self._shard.train[place].y): names[shard.train[place]["caption"]]
            for place in range(len(shard.train))
        }
        """By number of a caption."""

    def _lent(self, workload: Any) -> AbstractContextManager[object]:
        return mock.patch.object(workload, "_table", self._table)

    @torch.no_grad()
    def loss(self, workload: Any) -> float:
        """Of all pictures, each at one noise level."""
        rng, total = NamedGenerators(0, "loss"), 0.0
        workload.networks["denoiser"].eval()
        with self._lent(workload):
            for start in range(0, len(self._shard.train), 64):
                rows = range(start, min(start + 64, len(self._shard.train)))
                batch = [self._shard.train[row][:2] for row in rows]
                x, y = (torch.stack(part) for part in zip(*batch, strict=True))
                given = workload.folder.denoising.noised(x, rng)
                out = workload._predict(given.x, given.timestep, workload._of(y))
                total += float(given.loss(out)) * len(rows)
        workload.networks["denoiser"].train()
        return total / len(self._shard.train)

    @torch.no_grad()
    def make(self, workload: Any) -> tuple[Tensor, Tensor]:
        """Pictures of some captions, and the captions' groups."""
        chosen = sorted(self._groups)[:: max(1, len(self._groups) // NUM_MADE)][:NUM_MADE]
        with self._lent(workload):
            made = workload._make(torch.tensor(chosen), 0, workload._of)
        return made, torch.tensor([self._groups[number] for number in chosen])


# What comes before -------------------------------------------------------------------------------

_WORDS = (
    *("workload=text_to_image", "data.name=folder", "data.size=32", "data.batch=24", "steps=100"),
    "sites=1",
)


def _base(folder: Path, quick: bool) -> Path:
    """The folder of a pipeline, made where it is not there yet."""
    if (folder / "base").is_dir():
        return folder / "base"
    _write(folder / "new", lambda one: one.group in NEW)
    _write(folder / "old", lambda one: one.group not in NEW)
    _pipeline(folder / "raw", 100 if quick else 1500)
    words = [*_WORDS, f"model.path={folder / 'raw'}", f"data.path={folder / 'old'}"]
    words += f"strategy=local_sgd h=50 steps={50 if quick else 3000} inner.denoiser.lr=1e-3".split()
    words += "model.lora=0 model.guidance=1 model.min_snr=5 eval.every=0 eval.num=12".split()
    simulate(load_run(None, words), folder / "run")
    trained: Any = load(folder / "run").workload()
    trained.save_pretrained(folder / "base")
    return folder / "base"


def _write(folder: Path, wanted: Callable[[Any], bool]) -> None:
    """Pictures that are trained on, in folders by group, and their captions."""
    from PIL import Image

    pictures = load_emoji()[0].x
    listed = [one for one in listed_emoji() if not one.is_held_out]
    lines = []
    for number, (one, picture) in enumerate(zip(listed, pictures, strict=True)):
        if wanted(one):
            name = f"{one.group}/{number:04}.png"
            (folder / str(one.group)).mkdir(parents=True, exist_ok=True)
            pixels = ((picture + 1) * 127.5).round().byte().permute(1, 2, 0)
            Image.fromarray(pixels.numpy()).save(folder / name)
            lines.append(json.dumps({"file_name": name, "text": one.name}))
    (folder / "metadata.jsonl").write_text("\n".join(lines) + "\n")


def _pipeline(folder: Path, steps: int) -> None:
    """An autoencoder that has learnt, and a denoiser that has not."""
    import diffusers
    import tokenizers
    import transformers

    folder.mkdir(parents=True, exist_ok=True)
    made = tokenizers.CharBPETokenizer(lowercase=True)
    special = ["<|startoftext|>", "<|endoftext|>"]
    names = (one.name for one in listed_emoji())
    made.train_from_iterator(names, 4000, special_tokens=special, show_progress=False)
    vocab, merges = made.save_model(str(folder))
    tokenizer = transformers.CLIPTokenizer(vocab, merges, model_max_length=24)
    with seeded_init(0):
        text = transformers.CLIPTextModel(
            transformers.CLIPTextConfig(
                vocab_size=len(tokenizer),
                hidden_size=64,
                intermediate_size=64,
                num_hidden_layers=2,
                num_attention_heads=4,
                max_position_embeddings=24,
                bos_token_id=0,
                eos_token_id=1,
            )
        )
        for embedding in (module for module in text.modules() if isinstance(module, nn.Embedding)):
            nn.init.normal_(embedding.weight, std=1.0)  # else all words look alike
        vae = diffusers.AutoencoderKL(
            block_out_channels=(16, 32, 32),
            down_block_types=("DownEncoderBlock2D",) * 3,
            up_block_types=("UpDecoderBlock2D",) * 3,
            latent_channels=4,
            norm_num_groups=8,
            sample_size=32,
        )
        unet = diffusers.UNet2DConditionModel(
            sample_size=8,
            layers_per_block=1,
            block_out_channels=(64, 128),
            down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
            up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
            cross_attention_dim=64,
            attention_head_dim=16,
            norm_num_groups=8,
        )
    scale = _learn_to_encode(vae, steps)
    vae.register_to_config(scaling_factor=scale)
    noises = diffusers.DDIMScheduler(clip_sample=False, beta_schedule="scaled_linear")
    diffusers.StableDiffusionPipeline(
        vae, text, tokenizer, unet, noises, None, None, requires_safety_checker=False
    ).save_pretrained(folder)


def _learn_to_encode(vae: Any, steps: int) -> float:
    """Train an autoencoder on all pictures; what gives its latents a deviation of 1."""
    pictures, generator = load_emoji()[0].x, torch.Generator().manual_seed(0)
    optimizer = torch.optim.AdamW(vae.parameters(), 2e-3)
    rates = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    for _ in range(steps):
        x = pictures[torch.randint(len(pictures), (32,), generator=generator)]
        found = vae.encode(x).latent_dist
        loss = mse_loss(vae.decode(found.sample(generator)).sample, x)
        (loss + 1e-4 * found.kl().mean() / found.mean[0].numel()).backward()
        optimizer.step()
        optimizer.zero_grad()
        rates.step()
    print(f"autoencoder: mean squared error {loss.item():.4f}")
    with torch.no_grad():
        return 1 / float(vae.encode(pictures[::8]).latent_dist.mode().std())


@torch.no_grad()
def _accuracy(pictures: Tensor, groups: Tensor) -> float:
    """Share of pictures that the emoji's own classifier puts into their group of the new ones."""
    _, logits = load_classifier("emoji")(pictures)
    found = torch.tensor(NEW)[logits[:, NEW].argmax(1)]
    return float((found == groups).double().mean())
