"""`fedwan launch -- COMMAND`: a coordinator on this machine, and sites that run your own script."""

from __future__ import annotations

import shlex
import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedwan.cli.folders import choose_demo_folder, is_named
from fedwan.cli.launch import launch, load_config, show_summary
from fedwan.cli.run import Resume
from fedwan.config import Config
from fedwan.errors import ConfigError

__all__ = ["launch_script", "split_words"]

DEFAULT_OUT = Path("runs/launch")


def launch_script(
    words: Annotated[
        list[str],
        typer.Argument(
            metavar="[KEY=VALUE]... -- COMMAND...",
            help="Settings, such as h=50 codec.up=int4, then the command that each site runs.",
            show_default=False,
        ),
    ],
    sites: Annotated[int, typer.Option("--sites", help="How many sites.")] = 2,
    resume: Resume = False,
) -> None:
    """Train your own script on several sites of this machine: a federation of processes.

    fedwan launch --sites 2 -- python train.py

    fedwan launch --sites 2 h=50 -- torchrun --nproc-per-node 2 train.py

    The script calls fedwan.join; docs/start.md shows how. Results are in runs/launch.
    """
    settings, command = split_words(words)
    given = [f"sites={sites}", *settings, "workload=command"]
    if not is_named("out", given):
        out = choose_demo_folder(DEFAULT_OUT, resume=resume)
        given.append(f"out={out}")
    console = Console()
    config = load_config(None, given, resume=resume)
    _check_command(config, command)
    if resume and (Path(config.out) / "summary.json").exists():
        show_summary(Path(config.out), console)
        return

    from fedwan.preflight import preflight

    if not resume:
        preflight(config)

    def services(config: Config, stop: threading.Event) -> None:
        from fedwan.flower.local import run_local

        run_local(config, command=command, resume=resume, stop=stop)

    launch(config, services, console)


def split_words(words: list[str]) -> tuple[list[str], list[str]]:
    """Settings, and the command that follows them.

    Raises:
        ConfigError: there is no command.

    >>> split_words(["h=50", "seed=1", "python", "train.py", "--lr=1"])
    (['h=50', 'seed=1'], ['python', 'train.py', '--lr=1'])
    """
    count = next((i for i, word in enumerate(words) if "=" not in word), len(words))
    if count == len(words):
        raise ConfigError(
            f"{shlex.join(words)!r} names no command; write it after --, as in "
            "fedwan launch --sites 2 -- python train.py"
        )
    return words[:count], words[count:]


def _check_command(config: Config, command: list[str]) -> None:
    """Refuse a program that does not exist before anything is started."""
    from fedwan.flower.site_file import SiteFile
    from fedwan.flower.training import find_command

    find_command(config, SiteFile(command=shlex.join(command), folder=str(Path.cwd())))
