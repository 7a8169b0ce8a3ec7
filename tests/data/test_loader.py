"""Loaders: their order, and going on from where one stood."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import datasets
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset

from fedwan.data import InMemory
from fedwan.data.loader import Loader
from fedwan.errors import CheckpointError, ConfigError, UserError
from fedwan.rng import NamedGenerators
from fedwan.site.checkpoint import pack
from fedwan.workloads.base import Batch
from tests.data.files import refused
from tests.support import other_defaults


class Noisy(Dataset[Any]):
    """Draws from all three global generators for each sample."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, place: int) -> Any:
        draws = torch.rand(()), np.random.rand(), random.random()
        return {"latents": torch.tensor([place, *draws]), "caption": f"number {place}"}


class Numbers(IterableDataset[Any]):
    """A stream that ends after ten, and begins anew."""

    def __iter__(self) -> Iterator[Any]:
        return iter(torch.arange(10))


class Damaged(Dataset[Any]):
    def __len__(self) -> int:
        return 4

    def __getitem__(self, place: int) -> Any:
        raise ConfigError(f"data.path: number {place} cannot be read; remove it")


def loader(dataset: Any, batch_size: int, seed: int = 0, workers: int = 0) -> Loader:
    return Loader(dataset, batch_size, torch.Generator().manual_seed(seed), "cpu", workers)


def numbers(num: int, batch_size: int, seed: int = 0) -> Loader:
    x = torch.arange(num, dtype=torch.float32)
    return loader(InMemory(Batch(x, x.long())), batch_size, seed)


def take(source: Loader, num: int) -> torch.Tensor:
    return torch.stack([next(source).y for _ in range(num)])


def test_without_a_generator_the_order_follows_torch_s_seed_at_the_first_batch() -> None:
    x = torch.arange(50, dtype=torch.float32)
    held = InMemory(Batch(x, x.long()))
    source = Loader(held, 8)  # made before the seed, as before `fedwan.join`
    torch.manual_seed(3)
    first, second = take(source, 4), take(Loader(held, 8), 4)
    assert not torch.equal(first, second), "two sets of one length are in no common order"
    torch.manual_seed(3)
    assert torch.equal(first, take(Loader(held, 8), 4))
    assert torch.equal(second, take(Loader(held, 8), 4))
    state, then = source.state_dict(), take(source, 9)
    torch.manual_seed(4)
    other = Loader(held, 8)
    other.load_state_dict(state)
    assert torch.equal(take(other, 9), then)
    assert not torch.equal(take(Loader(held, 8), 4), first)


@given(
    num=st.integers(1, 40),
    batch_size=st.integers(1, 50),
    epochs=st.integers(1, 3),
    before=st.integers(0, 9),
)
@settings(max_examples=50, deadline=None)
def test_each_epoch_is_a_permutation_batches_are_full_and_resume_bit_for_bit(
    num: int, batch_size: int, epochs: int, before: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    expected = torch.cat([torch.randperm(num, generator=generator) for _ in range(epochs)])
    seen = take(numbers(num, batch_size), -(-num * epochs // batch_size))
    assert seen.shape[1] == batch_size
    assert torch.equal(seen.flatten()[: num * epochs], expected)
    source = numbers(num, batch_size)
    take(source, before) if before else None
    state = source.state_dict()
    rest = take(source, 7)
    resumed = numbers(num, batch_size, seed=99)
    take(resumed, 2)
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 7), rest)
    ahead = numbers(num, batch_size)
    for batches in (before // 2, before, 0):
        ahead.skip_to(batches)
    assert torch.equal(take(ahead, 7), rest) and ahead.taken == before + 7


@pytest.mark.parametrize("taken", [1, 125, 130])
def test_the_state_is_as_small_for_many_samples_in_an_epoch_and_at_its_end(taken: int) -> None:
    source, resumed = numbers(1000, 8), numbers(1000, 8, seed=99)
    take(source, taken)
    state = source.state_dict()
    assert sum(value.nbytes for value in state.values()) < 6000
    resumed.load_state_dict(state)
    assert torch.equal(take(resumed, 200), take(source, 200))


def test_captions_in_memory_are_taken_with_their_samples() -> None:
    held = InMemory({"x": torch.arange(3), "pair": [torch.arange(3)], "caption": ["a", "b", "c"]})
    batch = held.take(torch.tensor([2, 0]))
    assert batch["x"].tolist() == batch["pair"][0].tolist() == [2, 0]
    assert batch["caption"] == ["c", "a"] and held[1]["caption"] == "b"
    assert set(next(loader(held, 3))["caption"]) == {"a", "b", "c"}


def test_what_is_mirrored_keeps_its_shape() -> None:
    x = torch.arange(12.0).view(4, 3)
    source = Loader(InMemory(Batch(x, x)), 4, torch.Generator().manual_seed(0), flip=True)
    first = [tuple(row) for row in next(source).x.sort(dim=1).values.tolist()]
    assert sorted(first) == [tuple(row) for row in x.tolist()]


def test_other_samples_are_mirrored_in_each_batch_and_the_same_ones_when_resumed() -> None:
    class Rows(Numbers):
        def __iter__(self) -> Iterator[Any]:
            return (Batch(row, row) for row in torch.arange(48.0).view(24, 2))

    source, resumed = (Loader(Rows(), 24, flip=True) for _ in range(2))
    assert not torch.equal(next(source).x, next(source).x)
    resumed.load_state_dict(source.state_dict())
    assert torch.equal(next(resumed).x, next(source).x)


class Pictures(Noisy):
    """Notes what was read."""

    def __init__(self) -> None:
        self.read: list[int] = []

    def __getitem__(self, place: int) -> Any:
        self.read.append(place)
        x = torch.stack([torch.tensor(float(place)), torch.rand(())])
        return {"x": x, "caption": f"number {place}"}


class Rows(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return ({"x": row, "caption": str(row)} for row in torch.arange(48.0).view(24, 2))


IN_MEMORY = InMemory({"x": torch.arange(40.0).view(20, 2), "caption": [*"abcdefghijklmnopqrst"]})


@pytest.mark.parametrize("kind", [Pictures, Rows, lambda: IN_MEMORY], ids=["map", "stream", "held"])
def test_processes_take_parts_of_the_batches_of_one_and_read_no_more_than_these(kind: Any) -> None:
    def made(*part: int) -> tuple[Any, list[Any]]:
        held, generator = kind(), torch.Generator().manual_seed(3)
        source = Loader(held, 6, generator, flip=True, part=part or (1, 0))  # type: ignore[arg-type]
        return held, [next(source) for _ in range(5)]

    (_, whole), *parts = made(), *(made(3, index) for index in range(3))
    for number, batch in enumerate(whole):
        mine = [batches[number] for _, batches in parts]
        assert torch.equal(torch.cat([part["x"] for part in mine]), batch["x"])
        assert sum((part["caption"] for part in mine), []) == batch["caption"]
    if kind is Pictures:
        assert [len(held.read) for held, _ in parts] == [10, 10, 10]


def test_batches_do_not_depend_on_what_a_script_has_made_torchs_default() -> None:
    x = torch.arange(48.0).view(12, 1, 2, 2)

    def batches() -> list[torch.Tensor]:
        held, generator = InMemory(Batch(x, x)), torch.Generator().manual_seed(0)
        source = Loader(held, 5, generator, flip=True)
        return [next(source).x for _ in range(4)] + list(source.state_dict().values())

    expected = batches()
    with other_defaults(torch.float64):
        assert all(map(torch.equal, batches(), expected))


def test_the_state_of_another_shard_is_refused() -> None:
    source = numbers(10, 4)
    take(source, 1)
    with pytest.raises(CheckpointError, match="stands at 4 of 10 samples, but this shard has 11"):
        numbers(11, 4).load_state_dict(source.state_dict())


@pytest.mark.slow
def test_batches_of_a_data_set_that_draws_are_the_same_with_workers_and_when_resumed() -> None:
    torch.manual_seed(0)
    plain, ahead = loader(Noisy(), 4), loader(Noisy(), 4, workers=2)
    expected = [next(plain) for _ in range(8)]
    found = [next(ahead) for _ in range(3)]
    state = ahead.state_dict()
    ahead.skip_to(5)  # its workers have read beyond that
    assert torch.equal(next(ahead)["latents"], expected[5]["latents"])
    ahead.close()
    resumed = loader(Noisy(), 4, seed=5)
    resumed.load_state_dict(state)
    found += [next(resumed) for _ in range(5)]
    for one, other in zip(expected, found, strict=True):
        assert torch.equal(one["latents"], other["latents"])
        assert one["caption"] == other["caption"]
    assert expected[0]["caption"][0] == f"number {int(expected[0]['latents'][0, 0])}"
    drawn = torch.cat([batch["latents"][:, 1] for batch in expected])
    assert len(drawn.unique()) == len(drawn)
    first, state_of_torch = torch.rand(1), torch.Generator().manual_seed(0)
    assert torch.equal(first, torch.rand(1, generator=state_of_torch)), "nobody drew from it"


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_stream_begins_anew_where_it_ends_and_resumes_where_it_stood(workers: int) -> None:
    source = loader(Numbers(), 4, workers=workers)
    source.skip_to(2)  # which it cannot
    assert [next(source).tolist() for _ in range(3)] == [[0, 1, 2, 3], [4, 5, 6, 7], [0, 1, 2, 3]]
    state = source.state_dict()
    source.close()
    resumed = loader(Numbers(), 4, workers=workers)
    resumed.load_state_dict(state)
    assert next(resumed).tolist() == [4, 5, 6, 7]
    resumed.close()
    with pytest.raises(CheckpointError, match="resume with the same data and workers"):
        loader(Numbers(), 4, workers=workers + 1).load_state_dict(state)


def test_a_stream_of_datasets_goes_on_in_its_epoch_and_then_takes_whole_ones() -> None:
    """Put back to a place, it would begin each later epoch there."""

    def of_datasets() -> Loader:
        rows = datasets.Dataset.from_dict({"x": list(range(20))}).with_format("torch")
        return loader(rows.to_iterable_dataset(num_shards=4), 4)

    source = of_datasets()
    expected = [next(source)["x"].tolist() for _ in range(16)]
    assert sorted(sum(expected[5:10], [])) == list(range(20))
    for taken in (1, 4, 5, 7, 10):
        first, second = of_datasets(), of_datasets()
        for _ in range(taken):
            next(first)
        second.load_state_dict(first.state_dict())
        assert [next(second)["x"].tolist() for _ in range(16 - taken)] == expected[taken:]
    rows = datasets.Dataset.from_dict({"x": list(range(20))}).with_format("torch")
    shuffled = loader(rows.to_iterable_dataset().shuffle(seed=1, buffer_size=20), 20)
    first, second = (next(shuffled)["x"].tolist() for _ in range(2))
    assert first != second and sorted(second) == list(range(20))


def test_a_stream_whose_state_cannot_be_read_back_is_told_of_at_the_first_checkpoint() -> None:
    class Drawing(Numbers):
        def state_dict(self) -> dict[str, Any]:
            return {"random": np.random.RandomState(0).get_state()}

        def load_state_dict(self, state: dict[str, Any]) -> None:
            pass

    source = loader(Drawing(), 4)
    next(source)
    says = r"state\['data'\] cannot be kept in a checkpoint: it holds"
    with pytest.raises(UserError, match=says):
        pack("state['data']", source.state_dict())


def test_data_without_enough_samples_are_refused() -> None:
    refused("the data set holds no samples; look at its path", lambda: numbers(0, 8))
    refused("batch_size = 0 is out of range; choose 1 or more", lambda: numbers(8, 0))
    says = "data.batch is 11, more than this site's stream"
    refused(says, lambda: next(loader(Numbers(), 11)))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_what_a_worker_cannot_read_is_told_in_one_line(workers: int) -> None:
    source = loader(Damaged(), 2, workers=workers)
    with pytest.raises(ConfigError, match=r"^data.path: number \d cannot be read; remove it$"):
        next(source)
    source.close()


class Drawing(IterableDataset[Tensor]):
    def __iter__(self) -> Iterator[Tensor]:
        while True:
            yield torch.rand(())


@pytest.mark.slow
def test_what_a_stream_draws_in_workers_is_each_site_s_own_and_the_same_when_resumed() -> None:
    firsts = []
    for site in ("s1", "s2"):
        loader = Loader(Drawing(), 2, NamedGenerators(0, site)["data"], workers=1)
        firsts += [next(loader) for _ in range(3)][:1]
        state, expected = loader.state_dict(), next(loader)
        loader.close()
        again = Loader(Drawing(), 2, NamedGenerators(0, site)["data"], workers=1)
        again.load_state_dict(state)
        assert torch.equal(next(again), expected)
        again.close()
    assert not torch.equal(*firsts)
