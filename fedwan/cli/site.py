"""`fedwan site SITE.yaml`: a site of a real deployment."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

from fedwan._config_checks import check_address
from fedwan._config_tree import overlay, parse_words, read_yaml
from fedwan.cli.arguments import Words, argument
from fedwan.cli.failures import crash_reports
from fedwan.errors import ConfigError
from fedwan.flower.site_file import SiteFile

__all__ = ["load_site", "site"]

_NEEDED = ("site", "identity", "door", "dir")


def site(
    path: Annotated[Path, argument("SITE.yaml", "The site's file.")],
    words: Words = None,
) -> None:
    """Serve a site: take part in whatever the coordinator runs, until stopped.

    SITE.yaml has four keys: site (its name), identity (the folder that `fedwan pki issue` made),
    door (host:port of the coordinator's front door) and dir (for checkpoints and logs).

    It may have more: data.path, data.show_samples, command and recipes; see docs/deploy.md.
    """
    settings = load_site(path, words or [])
    # Imported late, so that a wrong file is told at once.
    from fedwan.flower.site import serve_site

    with crash_reports(Path(settings.dir)):
        serve_site(settings)


def load_site(path: Path, words: list[str]) -> SiteFile:
    """Read and check a site's file and words; relative paths begin at the file's folder.

    Raises:
        ConfigError: no such file, a key that is unknown or missing, or a door that is no host:port.
    """
    settings = overlay(SiteFile(), read_yaml(path), parse_words(words, SiteFile))
    for key in _NEEDED:
        if not getattr(settings, key):
            raise ConfigError(f"{str(path)!r} has no {key!r}; add a line {key}: …")
    check_address("door", settings.door)
    base = path.parent.absolute()
    settings.folder = str(base)
    settings.identity = str(base / settings.identity)
    settings.dir = str(base / settings.dir)
    if settings.data.path:
        settings.data.path = str(base / settings.data.path)
    return settings
