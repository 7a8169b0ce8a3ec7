"""What a site's process knows before any ticket arrives."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

__all__ = ["SiteSettings"]


@dataclass(frozen=True)
class SiteSettings:
    """A site's name, credentials and state folder."""

    name: str
    """The site's name, the common name of its certificate."""
    identity: Path
    """Folder with `ca.crt`, `identity.crt` and `identity.key`."""
    dir: Path
    """Folder of the site's state: checkpoints, logs."""
    data_path: str = ""
    """Folder of the site's data, in place of the run's `data.path`; empty takes that."""
    show_samples: bool = False
    """Whether samples that are made of the site's own inputs may leave it. No run's configuration
    can say so in the site's place."""
