"""A short calibration: how large the real workload is, how long its steps and its codecs take here.

The first site's shard and a freshly built workload; a few seconds of steps, nothing is kept. What
is measured holds for this machine: run it on one that is like the sites'.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence

import torch

from fedwan.app import load_workload
from fedwan.codecs import Codec, codec_by_name
from fedwan.config import Config, InnerConfig, site_names
from fedwan.data import data_at_site, open_shard
from fedwan.link.client import CHUNK_BYTES
from fedwan.link.framing import pack
from fedwan.optim_state import NamedOptimizers
from fedwan.planner.costs import CODECS, Speed
from fedwan.rng import NamedGenerators
from fedwan.site.joining import choose_device
from fedwan.state import Layout, Role, State, layout_of
from fedwan.workloads.base import Workload, keep_local
from fedwan.workloads.home import staying_home
from fedwan.workloads.optim import moment_layout

WARM_UP_STEPS = 3
LEAST_STEPS = 5
BUDGET_S = 2.0
"""Of steps, after the warm-up."""
SAMPLE_VALUES = 1 << 22
"""That codecs are timed with, at most: 16 MiB."""
REPEATS = 3


def open_workload(config: Config) -> Workload:
    """The workload, freshly built where its steps will be timed."""
    if config.threads:
        torch.set_num_threads(config.threads)
    workload: Workload = load_workload(config.workload).build(config, choose_device(config.device))
    return workload


def trained_layout(
    workload: Workload,
    inner: Mapping[str, InnerConfig],
    exclude: Mapping[str, Sequence[str]] | None = None,
) -> Layout:
    """Of what will travel, moments too where `inner` has them averaged."""
    networks, optimizers = workload.networks, workload.optimizers
    trained = {name: networks[name] for name in networks if name in optimizers}
    home = staying_home(trained, NamedOptimizers.of(networks, optimizers).held(), exclude or {})
    layout = layout_of(trained, home)
    return dict(sorted((layout | moment_layout(layout, inner)).items()))


def step_seconds(config: Config, workload: Workload) -> float:
    """Seconds of a step, the median of some; the workload's weights move."""
    device = choose_device(config.device)
    data = data_at_site(config.data, site_names(config)[0])
    shard = open_shard(data, 0, config.sites, config.seed)
    rng = NamedGenerators(config.seed, "calibration")
    stream = shard.loader(config.data.batch, rng["data"], device)

    def step() -> None:
        workload.step(next(stream), rng, keep_local)
        if device.type == "cuda":
            torch.cuda.synchronize(device)

    for _ in range(WARM_UP_STEPS):
        step()
    durations: list[float] = []
    while len(durations) < LEAST_STEPS or sum(durations) < BUDGET_S:
        durations.append(_seconds(step))
    return statistics.median(durations)


def coding_costs(layout: Layout) -> dict[str, Speed]:
    """What coding a part of this layout takes here, for every codec that has a default."""
    sample: Layout = {}
    for name, spec in layout.items():
        if not sample or _num_values(sample) + spec.num_values <= SAMPLE_VALUES:
            sample[name] = spec
    return {name: coding_speed(codec_by_name(name), sample) for name in CODECS}


def coding_speed(codec: Codec, layout: Layout) -> Speed:
    """Seconds per value to encode, and to decode and add, on this machine; the best of a few.

    What packing leaves is that of normal values, which pack worst.
    """
    generator = torch.Generator().manual_seed(0)
    tensors: State = {
        name: (1e-3 * torch.randn(spec.shape, generator=generator)).to(spec.dtype)
        for name, spec in layout.items()
    }
    sums = {name: value.clone() for name, value in tensors.items()}
    payload, _ = codec.encode(tensors, {}, layout)

    def add() -> None:
        for name, coded in codec.read_each(payload, layout):
            if layout[name].role is Role.PARAMETER:
                coded.add_to(sums[name])

    count = max(1, _num_values(layout))
    encode_s = min(_seconds(lambda: codec.encode(tensors, {}, layout)) for _ in range(REPEATS))
    data = payload.read(0, min(payload.num_bytes, CHUNK_BYTES))
    return Speed(
        encode_s / count,
        min(_seconds(add) for _ in range(REPEATS)) / count,
        len(pack(0, data).data) / len(data),
    )


def _num_values(layout: Layout) -> int:
    return sum(spec.num_values for spec in layout.values())


def _seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began
