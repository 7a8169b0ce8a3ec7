"""`fedwan pki`: the authority of a federation and the identities that it issues."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from fedwan.cli.arguments import argument, option

app = typer.Typer(
    name="pki",
    help="Make the authority of a federation, and issue and revoke identities.",
    no_args_is_help=True,
)

Folder = Annotated[Path, typer.Option("--pki", metavar="DIR", help="The authority's folder.")]
SiteName = Annotated[str, argument("SITE", "Its name.")]
Days = Annotated[int, typer.Option("--days", help="How long the identity is valid.")]

DAYS = 90
"""As `fedwan.link.pki` has it, which is loaded only when it is needed."""


@app.command("init")
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder to make.")] = Path(
        "pki"
    ),
    host: Annotated[
        list[str] | None,
        option("--host", "NAME", "A name or address that sites dial; repeat it for more."),
    ] = None,
    days: Days = DAYS,
    renew: Annotated[
        bool, typer.Option("--renew", help="Only give the coordinator of DIR a new identity.")
    ] = False,
) -> None:
    """Make an authority, and the identity of the coordinator in DIR/coordinator."""
    from fedwan.link import pki

    hosts = host or []
    if renew:
        pki.renew(directory, hosts, days)
    else:
        pki.init(directory, hosts, days)
        typer.echo(f"authority    {directory / 'ca'}  (keep it offline; whoever has it may join)")
    typer.echo(f"coordinator  {directory / 'coordinator'}  (valid for {days} days)")


@app.command("issue")
def issue(name: SiteName, directory: Folder = Path("pki"), days: Days = DAYS) -> None:
    """Make the identity of a site in DIR/SITE; copy that folder to the site."""
    from fedwan.link import pki

    pki.issue(directory, name, days)
    typer.echo(f"site {name}  {directory / name}  (valid for {days} days)")


@app.command("revoke")
def revoke(name: SiteName, directory: Folder = Path("pki")) -> None:
    """Shut a site out; a coordinator elsewhere needs the new DIR/coordinator/crl.pem."""
    from fedwan.link import pki

    pki.revoke(directory, name)
    typer.echo(f"site {name} is revoked  {directory / 'coordinator' / 'crl.pem'}")
