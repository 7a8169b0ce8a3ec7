"""`status` and `sites`: what a run's coordinator does, and who takes part."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from fedwan.cli.arguments import RunFolder, argument, resuming
from fedwan.cli.folder import holds_run
from fedwan.coordinator.control import ask
from fedwan.errors import ConfigError
from fedwan.flower.status import Status, service_file
from fedwan.output.units import aligned, bytes_text, duration_text

Json = Annotated[bool, typer.Option("--json", help="Print JSON instead.")]


def status(run: RunFolder, as_json: Json = False) -> None:
    """Say where a run stands: for whom it waits, since when, and what would let it go on."""
    found = ask(run, {"ask": "status"}) or _of_files(run)
    if as_json:
        typer.echo(json.dumps(found, indent=2))
        return
    typer.echo(
        f"version {found['version']} of {found['versions'] or 'as many as the script makes'}"
    )
    typer.echo(found["text"])
    _print_sites(found["sites"])
    for row in found["sites"]:
        if row["error"]:
            typer.echo(f"{row['site']}: {row['error']}")


def sites(
    run: RunFolder,
    action: Annotated[
        Literal["list", "admit", "drain", "eject"], argument("list|admit|drain|eject")
    ],
    site: Annotated[str, argument("[SITE]", "Whom to admit, drain or eject.")] = "",
    as_json: Json = False,
) -> None:
    """List a run's sites, or decide who takes part while it goes on.

    drain: what the site is sending is merged, then it leaves with exit status 0.

    eject: nothing more of it is taken; it ends with exit status 2.

    admit: takes either back.
    """
    if (action == "list") == bool(site):
        raise ConfigError(
            f"SITE = {site!r}: `list` takes none; admit, drain and eject take one of the run's"
        )
    found = ask(run, {"ask": "status"} if action == "list" else {"ask": action, "site": site})
    if found is None:
        raise ConfigError(f"no coordinator answers for {run}; {way_on(run)}")
    if action == "list":
        found = {"sites": found["sites"]}
    if as_json:
        typer.echo(json.dumps(found, indent=2))
    elif action == "list":
        _print_sites(found["sites"])
    else:
        typer.echo(found["text"])


def _print_sites(rows: list[dict[str, Any]]) -> None:
    head = ("site", "state", "from version", "last heard", "contributions", "up", "down")
    table: list[tuple[str, ...]] = [head]
    for row in rows:
        heard = f"{duration_text(time.time() - row['heard'])} ago" if row["heard"] else "never"
        first = (row["site"], row["state"], str(row["version"]), heard)
        up, down = bytes_text(row["bytes_up"]), bytes_text(row["bytes_down"])
        table.append((*first, str(row["contributions"]), up, down))
    for line in aligned(table, left=len(head)) if rows else ():
        typer.echo(line)


def _of_files(run: Path) -> dict[str, Any]:
    """Where a run stands whose coordinator does not run."""
    from fedwan.output.board import read_run

    board = read_run(run)
    h, text = max(1, board.config.h), f"no coordinator answers for {run}; {way_on(run)}"
    text = f"stopped: {board.stopped}\n{text}" if board.stopped else text
    versions = {"version": board.step // h, "versions": board.config.steps // h}
    return {"is_running": False, **versions, "text": text, "waits_for": [], "sites": []}


def way_on(run: Path) -> str:
    """With a run whose coordinator does not answer."""
    service = Status.read(service_file(run))
    if service is not None and service.outcome == "running" and not service.is_gone:
        return "it is starting or ending: ask again"
    if (run / "summary.json").exists():
        return "the run is done"
    if not holds_run(run):
        return "it ended before its first checkpoint; start it again"
    return f"`{resuming(run)}` goes on with it"
