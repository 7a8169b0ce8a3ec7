"""What a site's owner has decided: who it is, where things lie, and what code may run there.

`SITE.yaml` is read and checked by `fedwan site`; its processes pass the same values on as JSON.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self

from fedwan.errors import WireError

__all__ = ["SiteData", "SiteFile"]


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
    """Folder with `ca.crt`, `identity.crt` and `identity.key`."""
    door: str = ""
    """`host:port` of the coordinator's front door."""
    dir: str = ""
    """Folder for the site's checkpoints and logs; one service at a time."""
    data: SiteData = field(default_factory=SiteData)
    command: str = ""
    """The training script of runs with `workload=command`, as in `torchrun --nproc-per-node 8
    train.py`; it starts in the file's own folder."""
    recipes: list[str] = field(default_factory=list)
    """Recipes that may run here, of those that are installed; empty for all of them."""
    folder: str = ""
    """Where `command` starts; not to be written: the file's own folder."""

    def write(self, path: Path) -> None:
        """Pass the values on to another process of this machine."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(self)))

    @classmethod
    def read(cls, path: Path) -> Self:
        """What `write` wrote.

        Raises:
            WireError: it is not there, or something else.
        """
        try:
            values: dict[str, Any] = json.loads(path.read_text())
            return cls(**values | {"data": SiteData(**values["data"])})
        except (OSError, ValueError, TypeError, KeyError) as error:
            raise WireError(
                f"{path} is no site's settings ({type(error).__name__}: {error}); start this "
                "SuperNode with `fedwan site`"
            ) from None
