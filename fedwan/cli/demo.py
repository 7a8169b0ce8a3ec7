"""`fedwan demo`: the main job on this machine, with nothing to prepare."""

from __future__ import annotations

from pathlib import Path

import typer

from fedwan.cli.folders import choose_demo_folder, is_named
from fedwan.cli.run import Resume, Words, run_here
from fedwan.config import Config

__all__ = ["demo"]


def demo(words: Words = None, resume: Resume = False) -> None:
    """Train a GAN on handwritten digits: a coordinator and 4 sites on this machine.

    KEY=VALUE words change it: workload=flow sites=2 h=50 link.rtt_ms=100

    Results are in runs/demo; a second demo goes to runs/demo-2, and so on.
    """
    given = list(words or [])
    if is_named("out", given):
        out = Path(
            next(word for word in reversed(given) if word.startswith("out=")).partition("=")[2]
        )
    else:
        default = Path(Config().out)
        out = choose_demo_folder(default, resume=resume)
        if out != default and not resume:
            typer.echo(f"{default} holds a run; this one goes to {out}", err=True)
        given.append(f"out={out}")
    path = out / "config.yaml"
    run_here(path if resume and path.exists() else None, given, resume=resume)
