"""A site's own checkpoint: all that the coordinator does not have.

Model, inner optimisers, random generators, the loader's position, and what error feedback owes, as
they stood at a version. The latest one is kept, and the one at the version that the coordinator
would resume from.
"""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from fedwan.data.stream import BatchStream
from fedwan.rng import NamedGenerators, load_torch_random_state, torch_random_state
from fedwan.site.replica import Replica
from fedwan.state import State, add_prefix, read_tensors, select_prefix, write_tensors

__all__ = ["SiteCheckpoints"]


class _Parts(NamedTuple):
    replica: Replica
    stream: BatchStream
    rng: NamedGenerators


class SiteCheckpoints:
    """Checkpoints of one site in one run.

    Args:
        folder: theirs alone.
        replica: networks and optimisers.
        stream: of batches.
        rng: of draws.
    """

    def __init__(
        self, folder: Path, replica: Replica, stream: BatchStream, rng: NamedGenerators
    ) -> None:
        self._folder = folder
        self._parts = _Parts(replica, stream, rng)

    def versions(self) -> list[int]:
        """Versions that there are checkpoints of, in order."""
        return sorted(int(path.stem.partition("-")[2]) for path in self._folder.glob("site-*"))

    def _path(self, version: int) -> Path:
        return self._folder / f"site-{version:08d}.safetensors"

    def save(self, version: int, durable_version: int, residual: State) -> None:
        """Write the checkpoint of a version, and drop those that nobody can need any more."""
        replica, stream, rng = self._parts
        tensors = (
            add_prefix("model", replica.base)
            | add_prefix("optimizer", replica.optimizer_state())
            | add_prefix("stream", stream.state())
            | add_prefix("rng", rng.state())
            | add_prefix("torch", torch_random_state())
            | add_prefix("residual", residual)
        )
        write_tensors(self._path(version), tensors, {"version": version})
        for old in self.versions():
            if old < version and old != durable_version:
                self._path(old).unlink(missing_ok=True)

    def load(self, version: int, with_model: bool) -> State:
        """Restore everything as it stood at `version`; returns the residual.

        Args:
            version: one of `versions()`.
            with_model: whether to take the model too, instead of the coordinator's.

        Raises:
            CheckpointError: the file is truncated, or of another model or shard.
        """
        replica, stream, rng = self._parts
        tensors, _ = read_tensors(self._path(version))
        if with_model:
            replica.adopt(select_prefix("model", tensors))
        replica.load_optimizers(select_prefix("optimizer", tensors))
        rng.load_state(select_prefix("rng", tensors))
        stream.load_state(select_prefix("stream", tensors))
        load_torch_random_state(select_prefix("torch", tensors))
        return select_prefix("residual", tensors)
