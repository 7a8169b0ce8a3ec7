"""`fedwan run CONFIG.yaml`: a coordinator and its sites on this machine."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedwan.cli.launch import launch, load_config, show_summary
from fedwan.config import Config

__all__ = ["KEYS", "ConfigPath", "Resume", "Words", "path_and_words", "run", "run_here"]

KEYS = (
    "Keys that are always there: workload strategy sites steps h seed data.name data.split "
    "codec.up codec.down link.rate_mbit link.rtt_ms link.loss out. A wrong key is refused with "
    "the nearest valid one."
)
"""Below the help of every command that takes settings."""

Words = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE]...",
        help="Settings, such as steps=600 h=20 outer.generator.lr=0.3; they beat the file.",
        show_default=False,
    ),
]
ConfigPath = Annotated[
    Path, typer.Argument(metavar="CONFIG.yaml", help="Settings of the run.", show_default=False)
]
Resume = Annotated[
    bool, typer.Option("--resume", help="Go on with the run in `out` from its last checkpoint.")
]


def run(
    config_path: Annotated[
        str | None, typer.Argument(metavar="[CONFIG.yaml]", show_default=False)
    ] = None,
    words: Words = None,
    resume: Resume = False,
) -> None:
    """Train with a coordinator and all sites on this machine.

    KEY=VALUE words, such as h=50 outer.generator.lr=0.3, beat the file, which may be left out.

    A run that was stopped goes on with: fedwan run OUT/config.yaml --resume
    """
    run_here(*path_and_words(config_path, words), resume=resume)


def path_and_words(first: str | None, words: list[str] | None) -> tuple[Path | None, list[str]]:
    """A command's arguments: CONFIG.yaml, which may be left out, and `key=value` words.

    >>> path_and_words("h=50", ["steps=100"])
    (None, ['h=50', 'steps=100'])
    """
    given = list(words or [])
    if first is None or ("=" in first and not Path(first).is_file()):
        return None, ([] if first is None else [first]) + given
    return Path(first), given


def run_here(path: Path | None, words: list[str], *, resume: bool) -> None:
    """Run a configuration on this machine, show it, and print its summary.

    Args:
        path: the YAML file, or None for defaults.
        words: `key=value` words.
        resume: go on with the run in `out`. One that is done is only shown.
    """
    console = Console()
    config = load_config(path, words, resume=resume)
    out = Path(config.out)
    if resume and (out / "summary.json").exists():
        show_summary(out, console)
        return

    from fedwan.preflight import preflight

    if not resume:
        preflight(config)

    def services(config: Config, stop: threading.Event) -> None:
        from fedwan.flower.local import run_local

        run_local(config, resume=resume, stop=stop)

    launch(config, services, console)
