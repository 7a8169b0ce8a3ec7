"""The settings that a plan compares: strategies, codecs and H that make sense together.

Recipes are asked what they are, never known by name: `resolve` and `build` of each strategy fill in
and refuse as they do for a run. What the user has settled is kept; for the rest

    H           10 to 100; 1 where gradients are exchanged
    codecs      the same both ways; a strategy with error feedback its own; gradients exactly or in
                bf16, since nothing coarser was tried
    fragments   10 where a strategy streams, as the benchmarks have
    τ           left open: `fedwan.planner.predict` finds the shortest that serves
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, replace
from types import ModuleType

from fedwan.app import load_strategy, strategy_names
from fedwan.config import CodecConfig, Config, StreamConfig
from fedwan.errors import ConfigError
from fedwan.fragments import most_fragments
from fedwan.planner.question import ALL, Question
from fedwan.recipes import resolve_strategy
from fedwan.strategy import Strategy

__all__ = ["Candidate", "candidates", "with_tau"]

HS = (10, 20, 50, 100)
CODECS = ("fp32", "bf16", "int8", "int4")
"""float4 has int4's size and takes longer: only where it is asked for."""
GRADIENT_CODECS = ("fp32", "bf16")
FRAGMENTS = 10


@dataclass(frozen=True)
class Candidate:
    """One setting that would run."""

    config: Config
    """Resolved by the strategy's recipe."""
    strategy: Strategy
    num_fragments: int
    is_tau_open: bool
    """Whether τ may still be chosen."""


def candidates(question: Question) -> list[Candidate]:
    """All that could be run.

    Raises:
        ConfigError: there is none; what was wrong with the first, and the nearest that works.
    """
    config = question.config
    names = strategy_names() if config.strategy == ALL else [config.strategy]
    found: list[Candidate] = []
    errors: dict[str, ConfigError] = {}  # of each strategy the last: that of the largest H
    for name in names:
        recipe = load_strategy(name)
        plain = _open_config(question, name)
        try:
            kind, _ = _build(recipe, plain, question)
        except ConfigError as error:
            errors[name] = error
            continue
        if question.settles("stream") and not kind.overlap.tau and config.strategy == ALL:
            continue  # it would refuse them, which is no answer to somebody who wants to stream
        for settings in _variants(question, plain, kind):
            try:
                found.append(_candidate(recipe, settings, question))
            except ConfigError as error:
                errors[name] = error
    if found:
        return found
    if errors:
        raise next(iter(errors.values()))
    raise ConfigError("no strategy here streams, so that stream.* has no effect; leave it out")


def with_tau(candidate: Candidate, question: Question, tau: int) -> Candidate:
    """The same with another τ."""
    config = replace(candidate.config, stream=replace(candidate.config.stream, tau=tau))
    return _candidate(load_strategy(config.strategy), config, question)


def _open_config(question: Question, strategy: str) -> Config:
    """The user's settings with everything open that was not settled."""
    config = copy.deepcopy(question.config)
    config.strategy = strategy
    config.h, config.stream, config.steps = 0, StreamConfig(), 0
    if not question.settles("outer"):
        config.outer = {}
    config.checkpoint.every = 0
    for key in vars(CodecConfig()):
        if f"codec.{key}" not in question.named:
            setattr(config.codec, key, "")
    return config


def _variants(question: Question, plain: Config, kind: Strategy) -> Iterator[Config]:
    given = question.config
    sends_gradients = kind.contributes == "gradient"
    hs = (given.h,) if "h" in question.named else (0,) if sends_gradients else HS
    for up, down in _codec_pairs(question, kind):
        for h in hs:
            config = copy.deepcopy(plain)
            config.h, config.codec.up, config.codec.down = h, up, down
            config.steps = _whole_rounds(question, h)
            config.stream = _stream(question, h, bool(kind.overlap.tau))
            yield config


def _codec_pairs(question: Question, kind: Strategy) -> list[tuple[str, str]]:
    """Up and down."""
    named = question.named
    own = kind.up.name, kind.down.name  # what is settled, and the strategy's own for the rest
    compared = GRADIENT_CODECS if kind.contributes == "gradient" else CODECS
    if "codec.down" in named or ("codec.up" not in named and kind.up.has_feedback):
        is_open = "codec.up" not in named and not kind.up.has_feedback
        return [(up, own[1]) for up in (compared if is_open else own[:1])]
    if kind.up.has_feedback:  # settled, and good for the way up alone
        return [(own[0], down) for down in compared]
    return [(up, up) for up in (own[:1] if "codec.up" in named else compared)]


def _whole_rounds(question: Question, h: int) -> int:
    """As many steps as asked for, rounded up to whole rounds unless the user settled both."""
    steps = question.num_steps
    if {"h", "steps"} <= question.named:
        return steps
    return -(-steps // max(1, h)) * max(1, h)


def _stream(question: Question, h: int, streams: bool) -> StreamConfig:
    stream = copy.copy(question.config.stream)
    for key, value in vars(StreamConfig()).items():
        if f"stream.{key}" not in question.named:
            setattr(stream, key, value)
    if streams and "stream.fragments" not in question.named:
        stream.fragments = min(FRAGMENTS, h or 1, max(1, most_fragments(question.layout)))
    return stream


def _build(recipe: ModuleType, config: Config, question: Question) -> tuple[Strategy, Config]:
    """The strategy, and these settings with the rest filled in by its recipe."""
    config = copy.deepcopy(config)
    resolve_strategy(recipe, config, question.networks)
    return recipe.build(config), config


def _candidate(recipe: ModuleType, config: Config, question: Question) -> Candidate:
    strategy, config = _build(recipe, config, question)
    return Candidate(
        config,
        strategy,
        len(strategy.fragments(question.layout)),
        is_tau_open=bool(strategy.overlap.tau) and "stream.tau" not in question.named,
    )
