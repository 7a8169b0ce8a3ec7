"""The runs that faults are caused in: what is set, and for how long their bits must be the same."""

from __future__ import annotations

import random
from dataclasses import replace
from functools import cache
from typing import Literal, NamedTuple

from benchmarks.seeded import script
from fedwan.app import complete, load_run, load_strategy
from fedwan.config import Config
from fedwan.errors import ConfigError
from fedwan.state import layout_of
from fedwan.strategy import Strategy

SGD = " ".join(
    f"inner.{network}.name=sgd inner.{network}.lr=0.05 inner.{network}.beta1=0.9"
    for network in script.KINDS
)
MOMENTUM = " ".join(f"outer.{network}.momentum=0.5" for network in script.KINDS)


class Scenario(NamedTuple):
    """Settings of a run, and how long its bits are those of the undisturbed one."""

    words: str
    same_bits: Literal["always", "until a death", "never"]


SCENARIOS = {
    "diloco": Scenario("h=2 strategy=diloco codec.up=fp32", "always"),
    "diloco int2": Scenario("h=2 strategy=diloco codec.up=int2 codec.down=int2", "always"),
    "scaffnew": Scenario(
        "h=2 strategy=scaffnew codec.up=int4 codec.down=int4 " + MOMENTUM,
        "always",
    ),
    "scaffnew own h": Scenario(
        "h=2 strategy=scaffnew codec.down=int4 network.discriminator.h=1", "until a death"
    ),
    "sync": Scenario("strategy=sync steps=12 " + SGD, "until a death"),
    "streaming": Scenario(
        "strategy=streaming_diloco stream.fragments=2 stream.tau=1 h=4 codec.up=int4",
        "until a death",
    ),
    "eager": Scenario("h=2 strategy=eager_diloco codec.up=int4", "until a death"),
    "quorum": Scenario("h=2 strategy=diloco codec.up=int2 codec.down=int4 round.quorum=2", "never"),
    "sync quorum": Scenario("strategy=sync steps=12 round.quorum=2 " + SGD, "never"),
    "streaming quorum": Scenario(
        "strategy=streaming_diloco stream.fragments=2 stream.tau=1 h=2 codec.up=int4 "
        "codec.down=int4 round.quorum=2",
        "never",
    ),
    "async": Scenario("h=2 strategy=async_diloco codec.up=int4", "never"),
    "one site": Scenario("sites=1 h=2 strategy=diloco codec.up=topk2 codec.down=int4", "always"),
    "own h": Scenario(
        "h=2 strategy=diloco codec.up=int2 network.discriminator.h=1", "until a death"
    ),
    "own pace": Scenario("h=4 strategy=async_diloco codec.up=int4 round.least_steps=1", "never"),
    "masked": Scenario("h=2 strategy=diloco codec.up=masked4 codec.down=int4", "always"),
    "masked quorum": Scenario("h=2 strategy=diloco codec.up=masked4 round.quorum=2", "never"),
}


DRAWN = "drawn"
"""Beside them: settings that nobody chose, drawn by the seed."""
TURNS = (*SCENARIOS, DRAWN)
STRATEGIES = (
    *("diloco", "local_sgd", "scaffnew", "sparse_loco", "streaming_diloco", "eager_diloco"),
    *("async_diloco", "parameter_server", "sync"),
)
MOST_DRAWN = 5
_CHOICES = {
    "h": (1, 3, 4),
    "sites": (1, 2, 3, 4),
    "codec.up": ("bf16", "int8", "int4", "int2", "topk2", "masked4"),
    "codec.down": ("bf16", "int8", "int4", "int2"),
    "round.quorum": (1, 2, 3),
    "round.max_staleness": (1, 2),
    "round.least_steps": (1, 2),
    "round.merge": ("median", "trimmed_mean", "centered_clip"),
    "stream.fragments": (1, 2, 3),
    "stream.tau": (0, 1, 2),
    "network.discriminator.h": (1, 2, 4, 8),
    "checkpoint.every": (2, 3),
    "inner.generator.state": (f"average {SGD}",),
}


def draw(seed: int) -> str:
    """Words of a run: a strategy, and of some settings those that fit what was drawn before."""
    drawn = random.Random(f"scenario {seed}")
    name = drawn.choice(STRATEGIES)
    words = f"strategy={name} {SGD if name in ('sync', 'parameter_server') else 'h=2'}"
    for key in drawn.sample(sorted(_CHOICES), MOST_DRAWN):
        try:
            _build(more := f"{words} {key}={drawn.choice(_CHOICES[key])}")
        except ConfigError:
            continue
        words = more
    return f"{DRAWN}: {words}"


@cache
def find(scenario: str) -> Scenario:
    """By its name, or of the words that were drawn."""
    if scenario in SCENARIOS:
        return SCENARIOS[scenario]
    words = scenario.removeprefix(f"{DRAWN}: ")
    config, strategy, num_fragments = _build(words)
    if strategy.clock == "samples" or strategy.policy.quorum < strategy.policy.num_sites:
        return Scenario(words, "never")
    is_kept = strategy.repeats(num_fragments) and config.checkpoint.every == 1
    return Scenario(words, "always" if is_kept else "until a death")


def _build(words: str) -> tuple[Config, Strategy, int]:
    """With the number of fragments."""
    config = complete(_load(words), script.KINDS, 0)  # type: ignore[arg-type]
    strategy = load_strategy(config.strategy).build(config)
    return config, strategy, len(strategy.fragments(layout_of(script.networks_of(config))))


@cache
def configure(scenario: str, more_sites: int = 0) -> Config:
    config = _load(find(scenario).words)
    return replace(config, sites=config.num_sites + more_sites) if more_sites else config


def _load(words: str) -> Config:
    steps = "workload=command sites=3 steps=24 checkpoint.every=1 eval.every=16"
    return load_run(None, f"{steps} {words}".split())
