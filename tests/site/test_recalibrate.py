"""Running statistics that fit the weights they are measured with."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from fedwan.rng import NamedGenerators
from fedwan.site.recalibrate import normalised_layers, recalibrate
from fedwan.site.replica import Replica
from fedwan.state import hash_state
from fedwan.workloads.base import Batch, Reduce, keep_local
from tests.support import ADAM, TinyWorkload, tiny_shard

INNER = {"net": ADAM}


def trained(num_steps: int = 5) -> TinyWorkload:
    workload = TinyWorkload(INNER, norm=True)
    rng = NamedGenerators(0, "s1")
    stream = tiny_shard(1).batches(4, rng["data"])
    for _ in range(num_steps):
        workload.step(stream.next_batch(), rng, keep_local)
    return workload


def batches(num: int) -> list[Batch]:
    stream = tiny_shard(2).batches(8, torch.Generator().manual_seed(7))
    return [stream.next_batch() for _ in range(num)]


def test_statistics_are_the_even_average_of_the_batches_under_the_weights_at_hand() -> None:
    workload = trained()
    recalibrate(workload, batches(6), NamedGenerators(1, "s1"))
    (layer,) = normalised_layers(workload.networks)
    draws = NamedGenerators(1, "s1")["noise"]
    noisy = [b.x + 0.01 * torch.randn(b.x.shape, generator=draws) for b in batches(6)]
    with torch.no_grad():
        seen = [workload.networks["net"].get_submodule("first")(x) for x in noisy]
    mean, variance = layer.running_mean, layer.running_var
    assert mean is not None and variance is not None
    torch.testing.assert_close(mean, torch.stack([x.mean(0) for x in seen]).mean(0))
    torch.testing.assert_close(variance, torch.stack([x.var(0) for x in seen]).mean(0))


def test_nothing_else_is_touched() -> None:
    workload = trained()
    network = workload.networks["net"].eval()
    replica = Replica(workload.networks, workload.optimizers)
    before = copy.deepcopy(replica.inner.state())
    params = [p.detach().clone() for p in network.parameters()]
    grads = [p.grad for p in network.parameters()]
    assert all(grad is not None and bool(grad.any()) for grad in grads)
    recalibrate(workload, batches(3), NamedGenerators(1, "s1"))
    (layer,) = normalised_layers(workload.networks)
    assert layer.momentum == 0.1 and not network.training and not layer.training
    assert hash_state(replica.inner.state()) == hash_state(before)
    for param, value, grad in zip(network.parameters(), params, grads, strict=True):
        assert torch.equal(param, value) and param.grad is grad


class Counting(TinyWorkload):
    """Keeps how many steps it took, as others keep their loss scale."""

    def __init__(self) -> None:
        super().__init__(INNER, norm=True)
        self.kept = {"steps": torch.tensor(5)}

    def step(self, batch: Batch, rng: NamedGenerators, reduce: Reduce) -> dict[str, Tensor]:
        self.kept["steps"] += 1
        return super().step(batch, rng, reduce)


def test_what_the_workload_keeps_is_as_it_was() -> None:
    workload = Counting()
    recalibrate(workload, batches(3), NamedGenerators(1, "s1"))
    assert len(workload.batches) == 3 and int(workload.kept["steps"]) == 5


def test_networks_without_batch_norm_take_no_step() -> None:
    workload = TinyWorkload(INNER)
    recalibrate(workload, batches(2), NamedGenerators(1, "s1"))
    assert not workload.batches


def test_a_step_that_fails_leaves_modes_and_momenta_as_they_were() -> None:
    workload = trained()
    wrong = [Batch(torch.zeros(3, 5), torch.zeros(3))]
    with pytest.raises(RuntimeError):
        recalibrate(workload, wrong, NamedGenerators(1, "s1"))
    (layer,) = normalised_layers(workload.networks)
    assert layer.momentum == 0.1 and layer.training
