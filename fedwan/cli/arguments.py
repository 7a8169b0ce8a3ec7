"""What commands share: arguments and options, and what they write."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated, Any

import typer

from fedwan.config import COMMAND
from fedwan.config_tree import read_yaml
from fedwan.errors import UserError
from fedwan.files import on_disk

_OF_A_RUN = (
    *("config.yaml", "journal.jsonl", "metrics.jsonl", "summary.json", "report.html"),
    "samples.png",
)


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
FileAndWords = Annotated[
    list[str] | None,
    argument("[CONFIG.yaml] [KEY=VALUE]...", "The run's file, and settings that beat it."),
]
RunFolder = Annotated[Path, argument("RUN", "The run's folder.")]
NewFolder = Annotated[Path, argument("DIR", "A new folder.")]
IdentityFolder = Annotated[Path, option("--identity", "DIR", "The site's identity folder.")]
JsonPath = Annotated[Path | None, option("--json", "PATH", "Write the same here.")]


def file_and_words(given: list[str] | None) -> tuple[Path | None, list[str]]:
    """CONFIG.yaml, which may be left out, and `key=value` words.

    >>> file_and_words(["h=50", "steps=100"])
    (None, ['h=50', 'steps=100'])
    """
    words = list(given or [])
    has_file = words and ("=" not in words[0] or Path(words[0]).is_file())
    return (Path(words.pop(0)) if has_file else None), words


def has_sites_elsewhere(run: Path) -> bool:
    """Whether `fedwan coordinator` began the run in this folder, not `run`, `demo` or `launch`."""
    return (run / "flower").is_dir() and not (run / "sites").is_dir()


def resuming(run: Path) -> str:
    """The command that goes on with the run in this folder."""
    path = run / "config.yaml"
    given = shlex.quote(str(path))
    if has_sites_elsewhere(run):
        return f"fedwan coordinator {given} --identity DIR --resume"
    if path.exists() and read_yaml(path).get("workload") == COMMAND:
        return f"fedwan launch --resume {shlex.quote(f'out={run}')}"
    return f"fedwan run {given} --resume"


def check_not_own(name: str, path: Path) -> None:
    """Refuse to write over a file that a run has made, by what an option names."""
    is_own = path.name in _OF_A_RUN and (path.parent / "checkpoint").is_dir()
    if is_own and path.is_file() and path.stat().st_size:  # one just made here has none
        raise UserError(f"{name} {path} is a file of the run in its folder; name another")


def write_option(path: Path | None, text: str = "") -> None:
    """Write the file that --json names; without a text, only see that it can be written."""
    if path is not None:
        check_not_own("--json", path)
        with on_disk(path.parent), path.open("w" if text else "a") as file:
            file.write(text)
