"""`fedwan plan`: what each strategy, codec and H would do on a link, before anything is run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from omegaconf import OmegaConf

from fedwan._config_checks import check_address
from fedwan._config_tree import Tree, parse_words, read_yaml
from fedwan.cli.plan_settings import COMPARED, PlanConfig, leaves, read_settings, run_config
from fedwan.config import Config, LinkConfig, merge
from fedwan.errors import ConfigError

if TYPE_CHECKING:
    from fedwan.planner.candidates import Candidate
    from fedwan.planner.predict import Prediction
    from fedwan.planner.question import Question
    from fedwan.planner.wire_model import WireLink

__all__ = ["KEYS", "plan"]

KEYS = (
    "Keys of a plan alone: params step_s loss usd_per_gb. Keys of a run: strategy (or all) sites "
    "steps h codec.up codec.down stream.fragments stream.tau round.quorum link.rate_mbit "
    "link.rtt_ms link.congestion link.pace_mbit. A wrong key is refused with the "
    "nearest valid one."
)
"""Below the help."""
DEFAULT_STEPS = 10_000
YOURS = "your_workload"
"""In what `--yaml` writes where no file named a workload: to be filled in before it is run."""
EMULATED = "# link.* emulates this link on one machine; take it out where the link is real."


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
    config, named = read_settings(path, given, link)
    for option, target in (("--json", json_path), ("--yaml", yaml_path)):
        if target is not None:
            with _writing(option, target), target.open("a"):
                pass  # told before the work, not after it
    measured = _measure(link, identity, config.link)
    # Imported late, so that a wrong word is told at once.
    from fedwan.planner.candidates import candidates
    from fedwan.planner.predict import predict
    from fedwan.planner.recommend import rank, why
    from fedwan.planner.table import row_of, summary_of, table_lines
    from fedwan.planner.wire_model import modelled_link

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
    if json_path is not None:
        rows = [row_of(prediction, question) for prediction in ranked]
        with _writing("--json", json_path):
            json_path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    if yaml_path is not None:
        with _writing("--yaml", yaml_path):
            yaml_path.write_text(_yaml_of(ranked[0], path, given))


# What is asked ---------------------------------------------------------------------------------


_Asked = tuple["Question", Callable[["Question"], "Question"]]
"""A question, and what completes it with what takes seconds to measure."""


def _of_settings(config: PlanConfig, named: frozenset[str], link: WireLink) -> _Asked:
    """The model and its steps as the user describes them."""
    from fedwan.app import check_codecs
    from fedwan.planner.costs import Costs
    from fedwan.planner.layouts import NETWORK, synthetic_layout
    from fedwan.planner.question import Question

    run = run_config(config)
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

    run = resolve_workload(run_config(config))
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
    named = question.named | set(leaves(tree)) | {"strategy", "h", "codec.up", "codec.down"}
    config = merge(question.config, tree)
    return candidates(replace(question, config=config, named=frozenset(named)))[0]


def _measure(link: str, identity: Path | None, run: LinkConfig) -> WireLink | None:
    """The link as measured, now or before; None where the settings describe it."""
    if not link:
        if identity is not None:
            raise ConfigError("--identity has no effect without --link HOST:PORT; leave it out")
        return None
    from fedwan.planner.measured import measured_link, read_measurement

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


@contextmanager
def _writing(option: str, path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"{option} = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
