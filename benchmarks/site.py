"""What a site's own means cost and give: pix2pix for an epoch at one site, without a wide area.

The variants of a table that is often shown for pix2pix on one GPU: as it is, data parallel, half
precision, accumulation of 4, gradients clipped at norm 2, ZeRO; beside them recomputed blocks. On
a CPU the networks are small and learn from `photo_edges`, 32x32 pixels, batches of 16. On a GPU, or
with `--full`, they have 57,182,660 values and learn from 400 pairs of 256x256 pixels, one at a
time: a folder of yours, or `photo_edges` enlarged. Under accumulation and several processes a part
of the batch is as large as the others' batch, so that an epoch has a quarter, or half, of their
steps; several processes are left out where there is one GPU.

Losses are means over the epoch: the discriminator's, and the generator's with 100 times its L1.
`--quick` takes a twentieth of an epoch, at least two steps, and scales its time up.

`held_mb` is what a process holds of weights, gradients and moments between two steps, the most of
all processes, in 1e6 bytes.

Row: variant device size steps epoch_s held_mb d_loss g_loss
"""

from __future__ import annotations

import argparse
import math
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from PIL import Image

from benchmarks.harness.table import Row, select
from fedwan.app import load_run, load_workload
from fedwan.config import Config
from fedwan.data import find_source, open_shard
from fedwan.errors import UserError
from fedwan.rng import NamedGenerators
from fedwan.site.follower import shared
from fedwan.site.holding import holding_of
from fedwan.site.service import choose_device
from fedwan.workloads.base import keep_local

WARM_UP = 2
"""Steps that are not timed."""
QUICK = 20
NUM_PAIRS = 400
"""As the facades have."""
SIDE = 256


class Variant(NamedTuple):
    """A row of the table."""

    name: str
    words: tuple[str, ...] = ()
    times: int = 1
    """The batch is so many times the others'."""
    processes: int = 1


def variants(device: torch.device) -> list[Variant]:
    """Those that this machine can run."""
    on_gpu = device.type == "cuda"
    half = "16-mixed" if on_gpu else "bf16-mixed"
    found = [
        Variant("baseline"),
        Variant("data parallel, 2", ("site.processes=2",), processes=2),
        *(
            Variant(
                f"ZeRO-{stage}, 2", ("site.processes=2", f"site.partition={partition}"), processes=2
            )
            for stage, partition in enumerate(("optimizer", "gradients", "weights"), start=1)
        ),
        Variant(f"AMP, {half}", (f"site.precision={half}",)),
        Variant("weights in bf16", ("site.precision=bf16-true",)),
        Variant("accumulation of 4", ("site.accumulate=4",), times=4),
        Variant(
            "clipping at norm 2",
            ("inner.generator.clip_norm=2", "inner.discriminator.clip_norm=2"),
        ),
        Variant("recomputed blocks", ("site.recompute=true",)),
    ]
    num = torch.cuda.device_count() if on_gpu else 2
    return [variant for variant in found if variant.processes <= num]


@contextmanager
def size_words(is_full: bool, path: Path | None) -> Iterator[tuple[list[str], int]]:
    """Words for data and networks, and the batch of a process."""
    if not is_full:
        yield ["data.name=photo_edges"], 16
        return
    words = ["model.width=64", "model.depth=8", "data.name=pairs", f"data.size={SIDE}"]
    if path is not None:
        yield [*words, f"data.path={path.resolve()}"], 1
        return
    with tempfile.TemporaryDirectory() as folder:
        draw_pairs(Path(folder))
        yield [*words, f"data.path={folder}"], 1


def draw_pairs(folder: Path) -> None:
    """A folder of pairs, edges beside the photograph, out of `photo_edges`."""
    x = find_source("photo_edges").load()[0].x[:NUM_PAIRS]
    pixels = (x * 127.5 + 127.5).round().byte().permute(0, 2, 3, 1)
    edges, photos = pixels[..., :1].repeat(1, 1, 1, 3).numpy(), pixels[..., 1:].numpy()
    for index in range(len(x)):
        pair = Image.new("RGB", (2 * SIDE, SIDE))
        for place, half in enumerate((edges[index], photos[index])):
            # Apart: at their seam neither half may know of the other.
            image = Image.fromarray(half).resize((SIDE, SIDE), Image.Resampling.BICUBIC)
            pair.paste(image, (place * SIDE, 0))
        pair.save(folder / f"{index:03d}.png")


def measure_variant(variant: Variant, words: list[str], batch: int, *, is_quick: bool) -> Row:
    """One variant, as a row."""
    batch *= variant.times * variant.processes
    cores = len(os.sched_getaffinity(0))
    threads = max(1, cores // variant.processes)
    config = load_run(
        None,
        ["workload=pix2pix", "sites=1", *words, *variant.words]
        + [f"data.batch={batch}", f"threads={threads}"],
    )
    torch.set_num_threads(threads)
    device = choose_device(config.device)
    row = {"variant": variant.name, "device": _device_name(device), "size": _size(config)}
    return row | _train(config, device, is_quick=is_quick)


def _train(config: Config, device: torch.device, *, is_quick: bool) -> dict[str, Any]:
    shard = open_shard(config.data, 0, 1, config.seed)
    rng = NamedGenerators(config.seed, "s1")
    stream = shard.batches(config.data.batch, rng["data"], device)
    num_epoch_steps = math.ceil(len(shard.train.y) / config.data.batch)
    num_steps = max(2, num_epoch_steps // QUICK) if is_quick else num_epoch_steps
    built = load_workload(config.workload).build(config, device)
    sums: dict[str, float] = {}
    with shared(built, config, device) as workload:
        for _ in range(WARM_UP):
            workload.step(stream.next_batch(), rng, keep_local)
        _settle(device)
        began = time.perf_counter()
        seen = [workload.step(stream.next_batch(), rng, keep_local) for _ in range(num_steps)]
        _settle(device)
        seconds = time.perf_counter() - began
        held_mb = max(sum(held) for held in holding_of(workload).num_bytes()) / 1e6
    for losses in seen:
        for name, loss in losses.items():
            sums[name] = sums.get(name, 0.0) + float(loss) / num_steps
    return {
        "steps": num_steps,
        "epoch_s": round(seconds * num_epoch_steps / num_steps, 2),
        "held_mb": round(held_mb, 2),
        "d_loss": round(sums["discriminator"], 4),
        "g_loss": round(sums["generator"] + config.model["l1"] * sums["l1"], 3),
    }


def _settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def _size(config: Config) -> str:
    side = config.data.size or find_source(config.data.name).shape[-1]
    return f"{side}x{side}, batch {config.data.batch}"


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--full", action="store_true", help="full size, as on a GPU")
    parser.add_argument("--path", type=Path, help="folder of pairs, for full size")


def measure(args: argparse.Namespace) -> Iterator[Row]:
    """Every variant that this machine can run."""
    device = choose_device("auto")
    is_full = args.full or device.type == "cuda"
    if args.path is not None and not is_full:
        raise UserError("--path has no effect on small networks; add --full")
    with size_words(is_full, args.path) as (words, batch):
        for variant in select({v.name: v for v in variants(device)}, args.only):
            yield measure_variant(variant, words, batch, is_quick=args.quick)
