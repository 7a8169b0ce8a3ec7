"""`fedwan doctor`: what is wrong with a run, or holds its link back, and what would help."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import click
import typer
import typer.core

from fedwan.cli.arguments import IdentityFolder, JsonPath, RunFolder, Words, argument, write_option
from fedwan.cli.members import way_on
from fedwan.config import load
from fedwan.config_tree import check_address
from fedwan.errors import ConfigError
from fedwan.output.units import sites_text

if TYPE_CHECKING:
    from fedwan.doctor.diagnosis import Finding
    from fedwan.link.measure import Measurement, Way
    from fedwan.output.board import Board

KEYS = ("link.congestion", "link.pace_mbit")
LEAST_ROUNDS = 3
"""Before that most rules stay silent, whatever is wrong."""
_OF_RUN = "RUN_DIR"
"""The command for a run's folder, by a name that is no folder's: one may well be called `run`."""


class _RunOrCommand(typer.core.TyperGroup):
    """A group whose first word may be a run's folder instead of a command."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        if args and args[0] not in self.commands and args[0] not in ctx.help_option_names:
            args = [_OF_RUN, *args]
        return super().parse_args(ctx, args)


app = typer.Typer(
    name="doctor",
    help="Find what is wrong with a run, or holds its link back, and what would help.",
    cls=_RunOrCommand,
    no_args_is_help=True,
    subcommand_metavar=f"{_OF_RUN} | link HOST:PORT",
)


@app.command(_OF_RUN)
def run(run_dir: RunFolder, json_path: JsonPath = None) -> None:
    """Say what is wrong with a run, in which round, site and network, why, and what mends it.

    Works for runs that are still going on, or were killed, too; `fedwan status` says for whom they
    wait. Whatever is found, the exit code is 0: it is advice.
    """
    from fedwan.doctor.diagnosis import diagnose
    from fedwan.output.board import read_run
    from fedwan.output.records import Record

    records = list[Record]()
    board = read_run(run_dir, records.append)
    findings = [
        found._replace(mend=f"{found.mend}; {way_on(run_dir)}")
        if found.kind == "stopped"
        else found
        for found in diagnose(records)
    ]
    found = json.dumps([finding._asdict() for finding in findings], indent=2)
    write_option(json_path, f"{found}\n")
    typer.echo(f"{run_dir}: {_headline(board)}\n")
    if not findings:
        early = f"too early to tell: that takes {LEAST_ROUNDS} rounds or more"
        typer.echo(early if board.version < LEAST_ROUNDS else "nothing to mend")
    for finding in findings:
        typer.echo("\n".join(_text(finding)))


def _headline(board: Board) -> str:
    from fedwan.doctor.chart import FEWEST_OTHERS

    if not board.version:
        return "no round yet"
    num_sites = sum(row.step > 0 for row in board.sites.values())
    done = "done" if board.is_done else "not finished"
    few = "; sites are compared with each other from three sites on"
    text = f"{board.version} rounds, {sites_text(num_sites)}, {done}"
    return text + (few if num_sites <= FEWEST_OTHERS else "")


def _text(finding: Finding) -> Iterator[str]:
    site = f"site {finding.site}" if finding.site else "all sites"
    network = finding.network or "all networks"
    yield f"round {finding.version}, {site}, {network}: {finding.kind.replace('_', ' ')}"
    # The path in a command stays whole.
    wrapper = textwrap.TextWrapper(100, break_long_words=False, break_on_hyphens=False)
    wrapper.subsequent_indent = " " * 8
    for name, text in (("why", finding.why), ("mend", finding.mend)):
        wrapper.initial_indent = f"  {name:<6}"
        yield from wrapper.wrap(text)


@app.command("link")
def link(
    address: Annotated[str, argument("HOST:PORT", "The coordinator's data plane.")],
    identity: IdentityFolder,
    words: Words = None,
    seconds: Annotated[float, typer.Option("--seconds", help="Of a transfer each way.")] = 3.0,
    json_path: JsonPath = None,
) -> None:
    """Measure the link from this site to the coordinator, and say what would speed it up.

    It measures as words such as link.congestion=cubic link.pace_mbit=97 say.

    The coordinator must be running; up to 256 MiB go each way. A run that is going on is slowed for
    some seconds, and makes the link look slower than it is.
    """
    check_address("HOST:PORT", address)
    settings = load(None, words or []).link
    for word in words or []:
        if word.partition("=")[0] not in KEYS:
            raise ConfigError(f"{word} has no effect on a measurement; leave it out")
    if not 0.5 <= seconds <= 30:
        raise ConfigError(f"--seconds = {seconds:g} is out of range; choose 0.5 to 30")
    write_option(json_path)  # told before the measurement, not after it
    # Imported late, so that a wrong word is told at once.
    from fedwan.link.measure import advise, measure
    from fedwan.link.tcp import largest_send_buffer
    from fedwan.link.tls import Identity

    found = measure(address, Identity.load(identity), settings, seconds)
    advice = advise(found, largest_send_buffer()) or "nothing to mend"
    for name, text in (*_link_rows(found), ("advice", advice)):
        typer.echo(f"{name:<11}  {text}")
    write_option(json_path, json.dumps(asdict(found), indent=2) + "\n")


def _link_rows(found: Measurement) -> Iterator[tuple[str, str]]:
    pace = f", up at {found.pace_mbit:g} Mbit/s at most" if found.pace_mbit else ""
    channels = "1 channel" if found.channels == 1 else f"{found.channels} channels"
    yield "link", f"{found.site} to {found.address}, {channels}{pace}"
    yield "round trip", f"{found.rtt_ms:.1f} ms, {found.loaded_ms:.1f} ms while uploading"
    yield "up", _way(found.up)
    yield "down", _way(found.down)


def _way(way: Way) -> str:
    again = "" if way.again is None else f", {way.again:.3%} sent again"
    return f"{way.mbit:8.1f} Mbit/s{again}; {way.congestion or 'unknown'}"
