"""`fedwan doctor`: what holds a deployment back, and what would help."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedwan._config_checks import check_address
from fedwan.errors import ConfigError

if TYPE_CHECKING:
    from fedwan.link.advice import Advice
    from fedwan.link.measure import Machine, Measurement, Way

__all__ = ["app", "link"]

MOST_CHANNELS = 16
MOST_SECONDS = 10.0
"""As `fedwan.link.probe` has them, which is loaded only when it is needed."""

app = typer.Typer(
    name="doctor",
    help="Find what holds a deployment back, and the command that would help.",
    no_args_is_help=True,
)


@app.callback()
def _doctor() -> None:
    """Keeps `link` a word of its own while it is the only one."""


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
    channels: Annotated[int, typer.Option("--channels", help="Channels of the second try.")] = 8,
    seconds: Annotated[float, typer.Option("--seconds", help="Of each of the four tries.")] = 3.0,
    rate: Annotated[
        float, typer.Option("--rate", metavar="MBIT", help="What the path should carry, if known.")
    ] = 0.0,
    json_path: Annotated[
        Path | None,
        typer.Option("--json", metavar="PATH", help="Write the figures here.", show_default=False),
    ] = None,
) -> None:
    """Measure the link from this site to the coordinator, and say what would speed it up.

    The coordinator must be running. A run that is going on is slowed for some seconds, and makes
    the link look slower than it is.
    """
    check_address("HOST:PORT", address)
    _check("--channels", channels, 1, MOST_CHANNELS)
    _check("--seconds", seconds, 0.5, MOST_SECONDS)
    _check("--rate", rate, 0, 1e6)
    if json_path is not None:
        with _writing(json_path), json_path.open("a"):
            pass  # told before the measurement, not after it
    # Imported late, so that a wrong word is told at once.
    from fedwan.link.advice import advise
    from fedwan.link.measure import measure
    from fedwan.link.tls import Identity

    found = measure(address, Identity.load(identity), channels, seconds)
    advice = advise(found, rate)
    for line in _lines(found, advice):
        typer.echo(line)
    if json_path is not None:
        figures = asdict(found) | {"advice": None if advice is None else asdict(advice)}
        with _writing(json_path):
            json_path.write_text(json.dumps(figures, indent=2) + "\n")


def _check(name: str, value: float, least: float, most: float) -> None:
    if not least <= value <= most:
        raise ConfigError(f"{name} = {value:g} is out of range; choose {least:g} to {most:g}")


def _lines(found: Measurement, advice: Advice | None) -> list[str]:
    loaded_ms = max(found.up.rtt_ms, found.down.rtt_ms)
    rows = [
        ("link", f"{found.site} to {found.address}"),
        ("round trip", f"{found.rtt_ms:.1f} ms, {loaded_ms:.1f} ms under load"),
        ("up", _way(found.up, found.channels)),
        ("down", _way(found.down, found.channels)),
        ("site", _machine(found.here)),
        ("coordinator", _machine(found.there)),
    ]
    if advice is None:
        rows.append(("advice", "nothing to mend"))
    else:
        rows.append(("advice", f"on the {advice.machine}: {advice.command}  ({advice.text})"))
    return [f"{name:<11}  {text}" for name, text in rows]


def _way(way: Way, channels: int) -> str:
    again = "?" if way.again is None else f"{way.again:.3%}"
    return (
        f"{way.one_mbit:8.1f} Mbit/s on 1 channel, {way.all_mbit:8.1f} on {channels}; "
        f"{again} sent again; {way.congestion or 'unknown'}"
    )


def _machine(machine: Machine) -> str:
    allowed = " ".join(machine.allowed) or "unknown"
    sizes = [f"{x[-1] / 1e6:.1f} MB" if x else "unknown" for x in (machine.receive, machine.send)]
    return f"allows {allowed}; buffers up to {sizes[0]} to receive, {sizes[1]} to send"


@contextmanager
def _writing(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise ConfigError(
            f"--json = {str(path)!r} cannot be written ({error.strerror}); choose another path"
        ) from None
