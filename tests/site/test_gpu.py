"""What only a GPU shows: the same bits as on a CPU, and threads with queues of their own."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from fedwan.app import load_run
from fedwan.codecs import codec_by_name
from fedwan.codecs.base import with_feedback
from fedwan.config import CODECS
from fedwan.rng import NamedGenerators
from fedwan.simulation import Absence, SimulatedRun, simulate
from fedwan.site.group import Group
from fedwan.site.recipe import take_part
from fedwan.site.site import Membership
from fedwan.state import Role, TensorSpec

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

SHAPES = {"net/a": (3,), "net/b": (256, 64), "net/c": (37, 1021), "net/d": (130, 5)}
LAYOUT = {n: TensorSpec(shape, torch.float32, Role.PARAMETER) for n, shape in SHAPES.items()}
SAME_BYTES = ("fp32", "bf16", "int8", "int4")
"""Whose scales do not depend on the order of a sum."""


@pytest.mark.parametrize("name", [name for name in CODECS if name])
def test_a_payload_has_the_same_values_wherever_it_was_coded_and_is_read(name: str) -> None:
    codec = with_feedback(codec_by_name(name))
    generator = torch.Generator().manual_seed(0)
    values = {n: torch.randn(shape, generator=generator) ** 3 for n, shape in SHAPES.items()}
    here, owed = codec.encode({n: value.cuda() for n, value in values.items()}, {}, LAYOUT)
    there, _ = codec.encode(values, {}, LAYOUT)
    if name in SAME_BYTES:
        assert bytes(here.read(0, here.num_bytes)) == bytes(there.read(0, there.num_bytes))
    decoded = codec.decode(here, LAYOUT)
    targets = {n: torch.zeros(shape, device="cuda") for n, shape in SHAPES.items()}
    codec.add_each((coded, targets[n]) for n, coded in codec.read_each(here, LAYOUT))
    for n, coded in codec.read_each(here, LAYOUT):
        target = torch.zeros(SHAPES[n], device="cuda")
        coded.add_to(target)
        assert torch.equal(target.cpu(), decoded[n]) and torch.equal(target, targets[n])
        if owed:
            assert owed[n].is_cuda and torch.equal(owed[n].cpu(), values[n] - decoded[n])


def run(folder: Path, *words: str, absences: dict[str, Absence] | None = None) -> SimulatedRun:
    config = load_run(
        None,
        [
            *("workload=flow", "data.name=ring8", "sites=2", "h=6", "steps=48", "eval.every=0"),
            *("model.width=64", *words),
        ],
    )

    def train(member: Membership) -> None:
        take_part(dataclasses.replace(member, device=torch.device("cuda", 0)), Group())

    return simulate(config, folder, train=train, absences=absences)


@pytest.mark.parametrize(
    "words",
    [
        ("strategy=sync", "h=1"),
        ("strategy=local_sgd",),
        ("strategy=diloco", "codec.up=int2"),
        ("strategy=streaming_diloco", "stream.tau=3", "codec.up=int4", "codec.down=int4"),
        ("strategy=eager_diloco", "stream.tau=5", "codec.up=int4"),
        ("strategy=sparse_loco",),
        ("strategy=scaffnew",),
        ("strategy=diloco", "inner.velocity.state=average"),
    ],
    ids=lambda words: " ".join(words),
)
def test_a_run_leads_to_the_same_bits_every_time(tmp_path: Path, words: tuple[str, ...]) -> None:
    first, second = (run(tmp_path / name, *words).site_sha256 for name in "ab")
    assert first == second and len(set(first.values())) == 1


def test_a_killed_site_repeats_its_steps_bit_for_bit(tmp_path: Path) -> None:
    words = ("strategy=diloco", "checkpoint.every=1")
    whole = run(tmp_path / "a", *words)
    broken = run(tmp_path / "b", *words, absences={"s2": Absence(0.4, 0.5)})
    assert whole.site_sha256 == broken.site_sha256


def test_generators_of_a_gpu_go_on_from_where_they_stood() -> None:
    device = torch.device("cuda", 0)
    rng = NamedGenerators(0, "s1")
    torch.randn(5, generator=rng.on("noise", device), device=device)
    kept = rng.state_dict()
    after = torch.randn(5, generator=rng.on("noise", device), device=device)
    again = NamedGenerators(1, "s2")
    again.load_state_dict(kept)
    assert torch.equal(after, torch.randn(5, generator=again.on("noise", device), device=device))
