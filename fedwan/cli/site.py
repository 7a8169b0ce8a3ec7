"""`fedwan site SITE.yaml`: a site of a real deployment."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated

import typer

from fedwan._config_checks import check_address
from fedwan._config_tree import overlay, parse_words, read_yaml
from fedwan.cli.failures import crash_reports
from fedwan.cli.run import Words
from fedwan.errors import ConfigError

__all__ = ["SiteFile", "load_site", "site"]


@dataclass
class SiteFile:
    """What SITE.yaml holds; relative paths begin at the file's own folder."""

    site: str = ""
    """The site's name, the common name of its certificate."""
    identity: str = ""
    """Folder with `ca.crt`, `identity.crt` and `identity.key`, made by `fedwan pki issue`."""
    door: str = ""
    """`host:port` of the coordinator's front door."""
    dir: str = ""
    """Folder for the site's checkpoints and logs."""


def site(
    path: Annotated[
        Path, typer.Argument(metavar="SITE.yaml", help="The site's file.", show_default=False)
    ],
    words: Words = None,
) -> None:
    """Serve a site: take part in whatever the coordinator runs, until stopped.

    SITE.yaml has four keys:

    site: its name, as in its certificate

    identity: the folder that `fedwan pki issue` made

    door: host:port of the coordinator's front door

    dir: a folder for checkpoints and logs
    """
    settings = load_site(path, words or [])
    # Imported late, so that a wrong file is told at once.
    from fedwan.flower.site import SiteServiceConfig, serve_site

    with crash_reports(Path(settings.dir)):
        serve_site(
            SiteServiceConfig(
                name=settings.site,
                identity=Path(settings.identity),
                dir=Path(settings.dir),
                door=settings.door,
            )
        )


def load_site(path: Path, words: list[str]) -> SiteFile:
    """Read and check a site's file, its paths absolute.

    Args:
        path: of SITE.yaml.
        words: `key=value` words; their relative paths begin at the file's folder as well.

    Raises:
        ConfigError: no such file, an unknown key, a key that is missing, or a door that is no
            host:port.
    """
    settings = overlay(SiteFile(), read_yaml(path), parse_words(words, SiteFile))
    for setting in fields(SiteFile):
        if not getattr(settings, setting.name):
            raise ConfigError(
                f"{str(path)!r} has no {setting.name!r}; add a line {setting.name}: …"
            )
    check_address("door", settings.door)
    base = path.parent.absolute()
    settings.identity = str(base / settings.identity)
    settings.dir = str(base / settings.dir)
    return settings
