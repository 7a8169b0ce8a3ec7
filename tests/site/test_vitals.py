"""What a site tells of its data, rates and networks."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from fedwan.data import InMemory, Shard
from fedwan.doctor.rules import LEAST_DISTINCT
from fedwan.rng import NamedGenerators
from fedwan.site import vitals
from fedwan.site.vitals import Vitals, data_figures, distinct_share
from fedwan.workloads.base import Batch
from tests.support import ADAM, TinyWorkload, keep_local, tiny_shard


def images(seed: int = 0) -> Tensor:
    """Smooth ones: sums of waves of a few pixels."""
    generator = torch.Generator().manual_seed(seed)
    phase = torch.rand(32, 1, 1, 1, generator=generator) * 6
    at = torch.arange(16) / 3
    return (torch.sin(at + phase) + torch.sin(at.unsqueeze(1) + phase)) / 2


class Examined(TinyWorkload):
    """Examines itself in a way that would be noticed: it draws, and its norm is watched."""

    def __init__(self) -> None:
        super().__init__({"net": ADAM}, norm=True)
        self.seen: list[tuple[Batch, Batch, int]] = []

    def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
        self.seen.append((train, held_out, seed))
        assert not any(m.training for n in self.networks.values() for m in n.modules())
        assert not torch.is_grad_enabled()
        torch.rand(3)
        self.networks["net"](train.x)
        return {"memory/net": torch.tensor(0.5)}


def look(workload: TinyWorkload, h: int, steps: int, batch_size: int = 16) -> list[int]:
    """Steps after which figures were told."""
    shard = tiny_shard(0, 24)
    one = Vitals(workload, shard, h, batch_size, 0, "s1")
    batch = Batch(shard.train.batch.x[:batch_size], shard.train.batch.y[:batch_size])
    return [step for step in range(1, steps + 1) if one.after_step(batch, step)]


@pytest.mark.parametrize(
    ("h", "batch", "expected"),
    [(1, 16, [16, 32]), (5, 16, [20, 40]), (20, 99, [20, 40]), (5, 8, [35]), (20, 5, [])],
)
def test_figures_are_told_right_before_a_contribution_and_not_too_often(
    h: int, batch: int, expected: list[int]
) -> None:
    assert look(TinyWorkload({"net": ADAM}), h, 40, batch) == expected


def test_rates_gradients_and_the_workloads_own_figures_are_told() -> None:
    workload = Examined()
    shard = tiny_shard(0, 24)
    one = Vitals(workload, shard, 16, 16, 0, "s1")
    batch = Batch(shard.train.batch.x[:4], shard.train.batch.y[:4])
    workload.step(batch, NamedGenerators(0, "s1"), keep_local)
    (figures,) = [found for step in range(16) if (found := one.after_step(batch, step + 1))]
    assert float(figures["lr/net"]) == pytest.approx(ADAM.lr)
    gradients = [p.grad for p in workload.networks["net"].parameters() if p.grad is not None]
    expected = torch.cat([gradient.flatten() for gradient in gradients]).norm()
    assert float(figures["gradient/net"]) == pytest.approx(float(expected), rel=1e-5)
    assert float(figures["memory/net"]) == 0.5
    assert all(value.dim() == 0 for value in figures.values())
    assert "x/smooth" not in figures, "points have no neighbours"


@pytest.mark.parametrize("num", [23, 24])
def test_few_held_out_samples_tell_of_no_memory(num: int) -> None:
    x, y = torch.randn(num, 2), torch.zeros(num, dtype=torch.long)
    shard = Shard(train=InMemory(Batch(x, y)), held_out=Batch(x, y), public=False)
    workload = Examined()
    found = Vitals(workload, shard, 16, 16, 0, "s1").after_step(Batch(x, y), 16)
    assert ("memory/net" in found) == (num >= 24) and len(workload.seen) == 1


def test_a_workload_that_cannot_be_examined_trains_on(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(Examined):
        def examine(self, train: Batch, held_out: Batch, seed: int) -> dict[str, Tensor]:
            return {"memory/net": torch.zeros(3)}

    workload = Broken()
    assert look(workload, 16, 64) == []
    assert [r.message for r in caplog.records] == [
        "no figures for the doctor from now on; training goes on"
    ]
    assert all(m.training for m in workload.networks["net"].modules())


def test_held_out_samples_are_of_the_training_samples_classes() -> None:
    labels = torch.arange(40) % 10
    x = torch.randn(40, 2)
    shard = Shard(
        train=InMemory(Batch(x[labels < 3], labels[labels < 3])),
        held_out=Batch(x, labels),
        public=False,
    )
    workload = Examined()
    one = Vitals(workload, shard, 16, 16, 0, "s1")
    for step in range(16):
        one.after_step(shard.train.batch, step + 1)
    ((train, held_out, _),) = workload.seen
    assert torch.equal(train.y, held_out.y) and set(held_out.y.tolist()) <= {0, 1, 2}


def test_smoothness_tells_images_from_noise_whatever_their_range() -> None:
    smooth = float(data_figures(images())["x/smooth"])
    assert smooth > 0.8
    assert float(data_figures(255 * images() + 100)["x/smooth"]) == pytest.approx(smooth, abs=1e-3)
    figures = {k: float(v) for k, v in data_figures(torch.tensor([[0.0, 2.0], [4.0, 2.0]])).items()}
    assert figures == pytest.approx({"x/low": 0, "x/high": 4, "x/mean": 2, "x/std": 2**0.5})
    noise = torch.rand(32, 1, 16, 16, generator=torch.Generator().manual_seed(0)) * 2 - 1
    assert abs(float(data_figures(noise)["x/smooth"])) < 0.05
    assert float(data_figures(torch.ones(2, 1, 4, 4))["x/smooth"]) == 0.0


# Copies ------------------------------------------------------------------------------------------


def told(shard: Shard, seed: int = 0) -> float:
    """What the site tells of its shard."""
    workload = TinyWorkload({"net": ADAM})
    some = shard.drawn(2, 0)
    look = Vitals(workload, shard, 1, 16, seed, "s1")
    (figures,) = [found for step in range(16) if (found := look.after_step(some, step + 1))]
    assert float(figures["shard/samples"]) == shard.num_samples
    return float(figures["shard/distinct"])


def shuffled(keys: Tensor, seed: int) -> Tensor:
    return keys[torch.randperm(len(keys), generator=torch.Generator().manual_seed(seed))]


@pytest.mark.parametrize("copied", [True, False])
def test_a_shard_in_memory_is_told_from_some_dozens_of_its_images(
    monkeypatch: pytest.MonkeyPatch, copied: bool
) -> None:
    keys = torch.arange(400) // (10 if copied else 1)
    images = torch.rand(400, 1, 8, 8, generator=torch.Generator().manual_seed(0))[keys]
    monkeypatch.setattr(vitals, "MOST_BYTES", 42 * 4 * images[0].numel())
    shard = Shard(InMemory(Batch(images, keys)), Batch(images[:8], keys[:8]), public=False)
    seeds = range(20)
    shares = [told(shard, seed) for seed in seeds]
    assert shares == [told(shard, seed) for seed in seeds]
    if copied:
        assert sum(share < LEAST_DISTINCT for share in shares) >= 19
    else:
        assert shares == [1.0] * 20


@pytest.mark.parametrize("num", [42, 4096])
def test_a_few_copies_are_no_shard_of_copies_and_ten_of_each_are(num: int) -> None:
    assert distinct_share(torch.tensor([5, 5, 5]), 1000) == 1 / 1000
    every_tenth_twice = torch.arange(20_000) - (torch.arange(20_000) % 20 == 1).long()
    a_fifth_is_blank = torch.arange(20_000).clamp(min=4000)
    for keys in (every_tenth_twice, a_fifth_is_blank):
        shares = [distinct_share(shuffled(keys, seed)[:num], len(keys)) for seed in range(20)]
        assert min(shares) > LEAST_DISTINCT + 0.05
    copied = torch.arange(20_000) % 2000
    shares = [distinct_share(shuffled(copied, seed)[:4096], 20_000) for seed in range(20)]
    assert sum(shares) / 20 == pytest.approx(0.1, abs=0.05)
