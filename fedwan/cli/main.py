"""The `fedwan` command. Loads no more than it needs to show its help."""

from __future__ import annotations

import errno
import io
import os
import sys
from collections.abc import Sequence
from typing import Annotated

import click
import typer

from fedwan import __version__
from fedwan.cli import config, doctor, members, pki, plan, results, run
from fedwan.errors import ConfigError, FedwanError, UserError
from fedwan.files import disk_full

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""

app = typer.Typer(
    name="fedwan",
    help="Train one generative model across datacenters that only a wide-area network joins.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
app.command(epilog=run.KEYS)(run.demo)
app.command(epilog=run.KEYS)(run.run)
app.command(epilog=run.KEYS)(run.launch)
app.command(epilog=run.KEYS)(run.coordinator)
app.command()(config.config)
app.command()(run.site)
app.command(epilog=plan.KEYS)(plan.plan)
app.add_typer(pki.app, name="pki")
app.command()(members.status)
app.command()(members.sites)
app.command()(results.report)
app.command()(results.verify)
app.add_typer(doctor.app, name="doctor")
app.command()(results.sample)
app.command()(results.export)
app.command()(results.new)


@app.callback(invoke_without_command=True)
def _options(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        typer.echo(f"fedwan {__version__}")
        raise typer.Exit


_OF_A_PATH = (
    *(PermissionError, FileNotFoundError, FileExistsError),
    *(IsADirectoryError, NotADirectoryError),
)
"""Whoever named the path can mend it."""


def main(argv: Sequence[str] | None = None) -> None:
    """Run the command line and exit: 0 done, 2 the user's mistake, 1 anything else, 130 Ctrl-C."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")  # a terminal may lack "…", and stderr never fails
    sys.exit(_exit_code(sys.argv[1:] if argv is None else list(argv)))


def _exit_code(words: list[str]) -> int:
    try:
        result = app(words, prog_name="fedwan", standalone_mode=False)
    except FedwanError as error:
        lines = str(error).splitlines() if isinstance(error, ConfigError) else [str(error)]
        return _say(error.exit_code, *lines)
    except OSError as error:
        if error.errno != errno.EROFS and (full := disk_full(error)):  # that is a path to change
            return _say(full.exit_code, str(full))
        is_of_a_path = isinstance(error, _OF_A_PATH) or error.errno == errno.EROFS
        if isinstance(error, FileNotFoundError) and not _is_somewhere():
            where = "the folder that this was started in is gone; go to one that is there (cd)"
            return _say(UserError.exit_code, where)
        if not is_of_a_path or error.filename is None:
            raise
        return _say(UserError.exit_code, f"{error.filename}: {error.strerror}")
    except click.exceptions.NoArgsIsHelpError as error:
        typer.echo(error.format_message())
        return 0
    except click.ClickException as error:
        context = error.ctx if isinstance(error, click.UsageError) else None
        command = context.command_path if context else "fedwan"
        text = f"{error.format_message().rstrip('.')}; see {command} --help"
        return _say(UserError.exit_code, text)
    except (KeyboardInterrupt, click.Abort):
        result = INTERRUPTED
    if result == INTERRUPTED:  # Typer turns a KeyboardInterrupt into this result.
        return _say(INTERRUPTED, "stopped by Ctrl-C")
    return result if isinstance(result, int) else 0


def _is_somewhere() -> bool:
    """Whether the present folder is still there."""
    try:
        os.getcwd()
    except FileNotFoundError:
        return False
    return True


def _say(exit_code: int, *lines: str) -> int:
    """Each on stderr, in one line with our name before it."""
    for line in lines:
        print(f"fedwan: {' '.join(line.split())}", file=sys.stderr, flush=True)
    return exit_code
