"""What the planner's tests share: strategies as their recipes build them, and plain runs."""

from __future__ import annotations

from typing import Any

from fedwan.app import load_strategy
from fedwan.config import Config, LinkConfig, StreamConfig
from fedwan.planner.candidates import Question, synthetic_layout
from fedwan.planner.costs import Costs, Pipe, WireLink, modelled_link
from fedwan.planner.virtual import Course, VirtualRun
from fedwan.recipes import resolve_strategy
from fedwan.state import Layout
from fedwan.strategy import Strategy

LAYOUT = synthetic_layout(100_000)
FAST = WireLink(Pipe(1e9, 0.0), Pipe(1e9, 0.0))


def strategy_of(
    name: str, sites: int, h: int, codec: str = "fp32", stream: tuple[int, int] | None = None
) -> Strategy:
    """A recipe's strategy; `stream` are fragments and tau."""
    config = Config(strategy=name, sites=sites, h=h, steps=8 * h)
    config.codec.up = config.codec.down = codec
    if stream:
        config.stream = StreamConfig(*stream)
    recipe = load_strategy(name)
    resolve_strategy(recipe, config, {"model": "regression"})
    return recipe.build(config)


def course(
    strategy: Strategy,
    sites: int,
    steps: int,
    link: WireLink = FAST,
    layout: Layout = LAYOUT,
    packs: bool = True,
) -> Course:
    """A run in virtual time, of steps of 0.1 s."""
    return VirtualRun(strategy, layout, sites, steps, 0.1, link, Costs(packs=packs)).play()


def question(named: tuple[str, ...] = (), rate_mbit: float = 100.0, **settings: Any) -> Question:
    """About a model of 57.2 million values; settings are those of `Config`."""
    config = Config(**({"strategy": "all", "sites": 4} | settings))
    return Question(
        config,
        frozenset(named),
        synthetic_layout(57_182_660),
        0.1,
        modelled_link(LinkConfig(rate_mbit=rate_mbit, rtt_ms=100.0)),
        config.steps or 10_000,
    )
