"""What sites that lie do to the pictures, under each way to merge.

Digits, iid, H = 20, fp32, whole runs in one process (`fedwan.simulate`); one site of four or two of
ten send something else than what their steps made, from the first round on:

    sign     their own delta, turned round and ten times as long
    large    a million times their own delta
    noise    Gaussian noise, of each tensor ten times the deviation that their own delta has
    alie     the honest sites' mean - 1.5 of their standard deviations, value by value
             (Baruch et al. 2019, 1902.06156), which no honest site is far from
    ipm      minus half of the honest sites' mean (Xie et al. 2019, 1903.03936)

The last two know all honest contributions of the round: worse than any real site. The gate of sizes
is off (`round.gate=0`), so that the merge is all that helps. `none`: nobody lies. A run that
ends before its last step has no distance, and its error under `ended`: values that are not finite.
`--quick`: one seed, a tenth of the steps.
"""

from __future__ import annotations

import argparse
import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.harness.simulated import describe, run_simulated
from benchmarks.harness.table import Row, columns_of, grouped, means
from fedwan.app import load_run, load_strategy
from fedwan.codecs import fp32
from fedwan.codecs.payload import Source
from fedwan.errors import FedwanError
from fedwan.fragments import Fragment
from fedwan.link import wire_pb2 as wire
from fedwan.link.base import Link
from fedwan.rng import derive_seed
from fedwan.state import Role, State, layout_from_json

SEEDS = 5
STEPS = 1000
SITES = {4: 1, 10: 2}
"""And how many of them lie."""
STRATEGIES = ("diloco", "local_sgd", "streaming_diloco")
MERGES = ("mean", "trimmed_mean", "median", "centered_clip", "krum", "closest")
DEVIATIONS = 1.5
PATIENCE_S = 300.0


class Case(NamedTuple):
    workload: str
    strategy: str
    sites: int
    attack: str
    merge: str

    @property
    def bad(self) -> int:
        return SITES[self.sites]

    def __str__(self) -> str:
        return (
            f"{self.workload} {self.strategy} {self.bad} of {self.sites} {self.attack} {self.merge}"
        )


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--steps", type=int, default=STEPS, help="of each site")


def cases(args: argparse.Namespace) -> list[Case]:
    every = itertools.product(("flow", "gan"), STRATEGIES, SITES, ("none", *ATTACKS), MERGES)
    return [case for case in itertools.starmap(Case, every) if _makes_sense(case)]


def _makes_sense(case: Case) -> bool:
    """Whether a way to merge bears so many; of the middle two, median and mean are the same."""
    if case.merge == "krum":
        return case.sites >= 2 * case.bad + 3
    return case.merge != "median" or case.sites - 2 * case.bad > 2


def measure_case(args: argparse.Namespace, case: Case, seed: int) -> Row:
    steps = args.steps // (10 if args.quick else 1)
    merge = "mean" if case.merge == "mean" else f"{case.merge}:{case.bad}"
    words = [
        *(f"workload={case.workload}", f"strategy={case.strategy}", f"sites={case.sites}", "h=20"),
        *(f"steps={steps}", f"seed={seed}", f"round.merge={merge}", "round.gate=0"),
        "eval.every=0",
    ]
    fragments = load_strategy(case.strategy).build(load_run(None, words)).fragments
    others = Others(case.sites - case.bad)

    def wrap(name: str, link: Link) -> Link:
        if case.attack == "none":
            return link
        attack = ATTACKS[case.attack] if int(name[1:]) > case.sites - case.bad else None
        draws = torch.Generator().manual_seed(derive_seed(seed, "byzantine", name))
        return ByzantineLink(link, fragments, others, attack, draws)

    row: Row = columns_of(case, "workload strategy sites bad attack merge")
    row |= {"seed": seed, "steps": steps, "fd": None, "fd_floor": None, "ended": ""}
    try:
        told = describe(*run_simulated(words, wrap_link=wrap))
    except FedwanError as error:
        return row | {"ended": str(error)}
    return row | {key: told[key] for key in ("fd", "fd_floor")}


def summarise(rows: Sequence[Row]) -> Iterator[str]:
    """Of runs that came to their end, and of each case how many did not."""
    names = "workload strategy bad sites attack merge"
    yield from means([row for row in rows if row["fd"] is not None], names, "fd")
    for key, group in grouped(rows, names).items():
        if num := sum(row["fd"] is None for row in group):
            yield f"{', '.join(map(str, key))}: {num} of {len(group)} runs ended before"


# What those that lie send ------------------------------------------------------------------------

Attack = Callable[[Tensor, Tensor, torch.Generator], Tensor]
"""(own delta, those of the honest sites (n, …), draws) -> what is sent, tensor by tensor."""


def _noise(own: Tensor, honest: Tensor, draws: torch.Generator) -> Tensor:
    return torch.randn(own.shape, generator=draws) * (10 * own.square().mean().sqrt())


ATTACKS: dict[str, Attack] = {
    "sign": lambda own, honest, draws: -10 * own,
    "large": lambda own, honest, draws: 1e6 * own,
    "noise": _noise,
    "alie": lambda own, honest, draws: honest.mean(0) - DEVIATIONS * honest.std(0),
    "ipm": lambda own, honest, draws: -0.5 * honest.mean(0),
}


class Others:
    """What the honest sites have sent, by fragment and version."""

    def __init__(self, num: int) -> None:
        self._num = num
        self._sent: dict[tuple[int, int], dict[str, State]] = {}
        self._changed = threading.Condition()

    def note(self, key: tuple[int, int], site: str, state: State) -> None:
        with self._changed:
            self._sent.setdefault(key, {})[site] = state
            for old in [k for k in self._sent if k[0] == key[0] and k[1] < key[1] - 1]:
                del self._sent[old]
            self._changed.notify_all()

    def await_all(self, key: tuple[int, int]) -> list[State]:
        """In site order; a `FedwanError` where they do not come."""
        with self._changed:
            sent = self._sent.setdefault(key, {})
            if not self._changed.wait_for(lambda: len(sent) == self._num, PATIENCE_S):
                raise FedwanError(f"the honest sites have not sent {key}")
            return [sent[site] for site in sorted(sent)]


@dataclass
class ByzantineLink:
    """A site's link; with an attack, contributions leave altered."""

    inner: Link
    fragmentation: Callable[[Any], Sequence[Fragment]]
    others: Others
    attack: Attack | None
    draws: torch.Generator
    site = ""
    fragments: Sequence[Fragment] = ()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def join(self, hello: wire.Hello) -> wire.Welcome:
        self.site = hello.site
        self.fragments = self.fragmentation(layout_from_json(hello.layout_json))
        return self.inner.join(hello)

    def upload(self, header: wire.UploadHeader, payload: Source) -> wire.Receipt:
        if header.kind == wire.UploadHeader.CONTRIBUTION:
            layout, key = self.fragments[header.fragment].layout, (header.fragment, header.version)
            own = fp32().decode(payload, layout)
            if self.attack is None:
                self.others.note(key, self.site, own)
            else:
                honest = self.others.await_all(key)
                for name, spec in layout.items():
                    if spec.role is Role.PARAMETER:
                        rows = torch.stack([state[name] for state in honest])
                        own[name] = self.attack(own[name], rows, self.draws)
                payload, _ = fp32().encode(own, {}, layout)
                header.checksum = payload.checksum
        return self.inner.upload(header, payload)
