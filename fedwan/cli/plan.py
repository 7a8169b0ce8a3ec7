"""`fedwan plan`: what each strategy, codec and H would do on a link, before anything is run."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from fedwan._config_checks import check_address
from fedwan._config_tree import Tree, overlay, parse_words, read_yaml
from fedwan.cli.arguments import JsonPath, argument, option, write_option
from fedwan.config import Config, LinkConfig, merge
from fedwan.errors import ConfigError
from fedwan.output.units import sites_text

if TYPE_CHECKING:
    from fedwan.planner.candidates import Candidate
    from fedwan.planner.links import WireLink
    from fedwan.planner.predict import Prediction
    from fedwan.planner.question import Question

__all__ = ["KEYS", "plan"]

KEYS = (
    "Keys of a plan alone: params step_s usd_per_gb. Keys of a run: strategy (or all) sites "
    "steps h codec.up codec.down stream.fragments stream.tau round.quorum link.rate_mbit "
    "link.rtt_ms link.congestion link.pace_mbit. A wrong key is refused with the "
    "nearest valid one."
)
"""Below the help."""
COMPARED = ("strategy", "h", "codec", "stream", "outer")
"""Open unless a word settles them, whatever the file has."""
WITHOUT_WORKLOAD = frozenset(
    "params step_s usd_per_gb strategy sites steps h codec.up codec.down stream.fragments "
    "stream.tau round.quorum round.patience_s link.rate_mbit "
    "link.rtt_ms link.loss link.congestion link.pace_mbit".split()
)
"""Keys that mean something where no workload is given."""
DEFAULT_STEPS = 10_000
YOURS = "your_workload"
"""In what `--yaml` writes where no file named a workload: to be filled in before it is run."""
EMULATED = "# link.* emulates this link on one machine; take it out where the link is real."


@dataclass
class PlanConfig(Config):
    """A run's settings, and those that only a plan has."""

    strategy: str = "all"
    """A recipe in `strategies/`, or `all` of them."""
    params: float = 0.0
    """Values of the model, where no workload tells."""
    step_s: float = 0.0
    """Seconds of a step; 0 measures it, where there is a workload."""
    usd_per_gb: float = 0.0
    """Price of what is sent, either way, for the column of costs; 0 leaves it out."""


def plan(
    words: Annotated[
        list[str] | None,
        argument(
            "[CONFIG.yaml] [KEY=VALUE]...",
            "A run's settings, or params=57.2e6 step_s=0.1 sites=4 link.rate_mbit=100 …",
        ),
    ] = None,
    link: Annotated[
        str,
        option(
            "--link",
            "PATH|HOST:PORT",
            "The link as measured: what `fedwan doctor link --json` wrote, or measure it now.",
        ),
    ] = "",
    identity: Annotated[
        Path | None, option("--identity", "DIR", "The site's identity folder, to measure with.")
    ] = None,
    json_path: JsonPath = None,
    yaml_path: Annotated[
        Path | None, option("--yaml", "PATH", "Write the recommended settings.")
    ] = None,
) -> None:
    """Predict utilisation, bytes, time and cost on a link, and recommend a setting.

    With CONFIG.yaml, model size and step time come from a few seconds of its workload here.

    Words that name a strategy, h, codec.* or stream.* settle it; everything else is compared.
    """
    given = list(words or [])
    path = Path(given.pop(0)) if given and "=" not in given[0] else None
    config, named = _read_settings(path, given, link)
    for name, target in (("--json", json_path), ("--yaml", yaml_path)):
        write_option(name, target)  # told before the work, not after it
    measured = _measure(link, identity, config.link)
    # Imported late, so that a wrong word is told at once.
    from fedwan.planner.candidates import candidates
    from fedwan.planner.links import modelled_link
    from fedwan.planner.predict import predict
    from fedwan.planner.recommend import rank, row_of, summary_of, table_lines, why

    ask = _of_settings if path is None else _of_workload
    question, calibrate = ask(config, named, measured or modelled_link(config.link))
    settings = candidates(question)  # refuses what cannot be, before anything is timed
    own = _own_settings(path, question)
    question = calibrate(question)
    cache: dict[object, Any] = {}
    found = [predict(candidate, question, cache) for candidate in settings]
    ranked = rank(found, question)
    if not ranked:
        raise ConfigError(
            f"every run would stop: {found[0].stopped}, which is all that round.patience_s="
            f"{config.round.patience_s:g} allows; raise it"
        )
    lines = [_heading(question), "", *table_lines(ranked, question), ""]
    if own is not None:
        lines.append(f"as configured: {summary_of(predict(own, question, cache))}")
    for line in (*lines, f"advice: {why(ranked, question)}"):
        typer.echo(line)
    rows = [row_of(prediction, question) for prediction in ranked]
    write_option("--json", json_path, "".join(json.dumps(row) + "\n" for row in rows))
    write_option("--yaml", yaml_path, _yaml_of(ranked[0], path, given))


def _read_settings(
    path: Path | None, words: list[str], link: str
) -> tuple[PlanConfig, frozenset[str]]:
    """The settings, checked, and the keys that words settle.

    Raises:
        ConfigError: a key that is unknown or has no effect, a value out of range or missing.
    """
    file_tree = {} if path is None else read_yaml(path)
    tree = parse_words(words, PlanConfig)
    # A file's own strategy is one of those that are compared, not the only one.
    compared = {key: value for key, value in file_tree.items() if key not in COMPARED}
    config = overlay(PlanConfig(), file_tree)  # all of it is checked
    config = overlay(PlanConfig(), compared, tree)
    # 0 leaves these to the strategy, as if they had not been named.
    is_open = {"h": not config.h, "stream.fragments": not config.stream.fragments}
    named = frozenset(key for key in _leaves(tree) if not is_open.get(key))
    _run_config(config)  # ranges
    for network, special in config.network.items():
        if special.h:
            raise ConfigError(
                f"network.{network}.h={special.h} cannot be planned for: a plan takes all networks "
                "to travel together; leave it out"
            )
    for key, least in (("params", 1.0), ("step_s", 1e-6), ("usd_per_gb", 0.0)):
        value = getattr(config, key)
        if key in named and not (math.isfinite(value) and value >= least):
            raise ConfigError(f"{key} = {value!r} is out of range; choose {least:g} or more")
    _check_sources(path, config, named, link)
    return config, named


def _check_sources(path: Path | None, config: PlanConfig, named: frozenset[str], link: str) -> None:
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
        for key in ("link.rate_mbit", "link.rtt_ms", "link.loss"):
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
    """Dotted keys of nested values."""
    for key, value in tree.items():
        if isinstance(value, Mapping):
            yield from _leaves(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}"


_Asked = tuple["Question", Callable[["Question"], "Question"]]
"""A question, and what completes it with what takes seconds to measure."""


def _of_settings(config: PlanConfig, named: frozenset[str], link: WireLink) -> _Asked:
    """The model and its steps as the user describes them."""
    from fedwan.app import check_codecs
    from fedwan.planner.costs import Costs
    from fedwan.planner.question import NETWORK, Question, synthetic_layout

    run = _run_config(config)
    check_codecs(run)
    question = Question(
        run,
        named,
        {NETWORK: "regression"},
        synthetic_layout(round(config.params)),
        config.step_s,
        link,
        config.steps or DEFAULT_STEPS,
        config.usd_per_gb,
        Costs(packs=link.packs()),
    )
    return question, lambda question: question


def _of_workload(config: PlanConfig, named: frozenset[str], link: WireLink) -> _Asked:
    """The real workload's tensors; its steps and the codecs will be timed."""
    from fedwan.app import load_workload, resolve_workload
    from fedwan.planner.calibrate import coding_costs, open_workload, step_seconds, trained_layout
    from fedwan.planner.costs import Costs
    from fedwan.planner.question import Question
    from fedwan.workloads.settings import networks_of

    run = resolve_workload(_run_config(config))
    workload = open_workload(run)
    question = Question(
        run,
        named,
        networks_of(load_workload(run.workload), run),
        trained_layout(workload, run.inner, run.excluded),
        config.step_s,
        link,
        run.steps,
        config.usd_per_gb,
        Costs(packs=link.packs()),
    )

    def calibrate(question: Question) -> Question:
        return replace(
            question,
            step_s=config.step_s or step_seconds(run, workload),
            costs=replace(coding_costs(question.layout), packs=question.costs.packs),
        )

    return question, calibrate


def _own_settings(path: Path | None, question: Question) -> Candidate | None:
    """What the file itself settles; None if there is no file."""
    from fedwan.planner.candidates import candidates

    if path is None:
        return None
    tree = {key: value for key, value in read_yaml(path).items() if key in COMPARED}
    tree.setdefault("strategy", Config().strategy)
    named = question.named | set(_leaves(tree)) | {"strategy", "h", "codec.up", "codec.down"}
    config = merge(question.config, tree)
    return candidates(replace(question, config=config, named=frozenset(named)))[0]


def _measure(link: str, identity: Path | None, run: LinkConfig) -> WireLink | None:
    """The link as measured, now or before; None where the settings describe it."""
    if not link:
        if identity is not None:
            raise ConfigError("--identity has no effect without --link HOST:PORT; leave it out")
        return None
    from fedwan.planner.links import measured_link, read_measurement

    if Path(link).is_file():
        return measured_link(read_measurement(Path(link)))
    if ":" not in link:
        raise ConfigError(f"--link = {link!r} is no file here, and no host:port; mend the path")
    check_address("--link", link)
    if identity is None:
        raise ConfigError(f"--link {link} is measured with a site's identity; add --identity DIR")
    from fedwan.link.measure import measure
    from fedwan.link.tls import Identity

    loaded = Identity.load(identity)
    return measured_link(measure(link, loaded, run))


def _heading(question: Question) -> str:
    count = sum(spec.num_values for spec in question.layout.values())
    up, down = (pipe.bytes_per_s * 8 / 1e6 for pipe in question.link)
    sites = sites_text(question.config.sites)
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
        keys = ("fragments", "tau")
        tree["stream"] = {key: getattr(chosen.stream, key) for key in keys}
    if chosen.link.loss:
        tree["link"] = {"loss": chosen.link.loss}
    kept = [{key: value for key, value in part.items() if key in run} for part in written]
    if path is None:  # it was planned for another model than any workload here
        tree = {"workload": YOURS} | tree
    text = OmegaConf.to_yaml(OmegaConf.merge(*kept, tree))
    if "rate_mbit" in text:
        text = f"{EMULATED}\n{text}"
    return text
