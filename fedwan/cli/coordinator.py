"""`fedwan coordinator CONFIG.yaml`: the coordinator of a real deployment."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from fedwan.cli.launch import launch, load_config, show_summary
from fedwan.cli.run import ConfigPath, Resume, Words
from fedwan.config import Config

__all__ = ["coordinator"]


def coordinator(
    config_path: ConfigPath,
    identity: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="The coordinator's folder that `fedwan pki init` made.",
            show_default=False,
        ),
    ],
    words: Words = None,
    resume: Resume = False,
) -> None:
    """Serve one run to sites elsewhere, until it is done.

    Set link.listen and link.door, and open both ports.

    docs/deploy.md shows a whole deployment.
    """
    # Before torch is loaded: a wrong folder should be told at once.
    from fedwan.link.tls import Identity

    Identity.load(identity, "coordinator")
    console = Console()
    config = load_config(config_path, words or [], resume=resume)
    out = Path(config.out)
    if resume and (out / "summary.json").exists():
        show_summary(out, console)
        return

    def services(config: Config, stop: threading.Event) -> None:
        from fedwan.flower.coordinator import serve_coordinator

        serve_coordinator(config, identity.absolute(), resume=resume, stop=stop)

    launch(config, services, console)
