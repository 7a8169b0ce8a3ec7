"""A site's own checkpoint: all that the coordinator does not have.

The checkpoint of a version is taken when the steps that lead to it are complete, before their
contribution leaves: networks, inner optimisers, random generators, the loader's position, and what
error feedback owes. So whenever a site dies, its successor either sends the same contribution again
or goes on from the version that it became part of; no step is lost, and none is taken twice.

Where sites go on stepping while bytes travel, a successor sends nothing again: it takes the global
weights, and of its nearest checkpoint the rest. There the checkpoint is written beside the steps.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from torch import Tensor

from fedwan.data.loader import Loader
from fedwan.rng import NamedGenerators, load_torch_random_state, torch_random_state
from fedwan.site.beside import beside_steps
from fedwan.site.host_copy import HostCopy
from fedwan.site.replica import Replica
from fedwan.state import State, add_prefix, read_tensors, select_prefix, write_tensors
from fedwan.workloads.moments import is_moment

__all__ = ["Ledger", "SiteCheckpoints", "Work"]

log = logging.getLogger(__name__)


class _Parts(NamedTuple):
    replica: Replica
    stream: Loader
    rng: NamedGenerators


class Work(NamedTuple):
    """Steps and samples, of a contribution or of all so far."""

    steps: int
    samples: int

    def since(self, earlier: Work) -> Work:
        """What was done after `earlier`."""
        return Work(self.steps - earlier.steps, self.samples - earlier.samples)


class Ledger(NamedTuple):
    """What a checkpoint says beside the state of networks, optimisers and data."""

    residual: State
    """What error feedback owed before the contribution was encoded."""
    owed: State
    """What it owes afterwards."""
    work: Work
    versions: tuple[int, ...]
    """Per fragment, the version at which `owed` is owed."""


class SiteCheckpoints:
    """Checkpoints of one site in one run.

    Written beside the steps, a checkpoint costs the step loop a copy of what goes into it. Memory:
    that copy, as large as the file, kept until `close`; and while the file is written, what error
    feedback owed when it was taken. One is written at a time. A disk that takes longer than the
    time between two makes the next `save` wait: none is left out, so that it depends on versions
    alone what a successor finds. Where other processes of the site hold moments, the steps wait for
    the file: it gets each moment as it is fetched, and no copy of all of them is made.

    Args:
        folder: theirs alone.
        replica: networks and optimisers.
        stream: of batches.
        rng: of draws.
        is_beside: write from a copy, in a thread; else `save` returns with the file on disk.
    """

    def __init__(
        self,
        folder: Path,
        replica: Replica,
        stream: Loader,
        rng: NamedGenerators,
        *,
        is_beside: bool = False,
    ) -> None:
        self._folder = folder
        self._parts = _Parts(replica, stream, rng)
        self._writer = beside_steps(1, "checkpoint") if is_beside else None
        self._writing: Future[None] | None = None
        self._copy = HostCopy()

    def versions(self) -> list[int]:
        """Versions that there are whole checkpoints of, in order."""
        return sorted(int(path.stem[5:]) for path in self._folder.glob("site-*.safetensors"))

    def _path(self, version: int) -> Path:
        return self._folder / f"site-{version:08d}.safetensors"

    def save(self, version: int, durable_version: int, ledger: Ledger) -> None:
        """Write the checkpoint of a version, and drop those that nobody can need any more.

        Args:
            version: that the completed steps lead to.
            durable_version: that the coordinator would resume from, as far as this site knows.
            ledger: what went into the contribution, and what is owed.

        Raises:
            OSError: it cannot be written; or the one before could not, beside the steps.
        """
        self.settle()
        replica, stream, rng = self._parts
        moving = (
            add_prefix("model", {n: v for n, v in replica.live.items() if not is_moment(n)})
            | add_prefix("local", replica.local)
            | add_prefix("optimizer", replica.optimizer_state())
            | add_prefix("kept", replica.kept)
            | add_prefix("stream", stream.state_dict())
            | add_prefix("rng", rng.state())
            | add_prefix("torch", torch_random_state())
        )
        # Where nothing was sent since, both are the same tensors: written once.
        owed = {n: v for n, v in ledger.owed.items() if v is not ledger.residual.get(n)}
        # Codecs make what is owed anew each time: it needs no copy.
        still = add_prefix("residual", ledger.residual) | add_prefix("owed", owed)
        meta = {"version": version, "versions": ledger.versions, **ledger.work._asdict()}
        if self._writer is None or any(value.is_meta for value in moving.values()):
            self._write(version, durable_version, moving | still, meta)
        else:
            tensors = self._copy.take(moving) | still
            self._writing = self._writer.submit(
                self._write, version, durable_version, tensors, meta
            )

    def _write(
        self, version: int, durable_version: int, tensors: State, meta: Mapping[str, Any]
    ) -> None:
        write_tensors(self._path(version), tensors, meta, self._fetch)
        for old in self.versions():
            # Later ones are of steps that were taken back when the coordinator resumed.
            if old > version or old < min(version, durable_version):
                self._path(old).unlink(missing_ok=True)

    def _fetch(self, name: str) -> Tensor:
        """What of a checkpoint lies with other processes of the site."""
        replica = self._parts.replica
        part, _, name = name.partition(":")
        return replica.holding.take(name) if part == "optimizer" else replica.take(name)

    def settle(self) -> None:
        """Wait until nothing is being written.

        Raises:
            OSError: what was could not be.
        """
        writing = self._writing
        if writing is not None:
            wait([writing])
            self._writing = None
            writing.result()

    def drop(self, version: int) -> None:
        """Remove the checkpoint of a version, if there is one or it is being written."""
        writing = self._writing
        if writing is not None:
            wait([writing])  # whether it could be written is told to who saves next
        self._path(version).unlink(missing_ok=True)

    def close(self) -> None:
        """Wait until nothing is being written, and give the copy's memory back.

        Raises nothing, so that it can end what failed for another reason: see `settle`.
        """
        if self._writer is not None:
            self._writer.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.warning("the last checkpoint could not be written: %s", error)
        self._copy = HostCopy()

    def load(self, version: int, with_model: bool) -> Ledger:
        """Restore everything as it stood when the steps to `version` were complete.

        Args:
            version: one of `versions()`.
            with_model: whether to take the networks too, or leave the coordinator's in them.

        Raises:
            CheckpointError: the file is truncated, or of another model or shard.
        """
        replica, stream, rng = self._parts
        tensors, meta = read_tensors(self._path(version))
        replica.load_local(select_prefix("local", tensors))
        if with_model:
            replica.load_live(select_prefix("model", tensors))
        replica.load_optimizers(select_prefix("optimizer", tensors))
        replica.load_kept(select_prefix("kept", tensors))
        rng.load_state(select_prefix("rng", tensors))
        stream.load_state_dict(select_prefix("stream", tensors))
        load_torch_random_state(select_prefix("torch", tensors))
        residual = select_prefix("residual", tensors)
        return Ledger(
            residual,
            residual | select_prefix("owed", tensors),
            Work(int(meta["steps"]), int(meta["samples"])),
            tuple(int(version) for version in meta["versions"]),
        )
