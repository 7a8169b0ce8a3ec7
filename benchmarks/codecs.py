"""Speed, size and error of every codec on one core, and on a GPU where there is one.

The values are those of one contribution of pix2pix's size: 57,182,660 in the tensors of a U-Net 256
and a PatchGAN, drawn as deltas look: heavy tails (Student's t, 4 degrees of freedom), with a scale
of its own for every tensor and every channel. Encoding is from tensors to a whole payload, with its
framing and checksum, and to the host's memory; decoding is what a merge does with it: target +=
decoded, in place. Both in MB (1e6 bytes) of fp32 values a second, the median of several passes.

`rel_error` is |decoded - value| / |value| of a single payload; a codec with error feedback sends
later what it leaves out.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from functools import cache

import torch
from torch.utils.benchmark import Timer

from benchmarks.harness.table import Row
from benchmarks.recipes.timed import pix2pix_like
from fedwan.codecs import Codec, bf16, fp32, int2, int4, int8, topk2
from fedwan.memory import tune_allocator
from fedwan.state import Layout, State, clone, layout_of

CODECS: tuple[Callable[[], Codec], ...] = (fp32, bf16, int8, int4, int2, topk2)
TARGETS = {"encode_mb_s": 500.0, "decode_mb_s": 1000.0}
"""That int8 and int4 must reach on one core."""


def pix2pix_layout(width: int = 64) -> Layout:
    """The parameters of both networks; 64 is pix2pix's width."""
    with torch.device("meta"):
        return layout_of(pix2pix_like(width))


def delta_like(layout: Layout, device: torch.device) -> State:
    """What H steps leave: heavy tails, and sizes that differ between tensors and channels."""
    generator = torch.Generator().manual_seed(0)

    def draw(shape: tuple[int, ...]) -> torch.Tensor:
        # t with 4 degrees of freedom: normal / sqrt(chi-squared / 4).
        normal = torch.randn(shape, generator=generator)
        chi = sum(torch.randn(shape, generator=generator).square_() for _ in range(4))
        value = normal.div_(torch.as_tensor(chi).div_(4).sqrt_())
        channels = torch.randn(shape[0], generator=generator).mul_(0.5).exp_()
        scale = 1e-3 * 10.0 ** float(torch.rand((), generator=generator))
        return value.mul_(scale * channels.view(-1, *[1] * (len(shape) - 1)))

    return {name: draw(spec.shape).to(device) for name, spec in layout.items()}


def measure_codec(codec: Codec, layout: Layout, values: State, seconds: float) -> Row:
    """Passes of encoding and of decoding, for so long each."""
    device = next(iter(values.values())).device
    # Of each pass: work that is queued behind the one before is not done.
    wait = torch.cuda.synchronize if device.type == "cuda" else lambda: None

    def median_s(work: Callable[[], object]) -> float:
        given, num_threads = {"work": work, "wait": wait}, torch.get_num_threads()
        timer = Timer("work(); wait()", globals=given, num_threads=num_threads)
        return float(timer.blocked_autorange(None, seconds).median)

    num_values = sum(spec.num_values for spec in layout.values())
    # A payload is written with what is owed from the last one, as in every round but the first.
    payload, owed = codec.encode(clone(values), {}, layout)
    spare = clone(values)
    encode_s = median_s(lambda: codec.encode(spare, owed, layout))
    target = {name: torch.zeros_like(value) for name, value in values.items()}

    def add() -> None:
        codec.add_each((coded, target[name]) for name, coded in codec.read_each(payload, layout))

    add()
    lost = sum(float((target[n] - v).double().square().sum()) for n, v in values.items())
    whole = sum(float(v.double().square().sum()) for v in values.values())
    decode_s = median_s(add)
    return {
        "codec": codec.name,
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "bits_per_value": round(8 * payload.num_bytes / num_values, 4),
        "encode_mb_s": round(4e-6 * num_values / encode_s),
        "decode_mb_s": round(4e-6 * num_values / decode_s),
        "rel_error": round((lost / whole) ** 0.5, 5),
    }


@cache
def pix2pix_delta(device: str) -> State:
    tune_allocator()  # as the services do
    torch.set_num_threads(1)
    return delta_like(pix2pix_layout(), torch.device(device))


def cases(args: argparse.Namespace) -> Mapping[str, tuple[Codec, str]]:
    devices = ("cpu", *(["cuda"] if torch.cuda.is_available() else []))
    return {f"{make().name} {device}": (make(), device) for device in devices for make in CODECS}


def measure_case(args: argparse.Namespace, case: tuple[Codec, str], seed: int) -> Row:
    codec, device = case
    return measure_codec(codec, pix2pix_layout(), pix2pix_delta(device), 0.5 if args.quick else 2.0)
