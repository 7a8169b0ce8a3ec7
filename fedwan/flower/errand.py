"""What the coordinator service tells its ServerApp beside the configuration.

A file in the run's folder: it stays on the coordinator's machine, while Flower's run config
travels to every site.
"""

from __future__ import annotations

import json
import uuid
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

from fedwan.errors import CheckpointError

__all__ = ["Errand"]


@dataclass(frozen=True)
class Errand:
    """One start of a run."""

    run_id: str
    """Of the run; a resumed run keeps it, so that sites still at work rejoin."""
    identity: str
    """The coordinator's identity folder."""
    resume: bool
    """Whether to go on from the last checkpoint."""

    @classmethod
    def begin(cls, out: Path, identity: Path, *, resume: bool) -> Self:
        """Write the errand of a new start.

        Args:
            out: the run's folder.
            identity: the coordinator's identity folder.
            resume: go on with the run in `out`.

        Raises:
            CheckpointError: there is no run to go on with.
        """
        run_id = cls.read(out).run_id if resume else uuid.uuid4().hex
        errand = cls(run_id, str(identity.absolute()), resume)
        path = _path(out)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(asdict(errand)))
        return errand

    @classmethod
    def read(cls, out: Path) -> Self:
        """The errand of the last start.

        Raises:
            CheckpointError: there is none in this folder.
        """
        path = _path(out)
        try:
            return cls(**json.loads(path.read_text()))
        except (OSError, ValueError, TypeError) as error:
            raise CheckpointError(
                f"{out} holds no run to go on with ({path.name}: {type(error).__name__}); "
                "start it without --resume, or give the folder of the run"
            ) from error


def _path(out: Path) -> Path:
    return out / "flower" / "errand.json"
