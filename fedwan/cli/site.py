"""`fedwan site SITE.yaml`: a site of a real deployment."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated

import typer

from fedwan._config_checks import check_address
from fedwan._config_tree import overlay, parse_words, read_yaml
from fedwan.cli.failures import crash_reports
from fedwan.cli.run import Words
from fedwan.errors import ConfigError

__all__ = ["SiteData", "SiteFile", "load_site", "site"]

_NEEDED = ("site", "identity", "door", "dir")


@dataclass
class SiteData:
    """Where this site's data are, and what of them may be shown."""

    path: str = ""
    """Their folder, in place of the run's `data.path`."""
    show_samples: bool = False
    """Whether pictures that are made of them, as `pix2pix` makes them, may leave the site."""


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
    data: SiteData = field(default_factory=SiteData)


def site(
    path: Annotated[
        Path, typer.Argument(metavar="SITE.yaml", help="The site's file.", show_default=False)
    ],
    words: Words = None,
) -> None:
    """Serve a site: take part in whatever the coordinator runs, until stopped.

    SITE.yaml has four keys, and may have a fifth:

    site: its name, as in its certificate

    identity: the folder that `fedwan pki issue` made

    door: host:port of the coordinator's front door

    dir: a folder for checkpoints and logs

    data.path: the folder of this site's data, in place of the run's

    data.show_samples: true lets pictures that are made of them leave the site
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
                data_path=settings.data.path,
                show_samples=settings.data.show_samples,
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
    for key in _NEEDED:
        if not getattr(settings, key):
            raise ConfigError(f"{str(path)!r} has no {key!r}; add a line {key}: …")
    check_address("door", settings.door)
    base = path.parent.absolute()
    settings.identity = str(base / settings.identity)
    settings.dir = str(base / settings.dir)
    if settings.data.path:
        settings.data.path = str(base / settings.data.path)
    return settings
