"""Speed, size and error of every codec on one core, and on a GPU where there is one.

    python benchmarks/codecs.py [--quick] [--json PATH]

The values are those of one contribution of pix2pix's size: 57,182,660 in the tensors of a U-Net 256
and a PatchGAN, drawn as deltas look: heavy tails (Student's t, 4 degrees of freedom), with a scale
of its own for every tensor and every channel. Encoding is from tensors to a whole payload, with its
framing and checksum, and to the host's memory; decoding is what a merge does with it: target +=
decoded, in place. Both in MB (1e6 bytes) of fp32 values a second, the median of several passes.

Row: codec device bits_per_value encode_mb_s decode_mb_s rel_error

`rel_error` is |decoded - value| / |value| of a single payload; a codec with error feedback sends
later what it leaves out. With --json a picture is drawn beside the rows.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

# Works from a checkout that is not installed, too.
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import torch

from benchmarks.peers.recipes.timed import patchgan_shapes, unet_shapes
from fedwan.codecs import (
    Codec,
    bf16,
    float4,
    fp32,
    int4,
    int8,
    topk2,
)
from fedwan.memory import tune_allocator
from fedwan.state import Layout, Role, State, TensorSpec

if TYPE_CHECKING:
    from matplotlib.axes import Axes

Row = dict[str, Any]

CODECS: tuple[Callable[[], Codec], ...] = (fp32, bf16, int8, int4, float4, topk2)
TARGETS = {"encode_mb_s": 500.0, "decode_mb_s": 1000.0}
"""That int8 and int4 must reach on one core."""
COLUMNS = ("codec", "device", "bits_per_value", "encode_mb_s", "decode_mb_s", "rel_error")


def pix2pix_layout(width: int) -> Layout:
    """The parameters of both networks; 64 is pix2pix's width."""
    networks = {"discriminator": patchgan_shapes(width), "generator": unet_shapes(width)}
    return {
        f"{network}/layers.{number:02d}.{name}": TensorSpec(shape, torch.float32, Role.PARAMETER)
        for network, modules in networks.items()
        for number, shapes in enumerate(modules)
        for name, shape in zip(("weight", "bias"), shapes, strict=False)
    }


def delta_like(layout: Layout, device: torch.device, seed: int = 0) -> State:
    """What H steps leave: heavy tails, and sizes that differ between tensors and channels."""
    generator = torch.Generator().manual_seed(seed)

    def draw(spec: TensorSpec) -> torch.Tensor:
        # t with 4 degrees of freedom: normal / sqrt(chi-squared / 4).
        normal = torch.randn(spec.shape, generator=generator)
        chi = sum(torch.randn(spec.shape, generator=generator).square_() for _ in range(4))
        value = normal.div_(torch.as_tensor(chi).div_(4).sqrt_())
        channels = torch.randn(spec.shape[0], generator=generator).mul_(0.5).exp_()
        scale = 1e-3 * 10.0 ** float(torch.rand((), generator=generator))
        return value.mul_(scale * channels.view(-1, *[1] * (len(spec.shape) - 1)))

    return {name: draw(spec).to(device) for name, spec in layout.items()}


def seconds(work: Callable[[], object], device: torch.device, passes: int) -> float:
    """Median time of a pass, after one that nobody looks at."""
    times = []
    for _ in range(passes + 1):
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        began = time.perf_counter()
        work()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        times.append(time.perf_counter() - began)
    return statistics.median(times[1:])


def measure(codec: Codec, layout: Layout, values: State, passes: int) -> Row:
    """One row."""
    device = next(iter(values.values())).device
    num_values = sum(spec.num_values for spec in layout.values())
    # A payload is written with what is owed from the last one, as in every round but the first.
    _, owed = codec.encode(values, {}, layout)
    encode_s = seconds(lambda: codec.encode(values, owed, layout), device, passes)
    payload, _ = codec.encode(values, {}, layout)
    target = {name: torch.zeros_like(value) for name, value in values.items()}

    def add() -> None:
        for name, coded in codec.read_each(payload, layout):
            coded.add_to(target[name])

    add()
    lost = sum(float((target[n] - v).double().square().sum()) for n, v in values.items())
    whole = sum(float(v.double().square().sum()) for v in values.values())
    decode_s = seconds(add, device, passes)
    return {
        "codec": codec.name,
        "device": "cpu" if device.type == "cpu" else torch.cuda.get_device_name(device),
        "bits_per_value": round(8 * payload.num_bytes / num_values, 4),
        "encode_mb_s": round(4e-6 * num_values / encode_s),
        "decode_mb_s": round(4e-6 * num_values / decode_s),
        "rel_error": round((lost / whole) ** 0.5, 5),
    }


def draw(rows: list[Row], path: Path) -> None:
    """A PNG: how fast each codec is, and what it costs in bits and in error."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    devices = list(dict.fromkeys(row["device"] for row in rows))
    figure, axes = pyplot.subplots(1, len(devices) + 1, figsize=(4.6 * (len(devices) + 1), 3.6))
    for device, ax in zip(devices, axes, strict=False):
        _draw_speed([row for row in rows if row["device"] == device], ax)
    _draw_cost([row for row in rows if row["device"] == devices[0]], axes[-1])
    for ax in axes:
        ax.spines[["top", "right"]].set_visible(False)
    figure.tight_layout()
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def _draw_speed(rows: list[Row], ax: Axes) -> None:
    for shift, (column, colour, label) in enumerate(
        (("encode_mb_s", "#1b6ca8", "encode"), ("decode_mb_s", "#c0722c", "decode and add"))
    ):
        places = [place + 0.38 * (shift - 0.5) for place in range(len(rows))]
        ax.bar(places, [row[column] / 1e3 for row in rows], 0.36, color=colour, label=label)
        target = TARGETS[column] / 1e3
        ax.axhline(target, color=colour, linewidth=0.8, linestyle="--")
        ax.text(len(rows) - 0.35, target, f" {target:g}", color=colour, va="center", fontsize=8)
    ax.set_xticks(range(len(rows)), [row["codec"] for row in rows])
    ax.set_yscale("log")
    ax.set_yticks([0.5, 1, 2, 5, 10, 20], ["0.5", "1", "2", "5", "10", "20"], minor=False)
    ax.minorticks_off()
    ax.set_ylabel("GB of fp32 a second")
    device = "one CPU core" if rows[0]["device"] == "cpu" else rows[0]["device"]
    ax.set_title(f"Speed, {device} (dashed: wanted of int8, int4)", loc="left", fontsize=9)
    ax.legend(frameon=False, fontsize=8)


def _draw_cost(rows: list[Row], ax: Axes) -> None:
    for row in rows:
        error = max(row["rel_error"], 1e-4)  # fp32 has none: at the edge
        ax.plot(row["bits_per_value"], error, "o", color="#1b6ca8")
        ax.annotate(
            row["codec"],
            (row["bits_per_value"], error),
            (6, -12 if row["codec"] == "float4" else 4),  # int4 is at the same place
            textcoords="offset points",
        )
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xticks([0.2, 0.5, 1, 2, 4, 8, 16, 32], ["0.2", "0.5", "1", "2", "4", "8", "16", "32"])
    ax.set_xlim(0.12, 70)
    ax.set_yticks([1e-4, 1e-3, 1e-2, 1e-1, 1], ["0", "0.001", "0.01", "0.1", "1"])
    ax.minorticks_off()
    ax.set_xlabel("bits a value")
    ax.set_title("Relative error of one payload", loc="left", fontsize=9)


def main() -> None:
    """Measure every codec on every device, print a table, write rows and a picture."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else "")
    parser.add_argument("--json", type=Path, help="write rows to this file, a PNG beside it")
    parser.add_argument("--quick", action="store_true", help="fewer passes")
    args = parser.parse_args()
    tune_allocator()  # as the services do
    torch.set_num_threads(1)
    layout = pix2pix_layout(64)
    print(f"{sum(spec.num_values for spec in layout.values()):,} values")
    print("  ".join(f"{column:>14}" for column in COLUMNS))
    rows = []
    for name in ("cpu", *(["cuda"] if torch.cuda.is_available() else [])):
        values = delta_like(layout, torch.device(name))
        for codec in CODECS:
            rows.append(measure(codec(), layout, values, 3 if args.quick else 7))
            print("  ".join(f"{rows[-1][column]:>14}" for column in COLUMNS), flush=True)
    if args.json:
        args.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        draw(rows, args.json.with_suffix(".png"))


if __name__ == "__main__":
    main()
