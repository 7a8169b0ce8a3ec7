"""A site's own checkpoint: all that the coordinator does not have.

The checkpoint of a version is taken when the steps that lead to it are complete, before their
contribution leaves: networks, inner optimisers, random generators, what the script names as its
`state`, and what error feedback owes. So whenever a site dies, its successor either sends the same
contribution again or goes on from the version that it became part of; no step is lost, and none is
taken twice.

Where sites go on stepping while bytes travel, a successor sends nothing again: it takes the global
weights, and of its nearest checkpoint the rest. There the checkpoint is written beside the steps.

Each process of a site writes its own file, with its own pieces; a version counts once all have one.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any, NamedTuple

from fedwan.errors import CheckpointError
from fedwan.site.beside import beside_steps
from fedwan.site.group import Group, local
from fedwan.site.host_copy import HostCopy
from fedwan.site.replica import Replica
from fedwan.site.stateful import (
    Stateful,
    load_random_state,
    pack,
    pack_value,
    random_state,
    unpack,
    unpack_value,
)
from fedwan.state import (
    State,
    add_prefix,
    read_tensors,
    read_tensors_meta,
    select_prefix,
    write_tensors,
)

__all__ = ["Ledger", "SiteCheckpoints", "Work"]

log = logging.getLogger(__name__)


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
    """What error feedback owed before the contribution was encoded; at rank 0, as the next."""
    owed: State
    """What it owes afterwards."""
    work: Work
    versions: tuple[int, ...]
    """Per fragment, the version at which `owed` is owed."""


class SiteCheckpoints:
    """Checkpoints of one process of a site in one run.

    Written beside the steps, a checkpoint costs the step loop a copy of what goes into it. Memory:
    that copy, as large as the file, kept until `close`; and while the file is written, what error
    feedback owed when it was taken. One is written at a time. A disk that takes longer than the
    time between two makes the next `save` wait: none is left out, so that it depends on versions
    alone what a successor finds.
    """

    def __init__(
        self,
        folder: Path,
        group: Group,
        replica: Replica,
        hook_state: State,
        state: Mapping[str, Stateful],
        *,
        is_beside: bool = False,
    ) -> None:
        self._folder = folder
        self._group = group
        self._replica = replica
        self._hook_state = hook_state
        self._state = state
        self._ending = ".safetensors" if group.rank == 0 else f".rank{group.rank}.safetensors"
        self._writer = beside_steps(1, "checkpoint") if is_beside else None
        self._writing: Future[None] | None = None
        self._copy = HostCopy()

    def versions(self) -> list[int]:
        """Versions that all processes have whole checkpoints of, in order; collective."""
        own = self._group.collect(self._own_versions())
        if own[0]:
            self._group.lead(lambda: self._check_processes(max(own[0])))
        return sorted(set.intersection(*own))

    def _check_processes(self, version: int) -> None:
        num = read_tensors_meta(self._path(version)).get("processes")
        if num != self._group.size:
            raise CheckpointError(
                f"checkpoint {self._path(version)} is of {num} processes, this site has "
                f"{self._group.size}; start as many, or move the folder away"
            )

    def _own_versions(self) -> set[int]:
        length = len("site-") + 8
        names = [path.name for path in self._folder.glob(f"site-*{self._ending}")]
        return {int(n[5:length]) for n in names if n[length:] == self._ending}

    def _path(self, version: int) -> Path:
        return self._folder / f"site-{version:08d}{self._ending}"

    def save(self, version: int, durable_version: int, ledger: Ledger) -> None:
        """Write the checkpoint of a version, and drop those that nobody can need any more."""
        self.settle()
        if self._group.size > 1:
            self._group.agree("weights", self._replica.same_sha256())
        inner = self._replica.inner
        moving = (
            add_prefix("model", self._replica.pieces())
            | add_prefix("optimizer", {n: local(v) for n, v in inner.state().items()})
            | add_prefix("hook", self._hook_state)
        )
        # Where nothing was sent since, both are the same tensors: written once.
        owed = {n: v for n, v in ledger.owed.items() if v is not ledger.residual.get(n)}
        # Made anew each time: these need no copy.
        still = (
            add_prefix("residual", ledger.residual)
            | add_prefix("owed", owed)
            | add_prefix("random", random_state())
            | {"groups:": pack_value("an optimiser's param_groups", inner.groups())}
            | {f"state:{name}": pack(name, item) for name, item in self._state.items()}
        )
        meta = {
            "version": version,
            "versions": ledger.versions,
            "processes": self._group.size,
            **ledger.work._asdict(),
        }
        if self._writer is None:
            self._write(version, durable_version, moving | still, meta)
        else:
            tensors = self._copy.take(moving) | still
            self._writing = self._writer.submit(
                self._write, version, durable_version, tensors, meta
            )

    def _write(
        self, version: int, durable_version: int, tensors: State, meta: Mapping[str, Any]
    ) -> None:
        write_tensors(self._path(version), tensors, meta)
        for old in self._own_versions():
            # Later ones are of steps that were taken back when the coordinator resumed.
            if old > version or old < min(version, durable_version):
                self._path(old).unlink(missing_ok=True)

    def settle(self) -> None:
        """Wait until nothing is being written."""
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
        """Restore everything as it stood when the steps to `version` were complete."""
        began = time.monotonic()
        tensors, meta = read_tensors(self._path(version))
        replica = self._replica
        replica.load_pieces(select_prefix("model", tensors), with_model=with_model)
        replica.load_optimizers(select_prefix("optimizer", tensors))
        groups = unpack_value("an optimiser's param_groups", tensors["groups:"])
        replica.inner.load_groups(groups)
        hook = select_prefix("hook", tensors)
        for name in self._hook_state.keys() & hook.keys():
            self._hook_state[name].copy_(hook[name])
        kept = select_prefix("state", tensors)
        for name, item in self._state.items():
            if name in kept:
                unpack(name, item, kept[name])
        load_random_state(select_prefix("random", tensors))
        residual = select_prefix("residual", tensors)
        log.info("checkpoint of version %d read in %.2f s", version, time.monotonic() - began)
        return Ledger(
            residual,
            residual | select_prefix("owed", tensors),
            Work(int(meta["steps"]), int(meta["samples"])),
            tuple(int(version) for version in meta["versions"]),
        )
