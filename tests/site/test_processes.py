"""A site of several processes, which all run its script (SPMD)."""

from __future__ import annotations

import functools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn

from fedwan.errors import CheckpointError
from tests.site.support import (
    CUTS,
    Ended,
    Failure,
    Processes,
    Ran,
    asked,
    at_site,
    network,
    take_steps,
)

pytestmark = pytest.mark.slow  # each starts processes of its own, or waits for some

STRATEGIES = [
    "strategy=local_sgd codec.up=topk2",
    "strategy=diloco",
    "strategy=streaming_diloco stream.tau=2 codec.up=int4",
    "strategy=eager_diloco stream.tau=2 outer.net.momentum=0.5",
    "strategy=scaffnew sites=2 codec.up=int4",
    "strategy=sparse_loco",
    "strategy=async_diloco codec.up=topk2",
    "strategy=sync sites=2 codec.up=bf16",
    "strategy=parameter_server",
]


def together(pair: Processes, folder: Path, words: str, way: str = "plain") -> list[Ran]:
    script = functools.partial(take_steps, way)
    ran = pair.run(at_site, asked(*words.split()), folder, script)
    assert all(isinstance(one, Ran) for one in ran), ran
    return ran


def apart(folder: Path, words: str) -> Ran:
    return at_site(asked(*words.split()), folder, take_steps)


def distance(a: Ran, b: Ran) -> float:
    return max(float((a.state[name] - b.state[name]).abs().max()) for name in a.state)


@pytest.mark.parametrize(
    ("words", "way"), [(words, CUTS[index % len(CUTS)]) for index, words in enumerate(STRATEGIES)]
)
def test_processes_that_take_the_same_steps_end_on_the_bits_of_one_and_cut_ones_on_the_same(
    words: str, way: str, pair: Processes, tmp_path: Path
) -> None:
    one = apart(tmp_path / "one", words)
    first, second = together(pair, tmp_path / "two", words)
    assert first.sha256 == one.sha256 == {second.ended.sha256}
    first, second = together(pair, tmp_path / "cut", words, way)
    assert first.sha256 == {second.ended.sha256}


@pytest.mark.parametrize("way", CUTS)
def test_every_way_of_cutting_a_network_trains_like_one_process(
    way: str, pair: Processes, tmp_path: Path
) -> None:
    one = apart(tmp_path / "one", "strategy=diloco sites=2")
    first, second = together(pair, tmp_path / "two", "strategy=diloco sites=2", way)
    assert first.sha256 == {second.ended.sha256}
    assert 0 < distance(first, one) < 1e-6


# What they must have alike -----------------------------------------------------------------------


def other_weights() -> Ended:
    return take_steps(seed=dist.get_rank())


def other_layers() -> Ended:
    net = network(depth=4 + dist.get_rank())
    return take_steps(networks={"net": net}, optimizers={"net": torch.optim.SGD(net.parameters())})


def other_data() -> Ended:
    """Gradients that nobody averages."""
    return take_steps(batches=dist.get_rank())


@pytest.mark.parametrize(
    ("script", "text"),
    [
        (other_weights, "initial weights differ between processes"),
        (other_layers, "networks differ between processes"),
        (other_data, "weights differ between processes"),  # found at the next checkpoint
    ],
)
def test_processes_that_differ_are_refused_with_both_hashes(
    script: Any, text: str, pair: Processes, tmp_path: Path
) -> None:
    for outcome in pair.run(at_site, asked(), tmp_path, script):
        assert isinstance(outcome, Failure) and outcome.error == "UserError", outcome
        assert text in outcome.text and "\n" not in outcome.text
        assert len(set(re.findall(r"\b[0-9a-f]{16}\b", outcome.text))) == 2


# What the coordinator asks -----------------------------------------------------------------------


def measured() -> tuple[Ended, list[float]]:
    """A script whose evaluation and samples need every process."""
    seen: list[float] = []
    nets: list[nn.Module] = []

    def evaluate(seed: int) -> dict[str, float]:
        x = torch.randn(4, 16, generator=torch.Generator().manual_seed(seed))
        seen.append(float(nets[0](x).square().mean()))
        return {"fd": seen[-1], "fd_floor": 0.0}

    def sample(num: int, seed: int) -> torch.Tensor:
        out: torch.Tensor = nets[0](torch.zeros(num, 16)).view(num, 1, 4, 4)
        return out

    return take_steps("fsdp", evaluate=evaluate, sample=sample, keep=nets.append), seen


def test_all_processes_measure_and_go_on_as_if_they_had_not(
    pair: Processes, tmp_path: Path
) -> None:
    words = "strategy=diloco h=2"
    plain = together(pair, tmp_path / "a", words, "fsdp")
    ran = pair.run(at_site, asked(*words.split(), "eval.every=2"), tmp_path / "b", measured)
    figures = [one.ended[1] for one in ran]
    assert len(figures[0]) >= 3 and figures[0] == figures[1]
    rows = [row["fd"] for row in ran[0].records if row["kind"] == "quality"]
    assert rows == figures[0]
    assert ran[0].ended[0].sha256 == plain[0].ended.sha256


def test_a_stop_ends_all_processes(pair: Processes, tmp_path: Path) -> None:
    stopped = functools.partial(take_steps, stop_at=3)
    outcomes = pair.run(at_site, asked("steps=400"), tmp_path, stopped)
    assert [outcome.error for outcome in outcomes] == ["RunStopped"] * 2
    assert all("enough" in outcome.text for outcome in outcomes)


# Checkpoints -------------------------------------------------------------------------------------


def test_a_checkpoint_of_two_processes_is_refused_by_another_number(
    pair: Processes, tmp_path: Path
) -> None:
    together(pair, tmp_path, "strategy=diloco", "fsdp")
    with pytest.raises(CheckpointError, match=r"of 2 processes, this site has 1; start as many"):
        apart(tmp_path, "strategy=diloco")
