"""The processes of one site, which all run the training script (SPMD), as torchrun started them.

Rank 0 alone speaks to the coordinator. What it learns there decides what all of them do next, so it
tells the others; every process then does the same to its own part of the networks. All methods but
`rank` and `size` are collective: every process calls them in the same order.
"""

from __future__ import annotations

import datetime
import os
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import Future, wait
from dataclasses import dataclass
from typing import Any, TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError, UserError
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Delivery
from fedwan.link.buffer import Buffer

T = TypeVar("T")

TIMEOUT = datetime.timedelta(minutes=10)
"""Of every collective, beside the patience with which rank 0 tries to reach the coordinator."""
WAKE_S = 2.0
SAME = (
    "build the same networks under the same seed in every process, and have their gradients "
    "averaged (DDP, FSDP)"
)
"""The mend where processes differ in what they train."""
_MOST_SHOWN = 16


@dataclass
class Group:
    """A site's process group; one process by itself if nothing else is said."""

    rank: int = 0
    size: int = 1
    handle: Any = None
    """Torch's."""

    def lead(self, call: Callable[[], T]) -> T:
        """What a call returns at rank 0, told to all; an error of it is raised at all."""
        if self.size == 1:
            return call()
        failure: BaseException | None = None
        box: list[Any] = [None]
        if self.rank == 0:
            try:
                box = [(call(), None)]
            except BaseException as error:
                failure = error
                known = error if isinstance(error, FedwanError) else RuntimeError(repr(error))
                box = [(None, known)]
        torch.distributed.broadcast_object_list(box, src=0, group=self.handle)
        value, told = box[0]
        if told is not None:
            raise failure or told
        return cast(T, value)

    def lead_long(self, call: Callable[[], T]) -> T:
        """As `lead`, where the call may take longer than a collective: the others hear of it."""
        if self.size == 1:
            return call()
        found: Future[T] = Future()
        if self.rank == 0:
            threading.Thread(target=_fulfil, args=(found, call), daemon=True).start()
        while not self.lead(lambda: bool(wait([found], WAKE_S).done)):
            pass
        return self.lead(lambda: found.result())

    def spread(self, value: Tensor | None, shape: Iterable[int], dtype: torch.dtype) -> Tensor:
        """A tensor of rank 0 at all ranks, in host memory where there are several."""
        if self.rank:
            value = torch.empty(tuple(shape), dtype=dtype)
        assert value is not None
        if self.size == 1:
            return value
        sent = value.detach().to("cpu", dtype).contiguous()
        # As bytes: gloo does not know all dtypes.
        torch.distributed.broadcast(sent.view(-1).view(torch.uint8), src=0, group=self.handle)
        return sent

    def share(self, call: Callable[[], Delivery]) -> Delivery:
        """A download that rank 0 has, with its payload, at all ranks."""
        if self.size == 1:
            return call()
        had: list[Delivery] = []

        def head() -> tuple[wire.DownloadHeader, int | None]:
            had.append(call())
            header, payload = had[0]
            return header, None if payload is None else payload.num_bytes

        header, num_bytes = self.lead(head)
        if num_bytes is None:
            return Delivery(header, None)
        payload: Source = (had[0].payload if had else None) or Buffer(num_bytes)
        if num_bytes:
            block = np.frombuffer(payload.read(0, num_bytes), np.uint8)
            sent = block if block.flags.writeable else block.copy()
            torch.distributed.broadcast(torch.from_numpy(sent), src=0, group=self.handle)
        return Delivery(header, payload)

    def collect(self, value: T) -> list[T]:
        """The value of every rank, in rank order, at all ranks; values can be pickled."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        torch.distributed.all_gather_object(values, value, group=self.handle)
        return values

    def agree(self, what: str, text: str, mend: str = SAME) -> None:
        """Refuse to go on where ranks have another text than rank 0."""
        texts = self.collect(text)
        others = [rank for rank, other in enumerate(texts) if other != texts[0]]
        if others:
            mine, theirs = texts[0][:_MOST_SHOWN], texts[others[0]][:_MOST_SHOWN]
            raise UserError(
                f"{what} differ between processes of this site: rank 0 has {mine}, rank "
                f"{others[0]} {theirs}; {mend}"
            )

    def close(self) -> None:
        """End the group's threads: one that still drops a tensor while Python ends aborts it."""
        if self.size > 1:
            torch.distributed.destroy_process_group(self.handle)
            self.handle = None


def _fulfil(found: Future[T], call: Callable[[], T]) -> None:
    try:
        found.set_result(call())
    except BaseException as error:
        found.set_exception(error)


def has_group() -> bool:
    """Whether torch has a process group; a `UserError` if torchrun wants one, and it has not."""
    dist = torch.distributed
    if dist.is_available() and dist.is_initialized():
        return True
    if int(num := os.environ.get("WORLD_SIZE", "1")) > 1:
        raise UserError(
            f"torchrun started {num} processes, but torch has no process group; call "
            "torch.distributed.init_process_group() before fedwan.join"
        )
    return False


def open_group(patience_s: float = 0.0) -> Group:
    """The group of the processes that torchrun started; of this one alone if it did not.

    In a call that rank 0 `lead`s, it may try for `patience_s` to reach the coordinator.
    """
    dist = torch.distributed
    if not has_group() or dist.get_world_size() == 1:
        return Group()
    timeout = TIMEOUT + datetime.timedelta(seconds=patience_s)
    handle = dist.new_group(backend="gloo", timeout=timeout)
    return Group(dist.get_rank(), dist.get_world_size(), handle)
