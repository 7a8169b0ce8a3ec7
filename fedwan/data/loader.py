"""Batches without end that resume bit for bit: torchdata's StatefulDataLoader, in an order of ours.

A batch is any pytree of tensors; captions in one are a list of text. What is in it is decided in
the process of the steps, by one generator; workers only fetch. So batches of a map-style data set
are the same with any number of workers, and the state is where the last batch that was taken stands
in that order. A data set that draws finds the global generators seeded for each sample, so that
several processes of a site read their parts of a batch alone; a stream (`IterableDataset`) has its
own order, and keeps what it draws from in its `state_dict`.
"""

from __future__ import annotations

import copy
import hashlib
import multiprocessing
import random
import warnings
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves, tree_map, tree_map_only
from torch.utils.data import Dataset, IterableDataset, default_collate
from torchdata.stateful_dataloader import StatefulDataLoader

from fedwan.errors import CheckpointError, ConfigError
from fedwan.rng import derive_seed, lent_generators
from fedwan.state import tensor_bytes

# torchdata 0.11 calls what torch 2.13 deprecates.
warnings.filterwarnings("ignore", "'set_vital' is deprecated")


class InMemory(Dataset[Any]):
    """A data set whose samples are the rows of tensors, a pytree of at least one, and of texts."""

    def __init__(self, batch: Any) -> None:
        self.batch = batch

    def __len__(self) -> int:
        return len(first_leaf(self.batch))

    def __getitem__(self, place: int) -> Any:
        return map_rows(self.batch, lambda rows: rows[place])

    @property
    def labels(self) -> Tensor:
        """Of a `Batch`, or a dict with captions, (n,) int64."""
        return _labels(self.batch)

    def stamp(self) -> str:
        """Another one where other samples are meant."""
        found = hashlib.sha256()
        for leaf in tree_leaves(self.batch):
            found.update(tensor_bytes(leaf) if isinstance(leaf, Tensor) else f"{leaf}\n".encode())
        return found.hexdigest()

    def take(self, places: Tensor) -> Any:
        """The rows at some places, (n,) int64, as a batch."""
        places, numbers = places.to(first_leaf(self.batch).device), places.tolist()
        return map_rows(
            self.batch,
            lambda rows: rows[places] if isinstance(rows, Tensor) else [rows[p] for p in numbers],
        )


def map_rows(batch: Any, pick: Callable[[Any], Any]) -> Any:
    """A batch with what `pick` makes of each tensor and list of text; all else as it is."""
    return tree_map(
        lambda leaf: pick(leaf) if isinstance(leaf, Tensor) or _is_text(leaf) else leaf,
        batch,
        is_leaf=_is_text,
    )


def part_of(batch: Any, num: int, index: int) -> Any:
    """One of equal parts of a batch, any pytree of tensors (samples, …) and lists of text."""

    def cut(rows: Any) -> Any:
        width = -(-len(rows) // num)
        return rows[index * width : (index + 1) * width]

    return batch if num == 1 else map_rows(batch, cut)


def _is_text(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(part, str) for part in value)


def first_leaf(batch: Any) -> Tensor:
    """A batch's first tensor, which tells how many samples there are."""
    for leaf in tree_leaves(batch):
        if isinstance(leaf, Tensor):
            return leaf
    raise TypeError(f"a batch needs a tensor, which this {type(batch).__name__} has not")


def _moved(leaf: Tensor, device: torch.device | str) -> Tensor:
    if leaf.is_cpu and torch.device(device).type == "cuda" and leaf.numel():
        # From memory that stays where it is, so that nobody waits for the GPU. Not by `pin_memory`:
        # it copies by OpenMP, whose threads then spin, on all processors, for much of a step.
        pinned = torch.empty(leaf.shape, dtype=leaf.dtype, device="cpu", pin_memory=True)
        tensor_bytes(pinned)[:] = tensor_bytes(leaf)
        return pinned.to(device, non_blocking=True)
    return leaf.to(device)


def _field(batch: Any, name: str, setting: str) -> Tensor:
    """`x` or `y` of a `Batch`, or of a dict, which a setting is of."""
    found = batch.get(name) if isinstance(batch, dict) else getattr(batch, name, None)
    if not isinstance(found, Tensor):
        raise ConfigError(
            f"{setting} is of samples with {name!r}, which those of this data set do not have; "
            "leave it out, or give a fedwan.data.Batch"
        )
    return found


def _labels(batch: Any) -> Tensor:
    """`y` of a `Batch`, or of a dict with captions."""
    return _field(batch, "y", "data.labels=site")


def _replaced(batch: Any, name: str, value: Tensor) -> Any:
    """A `Batch`, or a dict with captions, with another `x` or `y`."""
    return {**batch, name: value} if isinstance(batch, dict) else batch._replace(**{name: value})


def tell(batch: Any, number: int | None) -> Any:
    """A batch with the labels that networks are told: a site's number, or None for classes.

    A GAN whose sites hold different data fails, as each site's discriminator knows the others' for
    generated at sight. Told whose sample it looks at, it has nothing to disagree about.
    """
    if number is None:
        return batch
    return _replaced(batch, "y", torch.full_like(_labels(batch), number))


class _Order:
    """An endless order of samples: each epoch is a fresh permutation.

    A batch that reaches its end goes on into the next: no sample is dropped, every batch is full.
    For `places` see `Loader`.
    """

    def __init__(
        self,
        num_samples: int,
        batch_size: int,
        generator: torch.Generator,
        places: Callable[[int], Tensor] | None = None,
    ) -> None:
        self._num_samples, self._batch_size = num_samples, batch_size
        self._generator, self._places = generator, places or self._dealt
        self._order = torch.empty(0, dtype=torch.int64, device="cpu")
        self._before = torch.empty(0)
        """The generator's state that the order was drawn from."""
        self._position = self._drawn = 0
        self._states: deque[dict[str, Tensor]] = deque()

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        """Which samples each batch consists of, (batch,) int64, and a seed of what they draw."""
        while True:
            self._drawn += 1
            places = self._places(self._drawn)
            self._states.append(self.state_dict())
            yield places, derive_seed(self._generator.initial_seed(), self._drawn)

    def skip(self, batches: int) -> None:
        """Draw so many batches for nobody."""
        for number in range(self._drawn + 1, self._drawn + 1 + batches):
            self._places(number)
        self._drawn += batches

    def _dealt(self, _: int) -> Tensor:
        parts: list[Tensor] = []
        missing = self._batch_size
        while missing:
            if self._position == len(self._order):
                self._deal()
                self._position = 0
            parts.append(self._order[self._position : self._position + missing])
            self._position += len(parts[-1])
            missing -= len(parts[-1])
        return torch.cat(parts)

    def _deal(self) -> None:
        self._before = self._generator.get_state()
        self._order = torch.randperm(self._num_samples, generator=self._generator, device="cpu")

    def taken(self) -> dict[str, Tensor]:
        """The state after the earliest batch that was drawn in iteration and not yet taken."""
        return self._states.popleft()

    def state_dict(self) -> dict[str, Tensor]:
        """`generator` (uint8), before it drew the order; `samples` in that, `position`, `taken`."""
        num = len(self._order)
        return {
            "generator": self._before if num else self._generator.get_state(),
            "samples": torch.tensor(num, device="cpu"),
            "position": torch.tensor(self._position, device="cpu"),
            "taken": torch.tensor(self._drawn, device="cpu"),
        }

    def load_state_dict(self, state: dict[str, Tensor]) -> None:
        """Go on from `state_dict()`; a `CheckpointError` for a shard of another size."""
        num, position = int(state.get("samples", 0)), int(state.get("position", -1))
        if num not in (0, self._num_samples) or not 0 <= position <= num:
            raise CheckpointError(
                f"the data stream in the checkpoint stands at {position} of {num} samples, "
                f"but this shard has {self._num_samples}; resume with the same data, split and seed"
            )
        self._states.clear()
        self._generator.set_state(state["generator"])
        self._order, self._position = self._order[:0], position
        if num:
            self._deal()
        self._drawn = int(state["taken"])


class Fetch:
    """Makes batches of a map-style data set, in a worker or in the process of the steps.

    Of each `part` = (number of parts, index): nothing of the others is read.
    """

    def __init__(self, dataset: Any, part: tuple[int, int] = (1, 0)) -> None:
        self._dataset, self._part = dataset, part

    def __getitems__(self, draw: tuple[Tensor, int]) -> Any:
        """The batch's part; in memory it is one index operation."""
        places, seed = draw
        mine = part_of(places, *self._part)
        if isinstance(self._dataset, InMemory):
            return self._dataset.take(mine)
        numbers = part_of(torch.arange(len(places)), *self._part).tolist()
        with lent_generators():
            rows = []
            for number, place in zip(numbers or [0], mine.tolist() or [0], strict=True):
                seed_globally(derive_seed(seed, number))
                rows.append(self._dataset[place])
            batch = default_collate(rows)
        return batch if len(mine) else tree_map_only(Tensor, lambda leaf: leaf[:0], batch)


class Loader:
    """Batches of `batch_size` samples of one shard on a device, without end.

    `dataset` is map-style with at least one sample, or a stream. The CPU `generator` of the order
    is drawn from by nobody else, and may be ahead of the batches that were taken; without one there
    is one whose seed is drawn at the first batch from torch's global generator, as torch's samplers
    do it; `fedwan.join` has made that each site's own. `workers`
    processes read ahead; 0 reads when a batch is asked for. For `told` see `tell`; `flip` mirrors
    half of all pictures, `x` of a batch. `places` gives the samples of the n-th batch, counted from
    1, (any number,) int64, in place of `batch_size` in turn. `part` = (number of parts, index): of
    each batch that one of equal parts, as one of a site's processes takes it.
    """

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        workers: int = 0,
        told: int | None = None,
        flip: bool = False,
        places: Callable[[int], Tensor] | None = None,
        part: tuple[int, int] = (1, 0),
    ) -> None:
        if batch_size < 1:
            raise ConfigError(f"batch_size = {batch_size} is out of range; choose 1 or more")
        self._is_seeded, self._batch_size = generator is not None, batch_size
        self._generator = generator = generator or torch.Generator()
        self._device, self._told, self._flip, self._part = device, told, flip, part
        self.taken = 0
        """Batches so far."""
        self._epoch = 0
        self._order: _Order | None = None
        if isinstance(dataset, InMemory):
            # As it is: pinned memory, once taken, is torch's to keep.
            whole = tree_map_only(Tensor, lambda leaf: leaf.to(device), dataset.batch)
            dataset, workers = InMemory(whole), 0
        self._workers = workers
        shared: dict[str, Any] = {
            "num_workers": workers,
            "multiprocessing_context": _forkserver() if workers else None,
            # Not torch's own, of which it would draw otherwise.
            "generator": torch.Generator(),
        }
        if is_stream(dataset):
            stream = copied(dataset)
            self._loader = StatefulDataLoader(stream, batch_size, drop_last=True, **shared)
        elif not len(dataset):
            raise ConfigError("the data set holds no samples; look at its path")
        else:
            self._order = _Order(len(dataset), batch_size, generator, places)
            self._loader = StatefulDataLoader(
                Fetch(dataset, part), batch_sampler=self._order, collate_fn=_as_it_is, **shared
            )
        self._batches: Iterator[Any] | None = None
        self._state: dict[str, Tensor] = self._order.state_dict() if self._order else {}

    def __iter__(self) -> Loader:
        return self

    def __next__(self) -> Any:
        """The next samples, on the loader's device; a `ConfigError` if they cannot be read."""
        batch = self._next()
        if self._order is None:
            batch = part_of(batch, *self._part)
        else:
            self._state = self._order.taken()
        self.taken += 1
        batch = tree_map_only(Tensor, lambda leaf: _moved(leaf, self._device), batch)
        batch = tell(batch, self._told)
        return self._mirrored(batch) if self._flip else batch

    def _seed(self) -> None:
        """Draw a seed, unless there is one: later than a script makes the loader, and joins."""
        if not self._is_seeded:
            drawn = torch.empty((), dtype=torch.int64, device="cpu").random_()
            self._generator.manual_seed(int(drawn))
            self._state = self._order.state_dict() if self._order else {}
            self._is_seeded = True

    def _next(self) -> Any:
        self._seed()
        for _ in range(2):
            if self._batches is None:
                if self._order is None:  # what a stream draws in workers is each site's own
                    seed = derive_seed(self._generator.initial_seed(), "workers", self._epoch)
                    self._loader.generator.manual_seed(seed)
                with torch.device("cpu"):  # it draws a seed, from a generator there
                    self._batches = iter(self._loader)
            try:
                return next(self._batches)
            except StopIteration:  # a stream's epoch is over
                self._batches = None
                self._begin_epoch(self._epoch + 1)
            except ConfigError as error:  # a worker puts its traceback before it
                *others, last = str(error).strip().splitlines()
                raise ConfigError(last.partition(": ")[2] if others else last) from None
        raise ConfigError(
            f"data.batch is {self._batch_size}, more than this site's stream of data gives; "
            "take fewer"
        )

    def _begin_epoch(self, epoch: int) -> None:
        """Streams of `datasets` begin where they were put back to until they are told of another.

        By that, those that shuffle do so anew.
        """
        self._epoch = epoch
        if self._order is None and hasattr(self._loader.dataset, "set_epoch"):
            self._loader.dataset.set_epoch(epoch)

    def _mirrored(self, batch: Any) -> Any:
        x = _field(batch, "x", "data.flip=true")
        seed = derive_seed(self._generator.initial_seed(), "flip", self.taken)
        generator = torch.Generator().manual_seed(seed)
        num = len(x) * self._part[0]
        draws = torch.rand(num, generator=generator, dtype=torch.float32, device="cpu")
        mine = part_of(draws < 0.5, *self._part)
        chosen = mine.to(x.device).view(-1, *(1,) * (x.dim() - 1))
        return _replaced(batch, "x", torch.where(chosen, x.flip(-1), x))

    def state_dict(self) -> dict[str, Any]:
        """Where the last batch that was taken stands: tensors on the CPU, and a stream's own."""
        self._seed()
        if self._order is not None:
            return self._state
        return {
            "stream": self._loader.state_dict(),
            "taken": torch.tensor(self.taken, device="cpu"),
            "epoch": torch.tensor(self._epoch, device="cpu"),
            "workers": torch.tensor(self._workers, device="cpu"),
            "generator": self._generator.get_state(),
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state_dict()`; a `CheckpointError` if it is of other data or workers."""
        self._batches, self._is_seeded = None, True
        if self._order is not None:
            self._order.load_state_dict(state)
            self._state = self._order.state_dict()
        else:
            if (workers := int(state.get("workers", -1))) != self._workers:
                held = f"of data.workers={workers}" if workers >= 0 else "of no stream"
                raise CheckpointError(
                    f"the data stream in the checkpoint is {held}, this one of "
                    f"data.workers={self._workers}; resume with the same data and workers"
                )
            self._begin_epoch(int(state["epoch"]))
            self._loader.load_state_dict(state["stream"])
            self._generator.set_state(state["generator"])
        self.taken = int(state["taken"])

    def skip_to(self, batches: int) -> None:
        """Go on after so many batches, where fewer were taken; of those between none is read.

        A stream stays where it is.
        """
        if self._order is not None and batches > self.taken:
            self._order.load_state_dict(self.state_dict())  # workers may have read ahead
            self._order.skip(batches - self.taken)
            self.load_state_dict(self._order.state_dict())

    def close(self) -> None:
        """End the workers; no batch can be taken afterwards."""
        batches, self._batches = self._batches, None
        self._loader._iterator = None
        end_workers = getattr(batches, "_shutdown_workers", None)
        if end_workers is not None:
            end_workers()  # else they look every 5 s whether to end


def is_stream(dataset: Any) -> bool:
    """Whether a data set gives samples in an order of its own, and none by number."""
    return isinstance(dataset, IterableDataset)


def copied(stream: Any) -> Any:
    """A stream that stands where this one does, and moves alone; a `ConfigError` if it cannot."""
    try:
        return copy.deepcopy(stream)
    except TypeError as error:
        raise ConfigError(
            f"the stream of data {type(stream).__name__} cannot be copied ({error}); open files "
            "in its __iter__"
        ) from None


def _forkserver() -> Any:
    """Workers come of a process without threads or a GPU, which imports fedwan once for all.

    Under Python 3.11, which passes over `__main__` there, each imports the script anew.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["__main__", "fedwan.data.shard"])
    return context


def _as_it_is(batch: Any) -> Any:
    return batch


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """The global generators under a seed; afterwards they are as they were."""
    with lent_generators():
        seed_globally(seed)
        yield


def seed_globally(seed: int) -> None:
    """Seed the global generators of the CPU."""
    torch.default_generator.manual_seed(seed)
    random.seed(seed)
    np.random.seed(seed % (1 << 32))
