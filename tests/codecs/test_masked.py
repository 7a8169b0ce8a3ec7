"""Integers under masks: sums of them, exactly, and nothing of one alone."""

from __future__ import annotations

import os
import sys

import numpy as np
import pytest
import torch
from torch import Tensor

from fedwan.codecs import codec_by_name
from fedwan.errors import PayloadError
from fedwan.state import Layout
from tests.support import other_defaults, spec

masked = sys.modules["fedwan.codecs.masked"]
LAYOUT: Layout = {
    "net/odd": spec((3, 5)),
    "net/large": spec((masked._BLOCK + 13,)),
    "net/one": spec((1,)),
}
SIZE = masked.size_of(0.01)


def values(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {n: 0.01 * torch.randn(s.shape, generator=generator) for n, s in LAYOUT.items()}


@pytest.mark.parametrize(
    ("bits", "sites"), [(3, 3), (4, 4), (6, 4), (7, 4), (4, 16), (8, 3), (8, 20)]
)
def test_what_all_sites_send_adds_up_exactly_and_the_rest_is_owed(bits: int, sites: int) -> None:
    codec, own = codec_by_name(f"masked{bits}", sites), [os.urandom(16) for _ in range(sites)]
    shared = {(i, j): os.urandom(16) for j in range(sites) for i in range(j)}
    sums = {name: masked.Sum(LAYOUT[name], bits, sites) for name in LAYOUT}
    sent = {name: torch.zeros(LAYOUT[name].shape) for name in LAYOUT}
    for i in range(sites):
        added = [own[i], *(shared[i, j] for j in range(i + 1, sites))]
        masks = masked.KeyStreams(added, [shared[j, i] for j in range(i)])
        residual = {name: 0.001 * value for name, value in values(i + 1000).items()}
        bound = masked.bind(codec, sites, [SIZE] * 3, masks)
        payload, owed = bound.encode(values(i), residual, LAYOUT)
        assert payload.num_bytes == codec.payload_bytes(LAYOUT)
        step = masked.step_of(SIZE, bits)
        for name, value in values(i).items():
            exact = value + residual[name] - owed[name]
            whole = (exact / step).round()
            assert torch.allclose(exact, whole * step, atol=1e-7)
            assert whole.min() >= -(1 << bits - 1) and whole.max() < 1 << bits - 1
            sent[name] += whole
        for name, coded in codec.read_each(payload, LAYOUT):
            sums[name].add(coded)
    masks = masked.KeyStreams([], own)
    for name in LAYOUT:
        with other_defaults(torch.bfloat16):
            mean, size = sums[name].read(masks, SIZE, sites)
        assert torch.equal(mean, sent[name] * (masked.step_of(SIZE, bits) / sites))
        if name == "net/large":
            assert size in (SIZE, SIZE + 1)


def test_one_site_alone_is_noise_whatever_it_sends() -> None:
    codec = codec_by_name("masked4", 4)  # 6 bits a value
    layout = {"net/w": spec((1 << 16,))}
    for value in (torch.zeros(1 << 16), torch.full((1 << 16,), 0.3)):
        masks = masked.KeyStreams([os.urandom(16), os.urandom(16)], [os.urandom(16)])
        bound = masked.bind(codec, 4, [SIZE], masks)
        payload, _ = bound.encode({"net/w": value}, {}, layout)
        ((_, coded),) = codec.read_each(payload, layout)
        (block, _) = coded.blocks()
        counts = np.bincount(block, minlength=64)
        expected = len(block) / 64
        # 63 degrees of freedom: beyond 130 once in 400,000 times.
        assert len(counts) == 64 and ((counts - expected) ** 2 / expected).sum() < 130
        assert abs(np.corrcoef(block[:-1], block[1:])[0, 1]) < 0.02
        assert not coded.pick(torch.arange(4)).any()


def test_values_that_are_not_finite_never_leave() -> None:
    layout = {"net/w": spec((8,))}
    bound = masked.bind(codec_by_name("masked4", 3), 3, [SIZE], masked.KeyStreams([]))
    with pytest.raises(PayloadError, match="not finite.* lower the inner learning rate"):
        bound.encode({"net/w": torch.tensor([1.0, float("nan")] * 4)}, {}, layout)


def test_sizes_are_sums_of_logarithms() -> None:
    assert masked.size_of(0.0) == 0
    for rms in (1e-30, 1e-3, 1.0, 1e9):
        step = masked.step_of(masked.size_of(rms), 4)
        assert 3 / 8 * rms / 1.05 < step < 3 / 8 * rms * 1.05 or rms == 1e-30


def test_what_lies_far_above_the_rest_arrives_within_a_few_versions() -> None:
    codec, size, residual = codec_by_name("masked4", 3), masked.FIRST_SIZE, {}
    value = torch.zeros(1 << 16)
    value[5] = 0.01
    for _ in range(40):
        bound = masked.bind(codec, 3, [size], masked.KeyStreams([]))
        layout = {"net/w": spec((1 << 16,))}
        payload, residual = bound.encode({"net/w": value.clone()}, residual, layout)
        ((_, coded),) = codec.read_each(payload, layout)
        size = int([*coded.blocks()][-1][0])
    assert float(residual["net/w"][5]) < 9 * 0.01


@pytest.mark.parametrize(("told", "found"), [(0, 1), (3 * 700, 700), (65535, 1023)])
def test_a_site_that_lies_of_how_large_its_values_were_ends_no_run(told: int, found: int) -> None:
    total = masked.Sum(LAYOUT["net/one"], 4, 3)
    total.load_state(torch.zeros(8, dtype=torch.uint8), told)
    _, size = total.read(masked.KeyStreams([]), SIZE, 3)
    assert size == found and 0.0 < masked.step_of(size, 4) < float("inf")
