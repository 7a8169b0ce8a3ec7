"""What the exchange costs a GPU: step time alone and in a run, memory, and the speed of coding.

Four recipes at full size with random weights, in bf16-mixed: pix2pix (256 x 256, batch 1), DiT-B/2
and a `UNet2DModel` of diffusers, and a LoRA of rank 16 on a U-Net of SDXL's size (512 x 512). Alone
a recipe takes its steps in a loop without an engine; then the same in a run of one site with
H = 50: `diloco` in fp32, where every round is waited for, and `streaming_diloco` with int4 both
ways, in four fragments that have 40 steps for their way. The coordinator runs on the same machine,
on half of its processors, over loopback under mutual TLS. The first two rounds do not count, in
which memory is taken for the first time. Where there is no GPU, or with `--quick`, small forms of
all four. What is known so far goes to standard error.

`alone_ms` is of a step, `percent` what one takes longer in a run; `params_m` are millions of
weights, `sent_m` of those that travel; memory is the most that torch held on the GPU, in 1e6 bytes;
`coding_gb_s` is of fp32 values coded by int4, to the host's memory, in 1e9 bytes.
"""

from __future__ import annotations

import argparse
import gc
import json
import sys
import tempfile
import time
from contextlib import chdir
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image

from benchmarks.codecs import measure_codec
from benchmarks.harness.fleet import FleetRun, app, run_fleet
from benchmarks.harness.table import Row
from fedwan.app import load_run, load_workload
from fedwan.codecs import int4
from fedwan.config import Config
from fedwan.data import open_shard
from fedwan.rng import NamedGenerators
from fedwan.site.joining import choose_device
from fedwan.state import Role, TensorSpec

_FEW = ("eval.every=0", "eval.num=2", "checkpoint.every=1000")
H = 50
WARM_UP = 10
SKIPPED, ROUNDS = 2, 5
WAYS = {
    "diloco": ("strategy=diloco",),
    "streaming": (
        *("strategy=streaming_diloco", "codec.up=int4", "codec.down=int4"),
        *("stream.fragments=4", "stream.tau=40"),
    ),
}


class Case(NamedTuple):
    words: tuple[str, ...]
    quick: tuple[str, ...]
    network: dict[str, Any] | None = None
    """A configuration of diffusers'."""
    quick_network: dict[str, Any] | None = None


def _levels(*channels: int) -> dict[str, Any]:
    num = len(channels)
    down, up = ["DownBlock2D"] * num, ["UpBlock2D"] * num
    if num > 2:  # attention at the last level but one
        down[-2], up[1] = "AttnDownBlock2D", "AttnUpBlock2D"
    return {
        **{"_class_name": "UNet2DModel", "block_out_channels": channels},
        **{"down_block_types": down, "up_block_types": up},
    }


def _dit(heads: int, layers: int) -> dict[str, Any]:
    return {
        **{"_class_name": "DiTTransformer2DModel", "in_channels": 3, "out_channels": 3},
        **{"num_attention_heads": heads, "attention_head_dim": 64, "num_layers": layers},
        **{"sample_size": 32, "patch_size": 2, "num_embeds_ada_norm": 1000},
    }


_FILES = ("data.name=folder", "data.path={images}", "site.precision=bf16-mixed")
_DIFFUSERS = (*_FILES, "workload=diffusers_unet", "model.sampling_steps=2")
CASES = {
    "pix2pix": Case(
        (
            *("workload=pix2pix", "data.name=pairs", "data.path={pairs}", "data.batch=1"),
            *("model.width=64", "model.depth=8", "site.precision=bf16-mixed", "data.workers=4"),
        ),
        ("model.width=8", "data.size=32", "model.depth=5"),
    ),
    "DiT-B/2": Case(
        (*_DIFFUSERS, "data.size=32", "data.batch=64", "data.workers=4"),
        ("data.batch=2",),
        _dit(12, 12),
        _dit(2, 2),
    ),
    "UNet2DModel": Case(
        (*_DIFFUSERS, "data.size=64", "data.batch=16", "data.workers=4"),
        ("data.size=16", "data.batch=2"),
        _levels(128, 128, 256, 256, 512, 512),
        _levels(32, 32),
    ),
    "LoRA on SDXL": Case(
        ("workload=sdxl_lora", "data.name=ring8", "model.side=64"),
        ("model.width=64", "model.depth=1", "model.side=8", "model.rank=2"),
    ),
}


@cache
def _folder() -> tempfile.TemporaryDirectory[str]:
    return tempfile.TemporaryDirectory(prefix="fedwan-gpu-")


@cache
def pictures() -> dict[str, str]:
    """Folders of 256 smooth pictures, and of 64 pairs, as wide as two."""
    rng, root = np.random.default_rng(0), Path(_folder().name)
    for name, num, size in (("images", 256, (64, 64)), ("pairs", 64, (512, 256))):
        (root / name).mkdir()
        for index in range(num):
            noise = Image.fromarray(rng.integers(0, 256, (8, 8, 3), np.uint8))
            noise.resize(size).save(root / name / f"{index:03d}.png")
    return {name: str(root / name) for name in ("images", "pairs")}


def words_of(name: str, is_quick: bool) -> list[str]:
    case = CASES[name]
    words = [word.format(**pictures()) for word in case.words]
    words += case.quick if is_quick else ()
    if network := case.quick_network if is_quick else case.network:
        folder = Path(_folder().name) / name.replace("/", "-") / str(is_quick)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(network))
        words.append(f"model.path={folder}")
    if not torch.cuda.is_available():
        words = [word for word in words if word != "site.precision=bf16-mixed"]
    return [*words, "sites=1", f"h={H}", *_FEW]


def alone(config: Config, device: torch.device, num: int) -> tuple[Row, float]:
    """Steps in a plain loop, and what coding what travels takes."""
    recipe = load_workload(config.workload)
    workload, shard = recipe.build(config, device), open_shard(config.data, 0, 1, config.seed)
    rng = NamedGenerators(config.seed, "alone")
    loader = shard.loader(config.data.batch, rng["data"], device)
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None
    try:
        for step in range(WARM_UP + num):
            if step == WARM_UP:
                wait()
                began = time.perf_counter()
            workload.step(next(loader), rng, lambda: None)
        wait()
        step_s = (time.perf_counter() - began) / num
    finally:
        loader.close()
    memory = torch.cuda.max_memory_allocated() if device.type == "cuda" else 0
    params = [p for network in workload.networks.values() for p in network.parameters()]
    trained = (p.detach().float() for p in params if p.requires_grad)
    values = {f"{i:05d}": 1e-3 * torch.randn_like(p) for i, p in enumerate(trained)}
    layout = {n: TensorSpec(v.shape, v.dtype, Role.PARAMETER) for n, v in values.items()}
    coded = measure_codec(int4(), layout, values, 1.0)
    row = {
        "params_m": round(sum(param.numel() for param in params) / 1e6, 1),
        "sent_m": round(sum(value.numel() for value in values.values()) / 1e6, 1),
        "batch": config.data.batch,
        "alone_ms": round(1e3 * step_s, 2),
        "memory_mb": round(memory / 1e6),
    }
    return row, coded["encode_mb_s"] / 1e3


def step_s(run: FleetRun) -> float:
    """Of a run's steps after those that do not count, waiting included."""
    rows = [row for row in run.rounds if row["step"] > SKIPPED * H]
    steps = max(row["step"] for row in rows) - SKIPPED * H
    return sum(row["compute_s"] + row["wait_s"] for row in rows) / steps


def measure_case(args: argparse.Namespace, name: str, seed: int) -> Row:
    device = choose_device("auto")
    is_on_gpu = device.type == "cuda"
    is_quick = args.quick or not is_on_gpu
    words = words_of(name, is_quick)
    with chdir(app()):
        config = load_run(None, [*words, "strategy=local_sgd"])
        row, coding = alone(config, device, 10 if is_quick else 100)
    print(name, row, file=sys.stderr, flush=True)
    gc.collect()
    if is_on_gpu:
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()
    memory = 0.0
    for way, own in WAYS.items():
        run = run_fleet([*words, *own, f"steps={H * ROUNDS}"], is_apart=True)
        row[f"{way}_percent"] = round(100 * (1e3 * step_s(run) / row["alone_ms"] - 1), 2)
        kept = "step fragment compute_s wait_s round_s bytes_up".split()
        row[f"{way}_rounds"] = [{key: r.get(key) for key in kept} for r in run.rounds]
        memory = max(memory, run.sites[0]["gpu_mb"])
        print(name, way, row[f"{way}_percent"], file=sys.stderr, flush=True)
    return {
        "model": name,
        "device": torch.cuda.get_device_name() if is_on_gpu else "cpu, small",
        **row,
        "run_memory_mb": round(memory),
        "coding_gb_s": round(coding, 2),
    }
