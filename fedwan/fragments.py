"""Fragments: which tensors travel together, and after which steps.

A part of the generator always travels with its part of the discriminator, so that both networks
carry one version. Each fragment has a version of its own, whatever their number.

A model is cut between modules: a layer's weight, bias and running statistics stay together. The
schedule spreads the fragments over the H steps of a round (Douillard et al. 2025, 2501.18512,
section 3.1): fragment p of P is shifted by p H / P steps. A network that travels more often than
the others, as a small discriminator may, is a fragment of its own, with several versions a round.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from fedwan.state import Layout, Role, network_of


@dataclass(frozen=True)
class Fragment:
    """Named tensors that travel together."""

    index: int
    """Its number on the wire."""
    layout: Layout
    """What it holds, in name order."""
    offset: int = 0
    """Steps by which its uploads are shifted in the schedule, below H."""
    per_round: int = 1
    """Times that it travels in a round; the first fragment of a model travels once."""

    def steps(self, h: int) -> int:
        """Steps between two of its uploads, where a round takes `h`."""
        return h // self.per_round

    @property
    def num_bytes(self) -> int:
        """Bytes of its tensors as fp32 parameters and raw buffers, before any framing."""
        return _num_bytes(self.layout)


Fragmentation = Callable[[Layout], tuple[Fragment, ...]]
"""Cuts a model: fragments in the order of their offsets, each tensor in one of them."""


def whole(layout: Layout) -> tuple[Fragment, ...]:
    """All tensors in one fragment: DiLoCo (2311.08105) and federated averaging."""
    return (Fragment(0, dict(sorted(layout.items()))),)


def strided(most: int, h: int) -> Fragmentation:
    """Modules dealt out in turn, each to the lightest of `most` fragments; rounds take `h` steps.

    So every fragment holds early and late layers, and all weigh about the same: the link is busy
    all the time. A model of fewer modules is cut into as many as its largest network has.
    """

    def cut(layout: Layout) -> tuple[Fragment, ...]:
        networks = sorted(_modules(layout).values(), key=len, reverse=True)
        count = min(most, max(map(len, networks), default=0))
        parts: list[Layout] = [{} for _ in range(count)]
        total = [0] * count
        # The network of most modules first: the others fill up what it left uneven.
        for modules in networks:
            own = [0] * count
            for module in modules:
                index = min(range(count), key=lambda i: (own[i], total[i], i))  # noqa: B023
                parts[index] |= module
                size = max(1, _num_bytes(module))  # of empty tensors, too: none is left without any
                own[index] += size
                total[index] += size
        return tuple(
            Fragment(index, dict(sorted(part.items())), index * h // count)
            for index, part in enumerate(parts)
        )

    return cut


def often(times: Mapping[str, int], rest: Fragmentation) -> Fragmentation:
    """Networks that travel `times` (above 1) a round, those of a kind whole; `rest` cuts others."""

    def cut(layout: Layout) -> tuple[Fragment, ...]:
        slow = {name: spec for name, spec in layout.items() if network_of(name) not in times}
        fragments = list(rest(slow))
        for count in sorted(set(times.values())):
            part = {n: spec for n, spec in layout.items() if times.get(network_of(n)) == count}
            fragments.append(Fragment(len(fragments), dict(sorted(part.items())), per_round=count))
        return tuple(fragments)

    return cut


def _modules(layout: Layout) -> dict[str, list[Layout]]:
    """Each network's modules in natural order, `layer.2` before `layer.10`: their own tensors."""
    found: dict[str, dict[str, Layout]] = {}
    for name, spec in layout.items():
        own = name.partition("|")[0]  # with what travels beside it
        module = own.rpartition(".")[0] or own
        found.setdefault(network_of(name), {}).setdefault(module, {})[name] = spec
    return {
        network: [modules[name] for name in sorted(modules, key=_natural)]
        for network, modules in found.items()
    }


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(p), "") if p.isdigit() else (-1, p) for p in re.split(r"(\d+)", name)]


def _num_bytes(layout: Layout) -> int:
    return sum(
        spec.num_values * (4 if spec.role is Role.PARAMETER else spec.dtype.itemsize)
        for spec in layout.values()
    )


# The schedule ------------------------------------------------------------------------------------


def due_step(fragment: Fragment, version: int, h: int, num_steps: int) -> int:
    """The completed step after which the contribution to a version leaves.

    Every fragment has `num_steps / h` versions for each time that it travels in a round: the first
    comes after its share of `h` steps and its offset, the last one after the last step of the run,
    whatever the offset.

    >>> f = Fragment(1, {}, offset=2)
    >>> [due_step(f, version, h=4, num_steps=12) for version in range(3)]
    [6, 10, 12]
    """
    return min((version + 1) * fragment.steps(h) + fragment.offset, num_steps)


def next_due(
    fragments: Sequence[Fragment], versions: Sequence[int], h: int, num_rounds: int
) -> Fragment:
    """The first fragment of those whose next contribution leaves first.

    The order in which a coordinator takes rounds: with any other it could wait for a contribution
    that waits for the update of another fragment. Beyond the last round, where sites keep their own
    pace, all have one to come.
    """
    to_come = [f for f in fragments if versions[f.index] < num_rounds * f.per_round]

    def due(fragment: Fragment) -> tuple[int, int]:
        return due_step(fragment, versions[fragment.index], h, num_rounds * h), fragment.index

    return min(to_come or fragments, key=due)


def rounds_done(fragments: Iterable[Fragment], versions: Iterable[int]) -> int:
    """Whole rounds that every fragment has had."""
    pairs = zip(fragments, versions, strict=True)
    return min(version // fragment.per_round for fragment, version in pairs)


def reached_step(
    fragments: Iterable[Fragment], versions: Iterable[int], h: int, num_steps: int
) -> int:
    """The step at which a site stands that holds these versions and has taken no step since.

    The latest of those that led to them, but before any whose contribution is still to come.
    """
    held = list(zip(fragments, versions, strict=True))
    latest = max(due_step(f, version - 1, h, num_steps) if version else 0 for f, version in held)
    to_come = [
        due_step(fragment, version, h, num_steps)
        for fragment, version in held
        if version < num_steps // h * fragment.per_round
    ]
    return min([latest, *(step - 1 for step in to_come)])
