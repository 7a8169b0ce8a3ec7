"""The processes of one site, and what they say to each other.

They are joined by torch.distributed: gloo over loopback for tensors in host memory, NCCL between
GPUs. Rank 0 leads: it holds the shard and the link, and the others see neither. A message is a
header in JSON and tensors by name; nothing is unpickled.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from fedwan.state import State

__all__ = ["Team"]

BUCKET_VALUES = 8 << 20
"""Values that are averaged at once, and copied for it."""

# A leader may wait long for its coordinator; a process that dies is noticed at once all the same.
_PATIENCE = timedelta(days=7)


class Team:
    """This process's place among those of its site.

    Args:
        folder: private to the site, the same for all; empty at first.
        rank: 0 of the leader.
        size: number of processes.
        device: of this process.

    Raises:
        RuntimeError: another process ended, from any method.
    """

    def __init__(self, folder: Path, rank: int, size: int, device: torch.device) -> None:
        if Path("/sys/class/net/lo").exists():
            # Not a setting of ours: gloo knows no other way to be told.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        store = dist.FileStore(str(folder / "store"), size)  # type: ignore[attr-defined]
        dist.init_process_group(backend, store=store, rank=rank, world_size=size, timeout=_PATIENCE)
        self.rank = rank
        self.size = size
        self._device = device

    def close(self) -> None:
        """Leave; the others' next call fails."""
        dist.destroy_process_group()

    def tell(self, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Send a message from the leader to all others."""
        text = _text(header, tensors)
        dist.broadcast(torch.tensor([len(text)]), 0)
        dist.broadcast(text, 0)
        self.share(list(tensors.values()))

    def hear(self) -> tuple[dict[str, Any], State]:
        """The leader's next message; waits for it."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.broadcast(size, 0)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.broadcast(text, 0)
        header, tensors = self._open(text)
        self.share(list(tensors.values()))
        return header, tensors

    def send(self, rank: int, header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> None:
        """Send a message to one process, which receives it."""
        text = _text(header, tensors)
        dist.send(torch.tensor([len(text)]), rank)
        dist.send(text, rank)
        for tensor in tensors.values():
            dist.send(tensor.detach().contiguous(), rank)

    def receive(self, rank: int) -> tuple[dict[str, Any], State]:
        """The next message that one process sends to this one; waits for it."""
        size = torch.zeros(1, dtype=torch.int64)
        dist.recv(size, rank)
        text = torch.empty(int(size), dtype=torch.uint8)
        dist.recv(text, rank)
        header, tensors = self._open(text)
        for tensor in tensors.values():
            dist.recv(tensor, rank)
        return header, tensors

    def _open(self, text: Tensor) -> tuple[dict[str, Any], State]:
        """A message's header, and room for its tensors."""
        message = json.loads(bytes(text.numpy()))
        tensors: State = {}
        for name, dtype, shape, kind in message["tensors"]:
            device = self._device if kind == "cuda" else "cpu"
            tensors[name] = torch.empty(shape, dtype=getattr(torch, dtype), device=device)
        return message["header"], tensors

    def share(self, tensors: Sequence[Tensor], rank: int = 0) -> None:
        """Write one process's values, the leader's unless said otherwise, into everybody's."""
        # Broadcast as they lie in memory; others in a copy.
        sent = [tensor.detach().contiguous() for tensor in tensors]
        for work in [dist.broadcast(tensor, rank, async_op=True) for tensor in sent]:
            assert work is not None
            work.wait()
        if self.rank != rank:
            for tensor, value in zip(tensors, sent, strict=True):
                if tensor.data_ptr() != value.data_ptr():
                    tensor.detach().copy_(value)

    def sum(self, tensor: Tensor) -> Tensor:
        """Replace a tensor by its sum over all processes, in place."""
        dist.all_reduce(tensor)
        return tensor

    def mean_at(self, rank: int, tensors: Sequence[Tensor]) -> list[Tensor]:
        """Means over all processes of tensors of one dtype and device, new; none but at a rank."""
        flat = torch.cat([tensor.reshape(-1) for tensor in tensors])
        dist.reduce(flat, rank)
        if self.rank != rank:
            return []
        parts = torch.split(flat.div_(self.size), [tensor.numel() for tensor in tensors])
        return [part.view(tensor.shape) for tensor, part in zip(tensors, parts, strict=True)]

    def average(self, tensors: Sequence[Tensor]) -> None:
        """Replace tensors of one dtype and device by their mean over all processes, in place."""
        bucket: list[Tensor] = []
        for index, tensor in enumerate(tensors):
            bucket.append(tensor)
            is_last = index == len(tensors) - 1
            if is_last or sum(t.numel() for t in bucket) + tensors[index + 1].numel() > (
                BUCKET_VALUES
            ):
                self._average(bucket)
                bucket = []

    def _average(self, bucket: Sequence[Tensor]) -> None:
        flat = torch.cat([tensor.reshape(-1) for tensor in bucket])
        dist.all_reduce(flat)
        flat.div_(self.size)
        parts = torch.split(flat, [tensor.numel() for tensor in bucket])
        for tensor, part in zip(bucket, parts, strict=True):
            tensor.copy_(part.view_as(tensor))

    def agree(self, digest: str) -> bool:
        """Whether all processes call with the same SHA-256, in hex."""
        mine = torch.tensor(list(bytes.fromhex(digest)), dtype=torch.int32)
        least, most = mine.clone(), mine.clone()
        dist.all_reduce(least, dist.ReduceOp.MIN)
        dist.all_reduce(most, dist.ReduceOp.MAX)
        return torch.equal(least, most)


def _text(header: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Tensor:
    """A message but for its tensors' values, as bytes."""
    table = [[name, str(t.dtype)[6:], list(t.shape), t.device.type] for name, t in tensors.items()]
    text = json.dumps({"header": dict(header), "tensors": table}).encode()
    return torch.frombuffer(bytearray(text), dtype=torch.uint8)
