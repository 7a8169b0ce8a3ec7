"""`fedwan pki`: the authority of a federation, and the identities that it signs."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from fedwan.cli.arguments import argument, option
from fedwan.errors import IdentityError

if TYPE_CHECKING:
    from cryptography import x509

    from fedwan.link.pki import Authority

app = typer.Typer(
    name="pki",
    help="Make the authority of a federation, and request, sign, renew and revoke identities.",
    no_args_is_help=True,
)

PASSPHRASE = "FEDWAN_PKI_PASSPHRASE"  # noqa: S105 (a name)
DAYS = 90
"""As `fedwan.link.pki` has it, which is loaded only when it is needed."""

Folder = Annotated[
    Path, typer.Option("--pki", metavar="DIR", help="The authority's folder.", readable=False)
]
Hosts = Annotated[
    list[str] | None,
    option("--host", "NAME", "A name or address that sites dial the coordinator at; repeatable."),
]
Days = Annotated[int, typer.Option("--days", help="How long the identity is valid.")]


@app.command("init")
def init(
    directory: Annotated[Path, typer.Argument(metavar="[DIR]", help="The folder to make.")] = Path(
        "pki"
    ),
) -> None:
    """Make an authority in DIR/ca, its key encrypted with a passphrase.

    The passphrase is asked for, or taken from FEDWAN_PKI_PASSPHRASE.
    """
    from fedwan.link.pki import Authority

    Authority.make(directory, _passphrase(is_new=True))
    typer.echo(f"authority {directory / 'ca'}: keep it offline; whoever has it may join")


@app.command("request")
def request(
    name: Annotated[str, argument("NAME", "A site's name, or `coordinator`.")],
    directory: Annotated[
        Path, typer.Argument(metavar="[DIR]", help="The folder of this party's identity.")
    ] = Path("identity"),
    host: Hosts = None,
) -> None:
    """Make a key where it is used, and DIR/identity.csr for the authority to sign.

    The key stays in DIR. A DIR that has one keeps it.
    """
    from fedwan.link import pki

    fingerprint, hosts = pki.request(directory, name, host or [])
    typer.echo(f"request {directory / 'identity.csr'}: bring it to the authority to be signed")
    typer.echo(f"key     {fingerprint}")
    _tell_hosts(name, hosts)


@app.command("sign")
def sign(
    path: Annotated[Path, argument("REQUEST", "What a party's `fedwan pki request` has made.")],
    directory: Folder = Path("pki"),
    days: Days = DAYS,
) -> None:
    """Sign a request; the files in DIR/NAME go into the party's folder, beside its key.

    Compare the key that is shown with what the party was shown: another one is somebody else's.
    """
    from fedwan.link import certificates

    authority = _open(directory)
    signed = authority.sign(path, days)
    name = _tell_signed(authority, signed, "ca.crt", "crl.pem")
    typer.echo(f"key     {certificates.fingerprint(signed.public_key())}")
    _tell_hosts(name, certificates.hosts_of(signed))


@app.command("renew")
def renew(
    name: Annotated[str, argument("NAME", "A site's name, or `coordinator`.")],
    directory: Folder = Path("pki"),
    host: Hosts = None,
    days: Days = DAYS,
) -> None:
    """Sign an identity again for its key; the one in use stays valid, so nothing stops."""
    authority = _open(directory)
    _tell_signed(authority, authority.renew(name, host or [], days))


@app.command("revoke")
def revoke(
    name: Annotated[str, argument("NAME", "A site's name, or `coordinator`.")],
    directory: Folder = Path("pki"),
) -> None:
    """Shut a party out within seconds; a coordinator elsewhere needs the new crl.pem."""
    typer.echo(f"{name} is revoked: {_open(directory).revoke(name)}")


def _open(directory: Path) -> Authority:
    from fedwan.link.pki import Authority

    return Authority.open(directory, _passphrase())


def _passphrase(*, is_new: bool = False) -> bytes:
    given = os.environ.get(PASSPHRASE)
    if given is None and not sys.stdin.isatty():
        verb = "gets" if is_new else "has"
        raise IdentityError(
            f"the authority's key {verb} a passphrase; set {PASSPHRASE}, or call this at a terminal"
        )
    if given is None:
        words = "passphrase of the authority's key"
        given = typer.prompt(words, hide_input=True, confirmation_prompt=is_new, err=True)
    return given.encode()


def _tell_signed(authority: Authority, signed: x509.Certificate, *more: str) -> str:
    """Of whom it is."""
    from fedwan.link.certificates import COORDINATOR
    from fedwan.link.tls import common_name

    name = common_name(signed)
    party, folder = "the site", authority.directory / name
    if name == COORDINATOR:
        party = "the coordinator"
    paths = [folder / file for file in ("identity.crt", *more)]
    files = " and ".join(str(path) for path in paths if path.exists())
    until, end = signed.not_valid_after_utc, authority.certificate.not_valid_after_utc
    why = f": the authority ends on {end:%Y-%m-%d}" if until == end else ""
    typer.echo(f"signed  {folder}: valid until {until:%Y-%m-%d}{why}")
    for other in authority.others(name):
        text = f"{other.subject.rfc4514_string()} too: once nobody has a certificate of it"
        typer.echo(f"trusts  {text}, take it out of {folder / 'ca.crt'}")
    if not (folder / "identity.key").exists():  # else they are where they belong
        typer.echo(f"next    bring {files} into {party}'s identity/")
    return name


def _tell_hosts(name: str, hosts: list[str]) -> None:
    from fedwan.link.certificates import COORDINATOR

    if name == COORDINATOR:
        typer.echo(
            f"hosts   {', '.join(hosts)}: sites dial it at one of them; a --host is given with "
            "all the others"
        )
