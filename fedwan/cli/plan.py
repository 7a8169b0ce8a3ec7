"""`fedwan plan`: what each strategy, codec and H would do on a link, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from fedwan.cli.arguments import JsonPath, Words, option, write_option
from fedwan.config import MASKED, Config, merge
from fedwan.config_tree import leaves_of, overlay, parse_words
from fedwan.errors import ConfigError
from fedwan.output.units import sites_text

if TYPE_CHECKING:
    from fedwan.planner.candidates import Question

HEEDED = (
    "params step_s usd_per_gb strategy sites steps h codec.up codec.down stream.fragments "
    "stream.tau round.quorum round.patience_s link.rate_mbit link.rtt_ms "
    "link.congestion link.pace_mbit"
)
KEYS = f"Keys: {HEEDED}. A wrong key is refused with the nearest valid one."
"""Below the help."""
SHOWN = 5
"""Rows of the table, unless all are asked for."""
DEFAULT_STEPS = 10_000


@dataclass
class PlanConfig(Config):
    """A run's settings, and those that only a plan has."""

    strategy: str = "all"
    """A recipe in `strategies/`, or `all` of them."""
    params: float = 0.0
    """Values of the model."""
    step_s: float = 0.0
    """Seconds of a step."""
    usd_per_gb: float = 0.0
    """Price of what is sent, either way, for the column of costs; 0 leaves it out."""


def plan(
    words: Words = None,
    link: Annotated[
        Path | None,
        option("--link", "PATH", "The link, as `fedwan doctor link --json PATH` measured it."),
    ] = None,
    json_path: JsonPath = None,
    is_all: Annotated[
        bool, typer.Option("--all", help="Show every setting, not the best.")
    ] = False,
) -> None:
    """Predict utilisation, bytes, time and cost on a link, and recommend a setting.

    Words tell of the model, a step and the link: params=57.2e6 step_s=0.1 sites=4
    link.rate_mbit=100 link.rtt_ms=100

    Words that name a strategy, h, codec.* or stream.* settle it; everything else is compared.
    """
    config, named = _read_settings(words or [], link)
    write_option(json_path)  # told before the work, not after it
    # Imported late, so that a wrong word is told at once.
    from fedwan.link.framing import FAST
    from fedwan.link.measure import read_measurement
    from fedwan.planner.candidates import Question, candidates, synthetic_layout
    from fedwan.planner.costs import Costs, measured_link, modelled_link
    from fedwan.planner.predict import line_of, predict, rank, row_of, table_lines, why, words_of

    found_link = measured_link(read_measurement(link)) if link else modelled_link(config.link)
    question = Question(
        _run_config(config),
        named,
        synthetic_layout(round(config.params)),
        config.step_s,
        found_link,
        config.steps or DEFAULT_STEPS,
        config.usd_per_gb,
        Costs(packs=min(pipe.bytes_per_s for pipe in found_link) < FAST),
    )
    cache: dict[object, Any] = {}
    found = [predict(candidate, question, cache) for candidate in candidates(question)]
    ranked = rank(found, question)
    if not ranked:
        h = found[0].candidate.strategy.h
        raise ConfigError(
            f"every run would stop: {found[0].stopped}, which is all that round.patience_s="
            f"{config.round.patience_s:g} allows, and steps alone take {h * config.step_s:g} s in "
            f"rounds of h={h}; raise it, or lower h"
        )
    typer.echo(f"{_heading(question)}\n")
    typer.echo("\n".join(table_lines(ranked, question, most=0 if is_all else SHOWN)) + "\n")
    typer.echo(f"advice: {why(ranked)}")
    typer.echo(f"coordinator's line: {line_of(ranked[0], question)}")
    typer.echo(f"words: {words_of(ranked[0], question)}")
    rows = [row_of(prediction, question) for prediction in ranked]
    write_option(json_path, "".join(json.dumps(row) + "\n" for row in rows))


def _read_settings(words: list[str], link: Path | None) -> tuple[PlanConfig, frozenset[str]]:
    """The settings, checked, and the keys that are settled."""
    tree = parse_words(words, PlanConfig)
    config = overlay(PlanConfig(), tree)
    # 0 leaves these to the strategy, as if they had not been named.
    is_open = {"h": not config.h, "stream.fragments": not config.stream.fragments}
    named = frozenset(key for key, _ in leaves_of(tree) if not is_open.get(key))
    _run_config(config)  # ranges
    if lines := list(_contradictions(config, named, link)):
        raise ConfigError("\n".join(lines))
    return config, named


def _contradictions(config: PlanConfig, named: frozenset[str], link: Path | None) -> Iterator[str]:
    """Lines on what two places tell, or none, and on what no plan can ask."""
    for key, example in (("params", "params=57.2e6"), ("step_s", "step_s=0.1")):
        if key not in named:
            yield f"{key} has no value; give {example}"
    for key in sorted(named.difference(HEEDED.split())):
        yield f"{key} is not counted by a plan; leave it out"
    if config.codec.up in MASKED:
        yield (
            f"codec.up = {config.codec.up!r} is not planned, since what travels under masks "
            "depends on the number of sites (docs/wire.md); name another codec"
        )
    if link:
        for key in sorted(named & {"link.rate_mbit", "link.rtt_ms"}):
            yield f"{key} has no effect: --link tells; leave one of them out"
    elif not config.link.rate_mbit:
        yield (
            "link.rate_mbit has no value; give link.rate_mbit=100 link.rtt_ms=100, or --link with "
            "what `fedwan doctor link --json` wrote"
        )
    ranges = {"params": (1.0, 1e12), "step_s": (1e-6, 1e6), "usd_per_gb": (0.0, 1e6)}
    for key, (least, most) in ranges.items():
        value = getattr(config, key)
        if key in named and not least <= value <= most:
            yield f"{key} = {value!r} is out of range; choose {least:g} to {most:g}"


def _run_config(config: PlanConfig) -> Config:
    """Without a plan's own keys, checked."""
    return merge(Config(**{field.name: getattr(config, field.name) for field in fields(Config)}))


def _heading(question: Question) -> str:
    count = sum(spec.num_values for spec in question.layout.values())
    up, down = (pipe.bytes_per_s * 8 / 1e6 for pipe in question.link)
    sites = sites_text(question.config.num_sites)
    return (
        f"{count:,} values, steps of {question.step_s:.3g} s, {sites}; payloads get "
        f"{up:.3g} Mbit/s up and {down:.3g} down, {1e3 * question.link.up.rtt_s:.3g} ms; "
        f"{question.num_steps:,} steps"
    )
