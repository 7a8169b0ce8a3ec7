"""`fedwan new DIR`: a project to begin with."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

import fedwan
from fedwan.errors import UserError

__all__ = ["new"]


def new(
    folder: Annotated[
        Path, typer.Argument(metavar="DIR", help="A new folder.", show_default=False)
    ],
) -> None:
    """Write a project: a training script that runs at once, its test, and its settings."""
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UserError(f"{str(folder)!r} holds something already; give a new folder")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise UserError(
            f"{str(folder)!r} cannot be made ({error.strerror}); give a folder that can"
        ) from None
    name = folder.absolute().name
    skeleton = Path(fedwan.__file__).parent / "_skeleton"
    for path in sorted(path for path in skeleton.iterdir() if path.is_file()):
        (folder / path.name).write_text(path.read_text().replace("NAME", name))
        typer.echo(folder / path.name)
    typer.echo(f"next: cd {folder} && python train.py")
