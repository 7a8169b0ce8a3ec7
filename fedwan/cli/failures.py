"""How commands fail: one line on stderr, an exit code, and a file for what is our own fault."""

from __future__ import annotations

import sys
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import click

from fedwan.errors import ConfigError, FedwanError

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


class Crashed(FedwanError):
    """A bug of fedwan's; its traceback is in the file that the text names."""


def say(text: str) -> None:
    """One line on stderr, with our name before it."""
    print(f"fedwan: {' '.join(text.split())}", file=sys.stderr, flush=True)


def write_option(option: str, path: Path | None, text: str = "") -> None:
    """Write the file that an option names; without a text, only see that it can be written."""
    if path is None:
        return
    try:
        with path.open("w" if text else "a") as file:
            file.write(text)
    except OSError as error:
        raise ConfigError(
            f"{option} = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None


def make_folder(key: str, folder: Path) -> None:
    """Make the folder that a key names, unless it is there."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(
            f"{key} = {str(folder)!r} cannot be made ({error.strerror}); give a folder that can"
        ) from None


@contextmanager
def crash_reports(folder: Path) -> Iterator[None]:
    """Raise `Crashed` in place of an unexpected error, whose traceback goes to this folder."""
    try:
        yield
    except (FedwanError, click.ClickException, click.exceptions.Exit, click.Abort):
        raise
    except Exception as error:
        path = folder / f"crash-{time.strftime('%Y%m%d-%H%M%S')}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("".join(traceback.format_exception(error)))
        text = " ".join(str(error).split())[:200]
        raise Crashed(
            f"ended by a bug ({type(error).__name__}: {text}); "
            f"please report it with the traceback in {path}"
        ) from error
