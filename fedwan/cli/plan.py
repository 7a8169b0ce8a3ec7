"""`fedwan plan`: what a run would do on a link, for each strategy, codec and H, before it is run."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from fedwan._config_checks import check_address
from fedwan._config_tree import Tree, overlay, parse_words, read_yaml
from fedwan.config import Config, merge
from fedwan.errors import ConfigError

if TYPE_CHECKING:
    from fedwan.link.measure import Measurement
    from fedwan.planner.predict import Prediction
    from fedwan.planner.question import Question
    from fedwan.planner.wire_model import WireLink

__all__ = ["KEYS", "PlanConfig", "plan"]

KEYS = (
    "Keys of a plan alone: params step_s loss usd_per_gb. Keys of a run: strategy (or all) sites "
    "steps h codec.up codec.down stream.fragments stream.tau round.quorum link.rate_mbit "
    "link.rtt_ms link.congestion link.pace_mbit. A wrong key is refused with the nearest valid one."
)
"""Below the help."""
DEFAULT_STEPS = 10_000
COMPARED = ("strategy", "h", "codec", "stream", "outer")
"""Open unless a word settles them, whatever the file has."""
WITHOUT_WORKLOAD = frozenset(
    "params step_s loss usd_per_gb strategy sites steps h codec.up codec.down stream.fragments "
    "stream.pattern stream.tau stream.alpha round.quorum round.patience_s link.rate_mbit "
    "link.rtt_ms link.loss link.congestion link.pace_mbit link.channels".split()
)
"""Keys that mean something where no workload is given."""
EMULATED = "# link.* emulates this link on one machine; take it out where the link is real."
PROBE_CHANNELS = 8
PROBE_S = 1.0


@dataclass
class PlanConfig(Config):
    """A run's settings, and those that only a plan has."""

    strategy: str = "all"
    """A recipe in `strategies/`, or `all` of them."""
    params: float = 0.0
    """Values of the model, where no workload tells."""
    step_s: float = 0.0
    """Seconds of a step; 0 measures it, where there is a workload."""
    loss: float = 0.0
    """Short for `link.loss`: share of packets lost, 0 to 1."""
    usd_per_gb: float = 0.0
    """Price of what is sent, either way, for the column of costs; 0 leaves it out."""


def plan(
    words: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[CONFIG.yaml] [KEY=VALUE]...",
            help="A run's settings, or params=57.2e6 step_s=0.1 sites=4 link.rate_mbit=100 …",
            show_default=False,
        ),
    ] = None,
    link: Annotated[
        str,
        typer.Option(
            "--link",
            metavar="PATH|HOST:PORT",
            help="The link as measured: what `fedwan doctor link --json` wrote, or measure it now.",
            show_default=False,
        ),
    ] = "",
    identity: Annotated[
        Path | None,
        typer.Option(
            "--identity",
            metavar="DIR",
            help="The site's identity folder, to measure with.",
            show_default=False,
        ),
    ] = None,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write rows here.", show_default=False),
    ] = None,
    yaml_path: Annotated[
        Path | None,
        typer.Option(
            "--yaml", metavar="PATH", help="Write the recommended settings.", show_default=False
        ),
    ] = None,
) -> None:
    """Predict utilisation, bytes, time and cost on a link, and recommend a setting.

    With CONFIG.yaml, model size and step time come from a few seconds of its workload here.

    Words that name a strategy, h, codec.* or stream.* settle it; everything else is compared.
    """
    given = list(words or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    config, named = _read(path, given, link)
    for option, target in (("--json", json_path), ("--yaml", yaml_path)):
        if target is not None:
            with _writing(option, target), target.open("a"):
                pass  # told before the work, not after it
    question = _question(path, config, named, _measure(link, identity))
    # Imported late, so that a wrong word is told at once.
    from fedwan.planner.candidates import candidates
    from fedwan.planner.predict import predict
    from fedwan.planner.recommend import rank, why
    from fedwan.planner.table import row_of, summary_of, table_lines

    cache: dict[object, Any] = {}
    found = [predict(candidate, question, cache) for candidate in candidates(question)]
    ranked = rank(found, question)
    if not ranked:
        raise ConfigError(
            f"every run would stop: {found[0].stopped}, which is all that round.patience_s="
            f"{config.round.patience_s:g} allows; raise it"
        )
    lines = [_heading(question), "", *table_lines(ranked, question), ""]
    if path is not None:
        own = _as_configured(path, question)
        lines.append(f"as configured: {summary_of(predict(candidates(own)[0], own, cache))}")
    for line in (*lines, f"advice: {why(ranked, question)}"):
        typer.echo(line)
    if json_path is not None:
        rows = [row_of(prediction, question) for prediction in ranked]
        with _writing("--json", json_path):
            json_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if yaml_path is not None:
        with _writing("--yaml", yaml_path):
            yaml_path.write_text(_yaml_of(ranked[0], path, given))


# What is asked ---------------------------------------------------------------------------------


def _read(path: Path | None, words: list[str], link: str) -> tuple[PlanConfig, frozenset[str]]:
    """The settings, checked, and the keys that words settle."""
    file_tree = {} if path is None else read_yaml(path)
    tree = parse_words(words, PlanConfig)
    # A file's own strategy is one of those that are compared, not the only one.
    compared = {key: value for key, value in file_tree.items() if key not in COMPARED}
    config = overlay(PlanConfig(), file_tree)  # all of it is checked
    config = overlay(PlanConfig(), compared, tree)
    named = frozenset(_leaves(tree))
    if config.loss:
        if "link.loss" in named:
            raise ConfigError("loss and link.loss say the same; leave one of them out")
        config.link.loss = config.loss
    _run_config(config)  # ranges
    for key, least in (("params", 1.0), ("step_s", 1e-6), ("usd_per_gb", 0.0)):
        value = getattr(config, key)
        if key in named and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key} = {value!r} is out of range; choose {least:g} or more")
    _check_sources(path, config, named, link)
    return config, named


def _check_sources(
    path: Path | None, config: PlanConfig, named: frozenset[str], link: str
) -> None:
    """See that model and link come from one place each."""
    if path is not None and "params" in named:
        raise ConfigError(
            f"params = {config.params:g} has no effect: {str(path)!r} names the workload, which "
            "tells; leave one of them out"
        )
    if path is None:
        for key, example in (("params", "params=57.2e6"), ("step_s", "step_s=0.1")):
            if not getattr(config, key):
                raise ConfigError(
                    f"{key} has no value; give {example}, or a CONFIG.yaml whose workload tells"
                )
        for key in sorted(named - WITHOUT_WORKLOAD):
            raise ConfigError(f"{key} has no effect on a plan without a CONFIG.yaml; leave it out")
    if link:
        for key in ("link.rate_mbit", "link.rtt_ms", "link.loss", "loss"):
            if key in named:
                raise ConfigError(f"{key} has no effect: --link tells; leave one of them out")
    elif not config.link.rate_mbit:
        raise ConfigError(
            "link.rate_mbit has no value; give link.rate_mbit=100 link.rtt_ms=100, or --link with "
            "what `fedwan doctor link --json` wrote"
        )


def _run_config(config: PlanConfig) -> Config:
    """Without a plan's own keys, checked."""
    return merge(Config(**{field.name: getattr(config, field.name) for field in fields(Config)}))


def _leaves(tree: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


def _question(
    path: Path | None, config: PlanConfig, named: frozenset[str], measured: WireLink | None
) -> Question:
    from fedwan.planner.layouts import NETWORK, synthetic_layout
    from fedwan.planner.question import Question
    from fedwan.planner.wire_model import modelled_link

    link = measured or modelled_link(config.link)
    run = _run_config(config)
    if path is None:
        return Question(
            run,
            named,
            {NETWORK: "regression"},
            synthetic_layout(round(config.params)),
            config.step_s,
            link,
            config.steps or DEFAULT_STEPS,
            config.usd_per_gb,
        )
    from fedwan.app import load_workload, resolve_workload
    from fedwan.planner.calibrate import calibrate
    from fedwan.planner.candidates import CODECS

    resolved = resolve_workload(run)
    names = {name for pair in CODECS for name in pair} | {run.codec.up, run.codec.down}
    found = calibrate(resolved, sorted(names))
    return Question(
        resolved,
        named,
        load_workload(run.workload).NETWORKS,
        found.layout,
        config.step_s or found.step_s,
        link,
        resolved.steps,
        config.usd_per_gb,
        found.costs,
    )


def _as_configured(path: Path, question: Question) -> Question:
    """The same, with all that the file settles."""
    tree = {key: value for key, value in read_yaml(path).items() if key in COMPARED}
    tree.setdefault("strategy", Config().strategy)
    named = question.named | set(_leaves(tree)) | {"strategy", "h", "codec.up", "codec.down"}
    config = merge(question.config, tree)
    return replace(question, config=config, named=frozenset(named))


def _measure(link: str, identity: Path | None) -> WireLink | None:
    """The link as measured, now or before; None where the settings describe it."""
    if not link:
        if identity is not None:
            raise ConfigError("--identity has no effect without --link HOST:PORT; leave it out")
        return None
    from fedwan.planner.wire_model import measured_link

    if Path(link).is_file():
        return measured_link(_read_measurement(Path(link)))
    check_address("--link", link)
    if identity is None:
        raise ConfigError(f"--link {link} is measured with a site's identity; add --identity DIR")
    from fedwan.link.measure import measure
    from fedwan.link.tls import Identity

    return measured_link(measure(link, Identity.load(identity), PROBE_CHANNELS, PROBE_S))


def _read_measurement(path: Path) -> Measurement:
    from fedwan.link.measure import Machine, Measurement, Way

    try:
        figures = json.loads(path.read_text())
        figures.pop("advice")
        ways = {way: Way(**figures.pop(way)) for way in ("up", "down")}
        machines = {place: Machine(**figures.pop(place)) for place in ("here", "there")}
        return Measurement(**figures, **ways, **machines)
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        raise ConfigError(
            f"--link = {str(path)!r} is no measurement; write one with `fedwan doctor link --json`"
        ) from None


# What is told ----------------------------------------------------------------------------------


def _heading(question: Question) -> str:
    count = sum(spec.num_values for spec in question.layout.values())
    up, down = (pipe.bytes_per_s * 8 / 1e6 for pipe in question.link)
    sites = "1 site" if question.config.sites == 1 else f"{question.config.sites} sites"
    return (
        f"{count:,} values, steps of {question.step_s:.3g} s, {sites}; payloads get "
        f"{up:.3g} Mbit/s up and {down:.3g} down, {1e3 * question.link.up.rtt_s:.3g} ms; "
        f"{question.num_steps:,} steps"
    )


def _yaml_of(best: Prediction, path: Path | None, words: list[str]) -> str:
    """The run's settings: the file's, the words', and those that are recommended."""
    chosen, strategy = best.candidate.config, best.candidate.strategy
    run = {field.name for field in fields(Config)}
    written = [{} if path is None else read_yaml(path), parse_words(words, PlanConfig)]
    same = written[0].get("strategy", Config().strategy) == chosen.strategy
    dropped = {"stream"} if same else {"stream", "outer", "checkpoint"}
    written[0] = {key: value for key, value in written[0].items() if key not in dropped}
    tree: Tree = {
        "strategy": chosen.strategy,
        "sites": chosen.sites,
        "steps": chosen.steps,
        "h": strategy.h,
        "codec": {"up": strategy.up.name, "down": strategy.down.name},
    }
    if strategy.overlap.tau:
        keys = ("fragments", "pattern", "tau")
        tree["stream"] = {key: getattr(chosen.stream, key) for key in keys}
    if chosen.link.loss:
        tree["link"] = {"loss": chosen.link.loss}
    kept = [{key: value for key, value in part.items() if key in run} for part in written]
    text = OmegaConf.to_yaml(OmegaConf.merge(*kept, tree))
    if "rate_mbit" in text:
        text = f"{EMULATED}\n{text}"
    return text


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option} = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
