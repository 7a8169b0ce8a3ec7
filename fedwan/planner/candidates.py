"""What a plan is asked, and the settings that it compares: those that make sense together.

Recipes are asked what they are, never known by name: `resolve` and `build` of each strategy fill in
and refuse as they do for a run. What the user has settled is kept; τ is left open.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from fedwan.app import load_strategy, strategy_names
from fedwan.config import CODECS as NAMED
from fedwan.config import CodecConfig, Config, StreamConfig
from fedwan.errors import ConfigError
from fedwan.planner.costs import Costs, WireLink
from fedwan.recipes import resolve_strategy
from fedwan.state import Layout, Role, TensorSpec
from fedwan.strategy import Strategy

ALL = "all"
"""As `strategy`: every one that the app holds."""
NETWORK = "model"
MODULES = 40
"""Of a large model; pix2pix's larger network has 30."""
MOST_VALUES = 1 << 31
"""Of one of them: a payload tells sizes in 32 bits."""
HS = (10, 20, 50, 100)
CODECS = ("fp32", "bf16", "int8", "int4")
GRADIENT_CODECS = ("fp32", "bf16")
"""Nothing coarser was tried."""
FRAGMENTS = 10


@dataclass(frozen=True)
class Question:
    """Everything that predictions depend on; all sites are alike.

    Settings of `config` that `named` lacks are open; time and cost are told for `num_steps`.
    """

    config: Config
    named: frozenset[str]
    layout: Layout
    step_s: float
    link: WireLink
    num_steps: int
    usd_per_gb: float = 0.0
    costs: Costs = field(default_factory=Costs)

    def settles(self, section: str) -> bool:
        """Whether the user has settled anything in a section."""
        return any(key.startswith(f"{section}.") for key in self.named)

    def settled(self, section: str) -> dict[str, Any]:
        """What the user has settled in a section of plain values."""
        values = vars(getattr(self.config, section)).items()
        return {key: value for key, value in values if f"{section}.{key}" in self.named}


def synthetic_layout(num_values: int) -> Layout:
    """Specs of a network with exactly so many values, at least one: layers of equal size.

    More than `MODULES` where a layer would be too large for a payload.
    """
    count = max(1, min(MODULES, num_values), -(-num_values // MOST_VALUES))
    each, rest = divmod(num_values, count)
    sizes = [each + (index < rest) for index in range(count)]
    return {
        f"{NETWORK}/layers.{index:02}.weight": TensorSpec((size,), torch.float32, Role.PARAMETER)
        for index, size in enumerate(sizes)
    }


@dataclass(frozen=True)
class Candidate:
    """One setting that would run."""

    config: Config
    """Resolved by the strategy's recipe."""
    strategy: Strategy
    num_fragments: int

    @property
    def codec(self) -> str:
        """The codec's name, or both."""
        up, down = self.strategy.up.name, self.strategy.down.name
        return up if up == down else f"{up}/{down}"


def candidates(question: Question) -> list[Candidate]:
    """All that could be run; if there is none, a `ConfigError` of what was wrong with the first."""
    config = question.config
    names = strategy_names() if config.strategy == ALL else [config.strategy]
    found: list[Candidate] = []
    errors: dict[str, ConfigError] = {}  # of each strategy the last: that of the largest H
    for name in names:
        plain = _open_config(question, name)
        try:
            kind = candidate(plain, question).strategy
        except ConfigError as error:
            errors[name] = error
            continue
        if config.strategy == ALL:
            if question.settles("stream") and not kind.overlap.tau:
                continue  # it would refuse them: no answer to somebody who wants to stream
            if kind.share or kind.clock == "samples":
                continue  # another model; a pace of their own, where all sites are alike
        elif kind.clock == "samples" or kind.share:
            why = "it is for unequal sites, and a plan takes all to be alike"
            if kind.share:
                why = "each site trains a model of its own, and fetches all of them"
            raise ConfigError(f"strategy = {name!r} cannot be planned: {why}; name another one")
        for settings in _variants(question, plain, kind):
            try:
                found.append(candidate(settings, question))
            except ConfigError as error:
                errors[name] = error
    if not found:
        raise next(iter(errors.values()))
    return found


def candidate(config: Config, question: Question) -> Candidate:
    """These settings with the rest filled in by its recipe; a `ConfigError` if they cannot run."""
    config = copy.deepcopy(config)
    recipe = load_strategy(config.strategy)
    resolve_strategy(recipe, config, {NETWORK: "regression"})
    strategy: Strategy = recipe.build(config)
    return Candidate(config, strategy, len(strategy.fragments(question.layout)))


def _open_config(question: Question, strategy: str) -> Config:
    """The user's settings with everything open that was not settled."""
    config = copy.deepcopy(question.config)
    config.strategy, config.h, config.steps, config.checkpoint.every = strategy, 0, 0, 0
    config.codec = CodecConfig(**question.settled("codec"))
    config.stream = StreamConfig()
    if not question.settles("outer"):
        config.outer = {}
    return config


def _variants(question: Question, plain: Config, kind: Strategy) -> Iterator[Config]:
    sends_gradients = kind.contributes == "gradient"
    settled = (question.config.h,)
    hs = settled if "h" in question.named else (0,) if sends_gradients else HS
    for up, down in _codec_pairs(question, kind):
        for h in hs:
            steps = question.num_steps
            if not {"h", "steps"} <= question.named:  # rounded up to whole rounds
                steps = -(-steps // max(1, h)) * max(1, h)
            stream = StreamConfig(**question.settled("stream"))
            if kind.overlap.tau and "stream.fragments" not in question.named:
                stream.fragments = min(FRAGMENTS, h or 1)
            # A page's own codec has no name among the settings: it is left to the page.
            codec = CodecConfig(*(name if name in NAMED else "" for name in (up, down)))
            yield replace(plain, h=h, steps=steps, codec=codec, stream=stream)


def _codec_pairs(question: Question, kind: Strategy) -> list[tuple[str, str]]:
    """Up and down."""
    is_up, is_down = ("codec.up" in question.named, "codec.down" in question.named)
    up, down = kind.up.name, kind.down.name  # what is settled, and the strategy's own for the rest
    compared = GRADIENT_CODECS if kind.contributes == "gradient" else CODECS
    if kind.up.has_feedback:  # good for the way up alone
        return [(up, other) for other in compared] if is_up and not is_down else [(up, down)]
    if is_down:
        return [(up, down)] if is_up else [(other, down) for other in compared]
    return [(up, up)] if is_up else [(other, other) for other in compared]
