"""Merging that bears contributions which lie.

Flower's median, trimmed mean and krum are oracles. Its `bulyan` is none: no rule here chooses
n - 2 b contributions by krum, one after the other, and then for each value the n - 4 b of these
that are nearest to their median; without bad sites it is the mean.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from flwr.server.strategy import aggregate as flower
from torch import Tensor

from fedwan.codecs import Codec, Plain, Reading, fp32, int4, plain
from fedwan.coordinator.robust import RobustMerger, Rule, krum_choice
from fedwan.link.buffer import FileBuffer
from fedwan.state import Layout, Role, State
from tests.support import (
    RewritingLink,
    read_all,
    run_tiny,
    same_bits,
    spec,
    tiny_config,
)

LAYOUT: Layout = {
    "d/weight": spec((5,)),
    "g/bn.num_batches_tracked": spec((), Role.COUNTER, torch.int64),
    "g/bn.running_mean": spec((4,), Role.MEAN),
    "g/bn.running_var": spec((4,), Role.VARIANCE),
    "g/first": spec((2, 3)),
    "g/weight": spec((4, 3)),
}
PARAMETERS = [name for name, spec in LAYOUT.items() if spec.role is Role.PARAMETER]
RULES: list[Rule] = ["trimmed_mean", "median", "centered_clip", "krum", "closest"]
every_rule = pytest.mark.parametrize("rule", RULES)
HUGE = 1e17


def contribution(seed: int) -> State:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.tensor(100 + seed % 3)
        if spec.role is Role.COUNTER
        else torch.rand(spec.shape, generator=generator)
        for name, spec in LAYOUT.items()
    }


def of_length_one(state: State) -> State:
    """With the parameters of each network."""
    scaled = dict(state)
    for network in ("d", "g"):
        names = [name for name in PARAMETERS if name.startswith(network)]
        length = torch.cat([state[n].flatten() for n in names]).norm()
        scaled.update({n: state[n] / length for n in names})
    return scaled


def hostile(value: float) -> State:
    return {
        name: torch.full(spec.shape, abs(value) if spec.role is Role.VARIANCE else value).to(
            spec.dtype
        )
        for name, spec in LAYOUT.items()
    }


def merge(states: Sequence[State], rule: Rule, bad: int = 1, layout: Layout = LAYOUT) -> State:
    merger = RobustMerger(layout, rule, bad)
    for state in states:
        merger.add(plain(state).items())
    return merger.take()


def results(states: Sequence[State], network: str) -> list[tuple[list[np.ndarray], int]]:
    return [
        ([v.numpy() for n, v in state.items() if n.startswith(network) and "bn" not in n], 1)
        for state in states
    ]


FLOWER: list[tuple[Rule, int, int, Callable[[Any], Any]]] = [
    *(("median", num, 1, flower.aggregate_median) for num in (3, 4, 11)),
    *(
        ("trimmed_mean", num, bad, partial(flower.aggregate_trimmed_avg, proportiontocut=share))
        for num, bad, share in ((3, 1, 0.34), (4, 1, 0.26), (10, 2, 0.21), (11, 5, 0.46))
    ),
    *(
        ("krum", n, b, partial(flower.aggregate_krum, num_malicious=b, to_keep=n - b - 2))
        for n, b in ((5, 1), (7, 2), (10, 3))
    ),
    *(
        ("closest", n, b, partial(flower.aggregate_krum, num_malicious=b - 1, to_keep=n - b))
        for n, b in ((3, 1), (4, 1), (10, 2))
    ),
]


@pytest.mark.parametrize(("rule", "num", "bad", "theirs"), FLOWER)
def test_rules_are_flower_s_network_by_network(
    rule: Rule, num: int, bad: int, theirs: Callable[[Any], Any]
) -> None:
    states = [of_length_one(contribution(seed)) for seed in range(num)]
    merged = merge(states, rule, bad)
    for network in ("d", "g"):
        mine = results([merged], network)[0][0]
        for ours, expected in zip(mine, theirs(results(states, network)), strict=True):
            np.testing.assert_allclose(ours, expected, rtol=0 if rule == "median" else 1e-6)


def test_krum_keeps_the_first_of_equal_ones_in_site_order() -> None:
    assert krum_choice(torch.zeros(5, 5, dtype=torch.float64), bad=1) == [0, 1]
    assert krum_choice(torch.zeros(2, 2, dtype=torch.float64), bad=1) == [0, 1]


def test_centered_clip_is_its_equation() -> None:
    states = [*(contribution(seed) for seed in range(3)), hostile(50.0)]
    merged = merge(states, "centered_clip")
    rows = torch.stack([torch.cat([s["g/first"].view(-1), s["g/weight"].view(-1)]) for s in states])
    centre = rows.quantile(0.5, dim=0)
    apart = rows - centre
    distances = apart.norm(dim=1)
    radius = distances.sort().values[2]
    expected = centre + (apart * (radius / distances).clamp(max=1.0)[:, None]).mean(0)
    got = torch.cat([merged["g/first"].view(-1), merged["g/weight"].view(-1)])
    torch.testing.assert_close(got, expected)


@every_rule
@pytest.mark.parametrize(("value", "place"), [(HUGE, 0), (-HUGE, 2), (3e38, 4), (1000.0, 2)])
def test_one_that_lies_moves_nothing_out_of_the_honest_ones_range(
    rule: Rule, value: float, place: int
) -> None:
    honest = [contribution(seed) for seed in range(4)]
    states = honest[:place] + [hostile(value)] + honest[place:]
    merged = merge(states, rule)
    for name, found in merged.items():
        rows = torch.stack([state[name] for state in honest])
        least, most = rows.amin(0), rows.amax(0)
        if LAYOUT[name].role is Role.VARIANCE:  # of all data: those of a site, and between sites
            most = most + 1.0
        if rule == "centered_clip" and LAYOUT[name].role is Role.PARAMETER:
            # By network: up to a fifth of the largest honest distance, which is below 5.
            least, most = least - 1.0, most + 1.0
        assert bool((found >= least).all() and (found <= most).all()), name


@pytest.mark.parametrize("length", [1e-30, 0.1, 1.0, 1e6])
def test_closest_leaves_out_what_points_the_other_way_however_short(length: float) -> None:
    states = [contribution(seed) for seed in range(4)]
    total = {name: torch.stack([state[name] for state in states]).sum(0) for name in PARAMETERS}
    liar = states[0] | {name: value * -0.25 * length for name, value in total.items()}
    merged = merge([*states, liar], "closest")
    for name, value in total.items():
        torch.testing.assert_close(merged[name], value / 4)


def test_variances_are_total_ones_around_the_robust_mean() -> None:
    layout = {n: s for n, s in LAYOUT.items() if s.role in (Role.MEAN, Role.VARIANCE)}
    states = [{n: torch.full((4,), v) for n in layout} for v in (1.0, 2.0, 3.0, 9.0)]
    merged = merge(states, "trimmed_mean", layout=layout)
    # Means 1, 2, 3, 9 give 2.5; variances with squared distances 3.25, 2.25, 3.25, 51.25.
    assert merged["g/bn.running_mean"].tolist() == [2.5] * 4
    assert merged["g/bn.running_var"].tolist() == [3.25] * 4


@every_rule
def test_fewer_than_the_rule_needs_are_merged_as_their_number_bears(rule: Rule) -> None:
    assert same_bits(merge([contribution(3)], rule), contribution(3))
    states = [contribution(seed) for seed in range(2)]
    expected = (states[0]["g/weight"] + states[1]["g/weight"]) / 2
    torch.testing.assert_close(merge(states, rule, bad=3)["g/weight"], expected)


@every_rule
@pytest.mark.parametrize("codec", [fp32(), int4()], ids=lambda codec: codec.name)
def test_coded_contributions_in_files_merge_as_decoded_ones(
    rule: Rule, codec: Codec, tmp_path: Path
) -> None:
    decoded, coded = RobustMerger(LAYOUT, rule, 1), RobustMerger(LAYOUT, rule, 1)
    for seed in range(5):
        payload, _ = codec.encode(contribution(seed), {}, LAYOUT)
        file = FileBuffer(payload.num_bytes, tmp_path)
        file.write(0, read_all(payload))
        decoded.add(plain(codec.decode(payload, LAYOUT)).items())
        coded.add(Reading(codec, file, LAYOUT))
    merged = coded.take()
    assert same_bits(merged, decoded.take()) and list(merged) == list(LAYOUT)


@every_rule
def test_each_tensor_is_decoded_once_for_all_contributions_and_let_go_before_the_next(
    rule: Rule,
) -> None:
    decoded: dict[str, int] = {}
    alive: list[weakref.ref[Tensor]] = []

    class Counted(Plain):
        def __init__(self, name: str, value: Tensor) -> None:
            super().__init__(value)
            self._name = name

        def tensor(self) -> Tensor:
            value = self._value.clone()
            alive[:] = [ref for ref in alive if ref() is not None] + [weakref.ref(value)]
            assert len(alive) <= 5
            decoded[self._name] = decoded.get(self._name, 0) + 1
            return value

    merger = RobustMerger(LAYOUT, rule, 1)
    for seed in range(5):
        merger.add([(name, Counted(name, value)) for name, value in contribution(seed).items()])
    merger.take()
    assert decoded == dict.fromkeys(LAYOUT, 5)


def worse(header: Any, name: str, value: Tensor, role: Role) -> Tensor:
    """Another value than the site computed."""
    if role is Role.COUNTER:
        return value + 1_000  # more is refused
    return value * -1e4 if role is Role.PARAMETER else value + 1e6


def ran(folder: Path, strategy: str, rule: str, *hostile: str) -> State:
    h = 1 if strategy == "sync" else 4
    gate = {} if strategy == "sync" else {"gate": 0.0}  # it would refuse what the rules bear
    sections: dict[str, Any] = {"round": {"merge": rule, **gate}}
    if strategy == "streaming_diloco":
        sections["stream"] = {"fragments": 2, "tau": 1}
    run = run_tiny(
        folder,
        tiny_config(strategy, sites=5, h=h, steps=3 * h, **sections),
        norm=True,
        wrap=lambda name, link: RewritingLink(link, worse) if name in hostile else link,  # type: ignore[arg-type,return-value]
    )
    assert len(run.hashes) == 1
    return run.state


@pytest.fixture(scope="module")
def clean(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], State]:
    """Of a strategy, what sites end with that merge by the mean, and of which none is hostile."""
    return cache(lambda strategy: ran(tmp_path_factory.mktemp("clean"), strategy, "mean"))


@pytest.mark.parametrize(
    ("strategy", "rule"),
    [
        *(("diloco", rule) for rule in RULES),
        pytest.param("streaming_diloco", "centered_clip", marks=pytest.mark.slow),
        ("sync", "trimmed_mean"),
    ],
)
def test_a_run_with_a_hostile_site_ends_near_one_without(
    strategy: str, rule: str, clean: Callable[[str], State], tmp_path: Path
) -> None:
    robust = ran(tmp_path / "robust", strategy, rule, "s3")
    assert apart(robust, clean(strategy)) < 3
    if rule == "median":
        assert same_bits(ran(tmp_path / "again", strategy, rule, "s3"), robust)
        assert apart(ran(tmp_path / "mean", strategy, "mean", "s3"), clean(strategy)) > 10


def apart(one: State, other: State) -> float:
    return max(float((one[name].double() - other[name]).abs().max()) for name in one)


def test_closest_leaves_out_zeros_before_those_that_have_little_in_common() -> None:
    layout: Layout = {"g/w": spec((4,))}
    states = [{"g/w": torch.eye(4)[i] + 0.3} for i in range(3)] + [{"g/w": torch.zeros(4)}]
    assert torch.allclose(
        merge(states, "closest", 1, layout)["g/w"], sum(state["g/w"] for state in states) / 3
    )


@every_rule
def test_buffers_of_64_bits_keep_them(rule: Rule) -> None:
    layout: Layout = {"g/seen": spec((), Role.MEAN, torch.float64), "g/w": spec((2,))}
    large = torch.tensor(2.0**25 + 1, dtype=torch.float64)
    states = [{"g/seen": large, "g/w": torch.ones(2)}] * 3
    merged = merge(states, rule, 1, layout)
    assert float(merged["g/seen"]) == float(large)
    assert merged["g/w"].dtype == torch.float32
