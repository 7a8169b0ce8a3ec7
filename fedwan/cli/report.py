"""`fedwan report RUN_DIR`: a run on one page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

__all__ = ["report"]


def report(
    run_dir: Annotated[
        Path, typer.Argument(metavar="RUN_DIR", help="The run's folder.", show_default=False)
    ],
) -> None:
    """Write RUN_DIR/report.html: plots, samples and events on one page.

    Works for runs that are still going on, too.
    """
    from fedwan.output.report import write_report

    typer.echo(write_report(run_dir))
