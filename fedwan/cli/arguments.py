"""The arguments and options that commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["IdentityFolder", "JsonPath", "NewFolder", "RunFolder", "Words", "argument", "option"]


def argument(metavar: str, help: str = "") -> Any:
    """A positional argument, whose default speaks for itself."""
    return typer.Argument(metavar=metavar, help=help, show_default=False)


def option(name: str, metavar: str, help: str) -> Any:
    """An option with a value, whose default speaks for itself."""
    return typer.Option(name, metavar=metavar, help=help, show_default=False)


Words = Annotated[
    list[str] | None,
    argument(
        "[KEY=VALUE]...",
        "Settings, such as steps=600 h=20 outer.generator.lr=0.3; they beat the file.",
    ),
]
RunFolder = Annotated[Path, argument("RUN", "The run's folder.")]
NewFolder = Annotated[Path, argument("DIR", "A new folder.")]
IdentityFolder = Annotated[Path, option("--identity", "DIR", "The site's identity folder.")]
JsonPath = Annotated[Path | None, option("--json", "PATH", "Write the same here.")]
