"""What each process of a site holds under FSDP2."""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import fedwan
from fedwan.site.group import local
from fedwan.site.site import Site
from tests.site.support import WIDTH, Processes, Ran, asked, at_site, cut, network

DEPTH, WIDE = 8, 192
WORDS = "strategy=streaming_diloco h=4 stream.fragments=4 stream.tau=0"


def num_bytes(tensors: Iterable[Tensor]) -> int:
    """Of the storages under this process's pieces, each once."""
    storages = [local(t.detach()).untyped_storage() for t in tensors]
    return sum({s.data_ptr(): s.nbytes() for s in storages}.values())


class Watch(TorchDispatchMode):
    """The most bytes that tensors have at once, besides those that are known."""

    def __init__(self, known: Iterable[Tensor]) -> None:
        super().__init__()
        self._known = {local(t.detach()).untyped_storage().data_ptr() for t in known}
        self._seen: dict[int, StorageWeakRef] = {}
        self.most = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for value in tree_leaves((args, out)):
            if type(value) in (Tensor, nn.Parameter):
                storage = value.untyped_storage()
                if storage.data_ptr() not in self._known:
                    self._seen[storage._cdata] = StorageWeakRef(storage)
        alive = (torch.UntypedStorage._new_with_weak_ptr(r.cdata) for r in self._seen.values())
        self.most = max(self.most, sum(s.nbytes() for s in alive if s is not None))
        return out


def held(way: str) -> dict[str, int]:
    """Bytes of one process between two steps, and the most that a round takes beside them.

    Of three rounds the least: gloo's threads let go of what FSDP2 gathered when they come to it.
    """
    net = cut(network(depth=DEPTH, width=WIDE), way)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3, foreach=False)
    table: dict[str, int] = {}
    watches: list[Watch] = []
    with fedwan.join(networks={"net": net}, optimizers={"net": optimizer}) as site:
        assert isinstance(site, Site)
        for step in site:
            if step % 4 == 0 and watches:
                watches[-1].__exit__(None, None, None)
            if step % 4 == 0 and step >= 4:  # after a round, with all there is
                known = kinds(net, optimizer, site)
                table = {name: num_bytes(tensors) for name, tensors in known.items()}
                watches.append(Watch(t for tensors in known.values() for t in tensors))
                watches[-1].__enter__()
            net(torch.ones(2, WIDTH)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=False)
    watches[-1].__exit__(None, None, None)
    return table | {"passing": min(watch.most for watch in watches)}


def kinds(net: nn.Module, optimizer: torch.optim.Optimizer, site: Site) -> dict[str, list[Tensor]]:
    return {
        "weights": list(net.parameters()),
        "gradients": [p.grad for p in net.parameters() if p.grad is not None],
        "moments": [v for s in optimizer.state.values() for k, v in s.items() if k != "step"],
        "base": list(site.replica.base.values()),
    }


@pytest.mark.slow
@pytest.mark.parametrize("way", ["fsdp", "gradients"])
def test_a_process_holds_its_half_of_everything_and_no_more_than_a_fragment_passes(
    way: str, pair: Processes, tmp_path: Path
) -> None:
    net = network(depth=DEPTH, width=WIDE)
    whole = num_bytes(net.parameters())
    layer = max(num_bytes(m.parameters()) for m in net if isinstance(m, nn.Linear))
    fragment = whole // 4 + layer
    config = asked(*WORDS.split(), "steps=16")
    ran: list[Ran] = pair.run(at_site, config, tmp_path, partial(held, way))
    # Of layers, FSDP2 gathers one while it computes another; `gradients` leaves them gathered.
    passing = fragment + (2 * layer if way == "fsdp" else whole)
    for table in (one.ended for one in ran):
        assert max(table["weights"], table["gradients"], table["base"]) <= whole / 2
        assert table["moments"] <= whole
        assert table["passing"] <= passing
