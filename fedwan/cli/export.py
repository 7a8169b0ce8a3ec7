"""`fedwan export RUN --to FORMAT DIR`: a run's networks as plain files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedwan.cli.sample import Last, RunFolder

__all__ = ["export"]


def export(
    run: RunFolder,
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)
    ],
    to: Annotated[
        str, typer.Option(metavar="FORMAT", help="`safetensors`: one plain file per network.")
    ] = "safetensors",
    last: Last = False,
) -> None:
    """Write a run's networks into DIR, with a README on how to load them without fedwan."""
    # Imported late: torch takes seconds, and a wrong option is told at once.
    import fedwan
    from fedwan.export import export as export_networks

    export_networks(fedwan.load(run, ema=not last), to, folder)
    typer.echo(folder)
