"""`fedwan doctor`: what is wrong with a run, or holds its link back, and what would help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import click
import typer
import typer.core

from fedwan._config_checks import check_address
from fedwan.cli import doctor_run as run_doctor
from fedwan.cli.run import Words
from fedwan.config import LinkConfig, load
from fedwan.errors import ConfigError
from fedwan.names import nearest

if TYPE_CHECKING:
    from fedwan.link.advice import Advice
    from fedwan.link.measure import Measurement, Way

__all__ = ["app", "link"]

KEYS = ("link.congestion", "link.pace_mbit")
MOST_SECONDS = 30.0


class _RunOrCommand(typer.core.TyperGroup):
    """A group whose first word may be a run's folder instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = ["run", *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="doctor",
    help="Find what is wrong with a run, or holds its link back, and what would help.",
    cls=_RunOrCommand,
    no_args_is_help=True,
    subcommand_metavar="RUN_DIR | link HOST:PORT",
)
app.command("run")(run_doctor.run)


@app.command("link")
def link(
    address: Annotated[
        str,
        typer.Argument(
            metavar="HOST:PORT", help="The coordinator's data plane.", show_default=False
        ),
    ],
    identity: Annotated[
        Path,
        typer.Option(
            "--identity", metavar="DIR", help="The site's identity folder.", show_default=False
        ),
    ],
    words: Words = None,
    config_path: Annotated[
        Path | None,
        typer.Option(
            "--config",
            metavar="CONFIG.yaml",
            help="The run's: measure with its link.congestion, link.pace_mbit.",
            show_default=False,
        ),
    ] = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Of a transfer each way.")] = 3.0,
    rate: Annotated[
        float, typer.Option("--rate", metavar="MBIT", help="What the path should carry, if known.")
    ] = 0.0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the figures here.", show_default=False),
    ] = None,
) -> None:
    """Measure the link from this site to the coordinator, and say what would speed it up.

    It measures as the run's file or words such as link.congestion=cubic link.pace_mbit=97 say.

    The coordinator must be running; up to 256 MiB go each way. A run that is going on is slowed for
    some seconds, and makes the link look slower than it is.
    """
    check_address("HOST:PORT", address)
    settings = _link_settings(config_path, words or [])
    _check("--seconds", seconds, 0.5, MOST_SECONDS)
    _check("--rate", rate, 0, 1e6)
    if json_path is not None:
        with _writing(json_path), json_path.open("a"):
            pass  # told before the measurement, not after it
    # Imported late, so that a wrong word is told at once.
    from fedwan.link.advice import advise
    from fedwan.link.measure import measure
    from fedwan.link.tls import Identity

    found = measure(address, Identity.load(identity), settings, seconds)
    advice = advise(found, rate)
    for line in _lines(found, advice):
        typer.echo(line)
    if json_path is not None:
        figures = asdict(found) | {"advice": None if advice is None else asdict(advice)}
        with _writing(json_path):
            json_path.write_text(json.dumps(figures, indent=2) + "\n")


def _link_settings(path: Path | None, words: list[str]) -> LinkConfig:
    """A run's link, as far as a file and words say.

    Raises:
        ConfigError: a file or word is wrong, or says what no measurement heeds.
    """
    for word in words:
        key, equals, _ = word.partition("=")
        if equals and key not in KEYS:
            raise ConfigError(
                f"{word!r} has no effect on a measurement, which heeds {', '.join(KEYS)}"
                f"{nearest(key, KEYS)}"
            )
    return load(path, words).link


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} = {value:g} is out of range; choose {least:g} to {most:g}")


def _lines(found: Measurement, advice: Advice | None) -> list[str]:
    pace = f", up at {found.pace_mbit:g} Mbit/s at most" if found.pace_mbit else ""
    channels = "1 channel" if found.channels == 1 else f"{found.channels} channels"
    buffers = [
        f"{x[-1] / 1e6:.1f} MB" if x else "?" for x in (found.machine.receive, found.machine.send)
    ]
    rows = [
        ("link", f"{found.site} to {found.address}, {channels}{pace}"),
        ("round trip", f"{found.rtt_ms:.1f} ms, {found.loaded_ms:.1f} ms while uploading"),
        ("up", _way(found.up)),
        ("down", _way(found.down)),
        (
            "site",
            f"allows {' '.join(found.machine.allowed) or 'unknown'}; buffers up to {buffers[0]} "
            f"to receive, {buffers[1]} to send",
        ),
    ]
    if advice is None:
        rows.append(("advice", "nothing to mend"))
    else:
        rows.append(("advice", f"on the {advice.machine}: {advice.command}  ({advice.text})"))
    return [f"{name:<11}  {text}" for name, text in rows]


def _way(way: Way) -> str:
    again = "" if way.again is None else f", {way.again:.3%} sent again"
    return f"{way.mbit:8.1f} Mbit/s{again}; {way.congestion or 'unknown'}"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--json = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
