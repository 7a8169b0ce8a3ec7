"""A site's own checkpoint: all that the coordinator does not have.

The checkpoint of a version is taken when the steps that lead to it are complete: networks, inner
optimisers, random generators, what the script names as its `state`, and what error feedback owes.
It is on disk before the end of their contribution leaves. So whenever a site dies, its successor
either sends the same contribution again or goes on from the version that it became part of; no step
is lost, and none is taken twice.

Where sites go on stepping while bytes travel, a successor sends nothing again: it takes the global
weights, and of its nearest checkpoint the rest. There the checkpoint is written beside the steps.

Where a contribution was refused, and its site goes on from the same version with later data and
fresh optimisers, what it goes on with is written as well (`SiteCheckpoints.save_start`).

Where sites move their weights by updates, each fragment's global weights of its last two versions
are kept as well, written beside the steps. So who comes back fetches at most the updates that it
has missed.

Each process of a site writes a file of its own: rank 0 all that it has, the others what they have
otherwise, such as their pieces and generators. A version counts once all have one, of one start.
Who joins claims the folder: a process that another one has replaced, and that does not know it yet,
writes and deletes no checkpoint there any more.
"""

from __future__ import annotations

import hashlib
import io
import json
import logging
import pickle
import random
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from fedwan.errors import CheckpointError, SessionLost, UserError
from fedwan.files import replace_text
from fedwan.fragments import Fragment
from fedwan.pieces import is_cut, local
from fedwan.rng import lending
from fedwan.site.background import await_queue, background_threads, queued_until_now
from fedwan.site.meter import Work
from fedwan.site.replica import Replica
from fedwan.state import (
    State,
    add_prefix,
    check_tensors,
    checksums,
    read_tensors,
    read_tensors_meta,
    select_prefix,
    sweep,
    write_tensors,
)

log = logging.getLogger(__name__)

_SITE, _START, _GLOBAL = "site", "start", "global"
_ENDING = ".safetensors"
"""Of rank 0's files."""
_GROUPS = "an optimiser's param_groups"


@runtime_checkable
class Stateful(Protocol):
    """What a script keeps beside networks and optimisers: a loader, a scheduler, a GradScaler.

    As torch names it (`torch.distributed.checkpoint.stateful`). What it gives is written with
    `torch.save` and read back with `weights_only=True`: tensors and plain values.
    """

    def state_dict(self) -> dict[str, Any]:
        """Tensors and plain values."""
        ...

    def load_state_dict(self, state_dict: dict[str, Any], /) -> object:
        """Go on from what `state_dict` gave."""
        ...


class Ledger(NamedTuple):
    """What a checkpoint says beside the state of networks, optimisers and data."""

    residual: State
    """What error feedback owed before the contribution was encoded; at rank 0, as the next."""
    owed: State
    """What it owes afterwards."""
    work: Work
    versions: tuple[int, ...]
    """Per fragment, the version at which `owed` is owed."""


class Residuals:
    """What error feedback owes, per fragment, and at which version it was owed."""

    def __init__(self, num_fragments: int) -> None:
        self._owed: list[State] = [{} for _ in range(num_fragments)]
        self._versions = [0] * num_fragments

    def of(self, fragment: Fragment) -> State:
        """What is owed on a fragment."""
        return self._owed[fragment.index]

    def settle(self, fragment: Fragment, version: int, owed: State) -> None:
        """The contribution that leads to `version` was accepted."""
        self._owed[fragment.index] = owed
        self._versions[fragment.index] = version

    def ledger(
        self, work: Work, leaving: Mapping[int, tuple[int, State, State]] | None = None
    ) -> Ledger:
        """For a checkpoint.

        `leaving`: of fragments whose contributions are about to leave, by their numbers, the
        version that these lead to, and what is owed before and after they were encoded.
        """
        before = {name: value for state in self._owed for name, value in state.items()}
        after, versions = dict(before), list(self._versions)
        for index, (version, residual, owed) in (leaving or {}).items():
            versions[index] = version
            before |= residual
            after |= owed
        return Ledger(before, after, work, tuple(versions))

    def restore(
        self, fragments: Sequence[Fragment], versions: Sequence[int], ledger: Ledger | None
    ) -> None:
        """Take over what is still owed at these versions, and forget the rest.

        What was owed before a contribution that has been merged since is partly paid: sending it
        again would count it twice.
        """
        for fragment, version in zip(fragments, versions, strict=True):
            if ledger is not None and ledger.versions[fragment.index] == version:
                owed = {n: ledger.owed[n] for n in fragment.layout if n in ledger.owed}
                self.settle(fragment, version, owed)
            elif self._versions[fragment.index] != version:
                self.settle(fragment, version, {})


class SiteCheckpoints:
    """Checkpoints of one process of a site in one run.

    With `is_beside` they are written beside the steps, one at a time, as global weights always are.
    Memory: a copy as large as the file, kept until `close`; and while the file is written, what
    error feedback owed when it was taken. A slow disk makes the next `save` wait. The state of the
    strategy's hook is put back in place.
    """

    def __init__(
        self,
        folder: Path,
        site: str,
        replica: Replica,
        hook_state: State,
        state: Mapping[str, Stateful],
        *,
        every: int = 1,
        is_beside: bool = False,
    ) -> None:
        self._folder = folder
        self._site = site
        self._every = every
        self.durable_version = 0
        """That the coordinator would resume from, as far as known; older ones are dropped."""
        self._saved = 0
        self._session = ""
        self._group = group = replica.group
        self._replica = replica
        self._hook_state = hook_state
        self._state = state
        self._ending = f".rank{group.rank}{_ENDING}" if group.rank else _ENDING
        self._claim = folder / f"session{group.rank or ''}"
        self._is_beside = is_beside
        self._writer = background_threads(1, "checkpoint", replica.device)
        self._writing: Future[None] | None = None
        self._keeping: dict[int, Future[None]] = {}  # by fragment
        self._copies: State = {}
        # What a killed predecessor left half-written, and files with other bytes.
        for kind in (_SITE, _START, f"{_GLOBAL}-*"):
            sweep(folder, f"{kind}-????????{self._ending}")
        for kind in (_SITE, _START):
            for version in self._own_versions(kind):
                try:
                    check_tensors(self._path(version, kind))
                except CheckpointError as error:
                    # Nobody need do what would mend it.
                    log.warning("%s: goes on without it", str(error).rpartition("; ")[0])
                    self._path(version, kind).unlink()
                    # Without its start a version is no place to take steps again from.
                    self._path(version).unlink(missing_ok=True)

    def versions(self) -> list[int]:
        """Versions that all processes have whole checkpoints of, in order; collective."""
        return sorted(self._common(_SITE))

    def _common(self, kind: str) -> set[int]:
        found = {}
        for version in self._own_versions(kind):
            with suppress(CheckpointError):  # another process of this site has deleted it
                found[version] = read_tensors_meta(self._path(version, kind))

        def check() -> None:
            newest, size = max(found), self._group.size
            path, num = self._path(newest, kind), found[newest].get("processes")
            if num != size:
                raise UserError(
                    f"checkpoint {path} is of {num} processes, this site has {size}; start as "
                    "many, or move the folder away"
                )
            for version, meta in found.items():
                if "site" not in meta:
                    raise UserError(
                        f"checkpoint {path} is of an earlier version of fedwan; end the run with "
                        "that, or move the folder away"
                    )
                if (site := meta["site"]) != self._site:
                    raise UserError(
                        f"checkpoint {self._path(version, kind)} is of site {site!r}, and this is "
                        f"{self._site!r}; put its own back, or move the folder away"
                    )

        if self._group.lead(lambda: bool(found)):
            self._group.lead(check)
        # Of one start of the site: what rank 0 has written goes with what the others have not.
        own = self._group.collect({(v, meta.get("session")) for v, meta in found.items()})
        return {version for version, _ in set.intersection(*own)}

    def starts(self) -> set[int]:
        """Versions that all processes have a start of, see `save_start`; collective."""
        return self._common(_START)

    def claim(self, session: str) -> None:
        """From here on no other process of this site saves in this folder; collective."""
        self._session = self._group.lead(lambda: session)
        replace_text(self._claim, self._session)

    def check_claim(self) -> None:
        """A `SessionLost` if another process of this site has claimed the folder."""
        with suppress(FileNotFoundError):  # somebody has deleted the folder, and nobody claims it
            if self._session and self._claim.read_text() != self._session:
                raise SessionLost(
                    f"another process of this site goes on in {self._folder} in place of this one"
                )

    # Global weights ------------------------------------------------------------------------

    def keep_global(self, fragment: Fragment, version: int) -> None:
        """Write a fragment's global weights, which must not change before `await_global`."""
        if version % self._every == 0:
            base = {n: local(self._replica.base[n]) for n in self._own_base(fragment)}
            self.await_global(fragment)
            if not base:
                return
            kind, queued = f"{_GLOBAL}-{fragment.index}", queued_until_now(self._replica.device)

            def write() -> None:
                queued()
                path = self._path(version, kind)
                write_tensors(path, base, {}, check=self.check_claim)
                for other in self._own_versions(kind):
                    if other not in (version - 1, version):
                        self._path(other, kind).unlink(missing_ok=True)

            self._keeping[fragment.index] = self._writer.submit(write)

    def await_global(self, fragment: Fragment) -> None:
        """Wait until a fragment's global weights are written. Errors as for `save`."""
        if (keeping := self._keeping.pop(fragment.index, None)) is not None:
            keeping.result()

    def _own_base(self, fragment: Fragment) -> list[str]:
        """Of its global weights, those that this process writes: its pieces, or rank 0 all."""
        rank, base = self._group.rank, self._replica.base
        return [name for name in fragment.layout if not rank or is_cut(base[name])]

    def kept_global(self, fragment: Fragment) -> list[int]:
        """Versions of a fragment's global weights that all processes have kept, newest first."""
        kind = f"{_GLOBAL}-{fragment.index}"
        own = self._own_versions(kind) if self._own_base(fragment) else None
        kept = [versions for versions in self._group.collect(own) if versions is not None]
        return sorted(set.intersection(*kept), reverse=True)

    def load_global(self, fragment: Fragment, version: int) -> bool:
        """Have a fragment's global weights, if all processes have kept them; collective."""
        self.await_global(fragment)
        self._group.collect(None)  # rank 0's file, too, is whole
        tensors, kind = State(), f"{_GLOBAL}-{fragment.index}"
        own = self._own_base(fragment)
        with suppress(CheckpointError):  # missing or damaged: they can be had from the coordinator
            tensors = read_tensors(self._path(version, kind))[0] if own else {}
            if theirs := fragment.layout.keys() - own:
                first = self._path(version, kind, of_first=True)
                tensors |= read_tensors(first, names=theirs)[0]
        if not all(self._group.collect(tensors.keys() == fragment.layout.keys())):
            return False
        for name, value in tensors.items():
            local(self._replica.base[name]).copy_(value)
        return True

    def _own_versions(self, kind: str = _SITE) -> set[int]:
        start, end = len(kind) + 1, len(kind) + 9
        names = [path.name for path in self._folder.glob(f"{kind}-*{self._ending}")]
        return {int(n[start:end]) for n in names if n[end:] == self._ending}

    def _path(self, version: int, kind: str = _SITE, *, of_first: bool = False) -> Path:
        return self._folder / f"{kind}-{version:08d}{_ENDING if of_first else self._ending}"

    def _read(self, path: Path, prefix: str = "") -> tuple[State, dict[str, Any]]:
        """A checkpoint of this process, with what rank 0 has written for it."""
        tensors, meta = read_tensors(path, prefix)
        if theirs := {name for name in meta["shared"] if name.startswith(prefix)}:
            first = path.with_name(path.name.removesuffix(self._ending) + _ENDING)
            found, told = read_tensors(first, names=theirs)
            if told["session"] != meta["session"]:
                raise CheckpointError(
                    f"checkpoints {path} and {first} are of two starts; start the site again, or "
                    "move both away"
                )
            tensors |= found
        return tensors, meta

    def save(
        self,
        version: int,
        ledger: Ledger,
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        """Write the checkpoint that completed steps lead to, if one is due by `every`.

        An `OSError` if it cannot be written, or the one before could not, beside the steps; a
        `SessionLost` if another process of this site has claimed the folder.

        With `then` a thread writes, and calls it once that is done, or has failed with an error,
        which `settle` raises, too. Until `settle` returns nothing of it may change.
        """
        if version // self._every <= self._saved // self._every and version >= self._saved:
            if then is not None:
                then(None)
            return
        self._saved = version
        self._take(_SITE, version, ledger, then)

    def save_start(self, version: int, ledger: Ledger) -> None:
        """Write what a site goes on with whose steps from a version were refused.

        A successor that has lost what came of it takes the same steps again. Errors as for `save`.
        """
        self._take(_START, version, ledger)

    def _take(
        self,
        kind: str,
        version: int,
        ledger: Ledger,
        then: Callable[[BaseException | None], None] | None = None,
    ) -> None:
        self.settle()
        if not self._is_beside:  # who loses this checkpoint goes back to the weights before it
            for keeping in self._keeping.values():
                keeping.result()
        inner = self._replica.inner
        moments = inner.state()
        moving = (
            add_prefix("model", self._replica.pieces())
            | add_prefix("optimizer", {n: local(v) for n, v in moments.items()})
            | add_prefix("hook", self._hook_state)
        )
        # Where nothing was sent since, both are the same tensors: written once.
        owed = {n: v for n, v in ledger.owed.items() if v is not ledger.residual.get(n)}
        # Made anew each time: these need no copy.
        still = (
            add_prefix("residual", ledger.residual)
            | add_prefix("owed", owed)
            | add_prefix("random", random_state())
            | {"groups:": pack(_GROUPS, inner.groups())}
            | {f"state:{n}": pack(f"state[{n!r}]", s.state_dict()) for n, s in self._state.items()}
        )
        shared = self._shared(moving | still, moments)
        moving = {name: value for name, value in moving.items() if name not in shared}
        still = {name: value for name, value in still.items() if name not in shared}
        meta = {"version": version, "versions": ledger.versions, **ledger.work._asdict()}
        meta |= {"site": self._site, "processes": self._group.size, "session": self._session}
        meta |= {"shared": sorted(shared)}
        if self._is_beside:
            moving = self._copied(moving)
        queued = queued_until_now(self._replica.device)
        least = min(version, self.durable_version)

        def write() -> None:
            queued()
            await_queue(self._replica.device)  # what was copied is here
            path = self._path(version, kind)
            write_tensors(path, moving | still, meta, check=self.check_claim)
            # Later ones are of steps that were taken back when the coordinator resumed.
            for of, latest in ((_SITE, version), (_START, version - (kind == _SITE))):
                for old in self._own_versions(of):
                    if old > latest or old < least:
                        self._path(old, of).unlink(missing_ok=True)

        if self._is_beside or then is not None:
            self._writing = self._writer.submit(write)
            if then is not None:
                self._writing.add_done_callback(lambda writing: then(writing.exception()))
        else:
            write()

    def _shared(self, state: State, moments: State) -> set[str]:
        """What this process has alike with rank 0, which writes it; collective.

        A `UserError` where processes differ in weights that they must have alike.
        """
        if self._group.size == 1:
            return set()
        # Pieces are others at each process, but for those of replicas (HSDP).
        live = self._replica.live
        cut = {f"model:{name}" for name, value in live.items() if is_cut(value)}
        cut |= {f"optimizer:{name}" for name, value in moments.items() if is_cut(value)}
        own = checksums({name: value for name, value in state.items() if name not in cut})
        alike = "".join(own[f"model:{name}"] for name in self._replica.alike())
        self._group.agree("weights", hashlib.sha256(alike.encode()).hexdigest())
        firsts = self._group.lead(lambda: own)
        return {n for n, sum_ in own.items() if self._group.rank and firsts.get(n) == sum_}

    def _copied(self, moving: State) -> State:
        """As it stands, in the memory of the copy before; from a GPU, once its queue is done."""
        for name, value in moving.items():
            room = self._copies.get(name)
            if room is None or (room.shape, room.dtype) != (value.shape, value.dtype):
                room = torch.empty(value.shape, dtype=value.dtype, pin_memory=value.is_cuda)
            self._copies[name] = room.copy_(value.detach(), non_blocking=True)
        return {name: self._copies[name] for name in moving}

    def settle(self) -> None:
        """Wait until nothing is being written. Errors as for `save`."""
        writing, self._writing = self._writing, None
        if writing is not None:
            writing.result()

    def begin_anew(self) -> None:
        """Versions may be taken back: the next checkpoint is written, whatever was before."""
        self._saved = self.durable_version = 0

    def drop(self, version: int) -> None:
        """What led to this version was refused: nobody shall send it again.

        Errors as for `save`.
        """
        self.check_claim()
        self._saved = min(self._saved, version - 1)
        if (writing := self._writing) is not None:
            wait([writing])  # whether it could be written is told to who saves next
        self._path(version).unlink(missing_ok=True)

    def close(self) -> None:
        """Wait as `settle` does, and give the copy's memory back; raises nothing."""
        self._writer.shutdown()
        if self._writing is not None and (error := self._writing.exception()) is not None:
            log.warning("the last checkpoint could not be written: %s", error)
        self._copies.clear()

    def restore_own(self) -> None:
        """Put back what is this site's own, as the newest checkpoint has it, if there is one.

        Collective.
        """
        for version in self.versions()[-1:]:
            with suppress(CheckpointError):  # damaged: what there is stays
                tensors, _ = self._read(self._path(version), "model:")
                self._replica.load_pieces(select_prefix("model", tensors), with_model=False)

    def load(self, version: int, with_model: bool, is_start: bool) -> Ledger:
        """Restore everything as it stood when the steps to `version` were complete.

        Without `with_model` the coordinator's weights stay in the networks. With `is_start`, as
        `save_start` has it. A `SessionLost` if another process of this site has deleted it.
        """
        began, path = time.monotonic(), self._path(version, _START if is_start else _SITE)
        if not path.exists():
            raise SessionLost(f"{path} is gone: another process of this site goes on in its folder")
        tensors, meta = self._read(path)
        replica = self._replica
        replica.load_pieces(select_prefix("model", tensors), with_model=with_model)
        replica.load_optimizers(select_prefix("optimizer", tensors))
        replica.inner.load_groups(unpack(_GROUPS, tensors["groups:"]))
        hook = select_prefix("hook", tensors)
        for name in self._hook_state.keys() & hook.keys():
            self._hook_state[name].copy_(hook[name])
        kept = select_prefix("state", tensors)
        # What the script keeps may hold the networks, too, as they were.
        stays = {} if with_model else {n: v.clone() for n, v in replica.pieces().items() if kept}
        for name, item in self._state.items():
            if name in kept:
                item.load_state_dict(unpack(f"state[{name!r}]", kept[name]))
        replica.load_pieces(stays, with_model=True)
        load_random_state(select_prefix("random", tensors))
        residual = select_prefix("residual", tensors)
        log.info("checkpoint of version %d read in %.2f s", version, time.monotonic() - began)
        return Ledger(
            residual,
            residual | select_prefix("owed", tensors),
            Work(int(meta["steps"]), int(meta["samples"])),
            tuple(int(version) for version in meta["versions"]),
        )


def pack(what: str, value: object) -> Tensor:
    """Tensors and plain values as bytes, uint8 (n,); a `UserError` for what is none, by `what`."""
    buffer = io.BytesIO()
    try:
        torch.save(value, buffer)
        buffer.seek(0)
        if foreign := torch.serialization.get_unsafe_globals_in_checkpoint(buffer):
            raise TypeError(f"it holds {', '.join(sorted(foreign))}")
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise UserError(
            f"{what} cannot be kept in a checkpoint: {error}; have its state_dict() (in Lightning "
            "on_save_checkpoint() as well) return tensors, numbers, text, lists and dicts alone"
        ) from None
    return torch.frombuffer(buffer.getbuffer(), dtype=torch.uint8)


def unpack(what: str, packed: Tensor) -> Any:
    """The inverse of `pack`."""
    try:
        return torch.load(io.BytesIO(packed.numpy().tobytes()), weights_only=True)
    except (RuntimeError, pickle.UnpicklingError, EOFError) as error:
        raise CheckpointError(f"{what} in a checkpoint cannot be read: {error}") from None


def random_state() -> State:
    """The global generators of torch, Python and numpy, which scripts and dropout draw from."""
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    kind, keys, *rest = np.random.get_state(legacy=True)
    others = {"python": random.getstate(), "numpy": (kind, np.asarray(keys).tolist(), *rest)}
    text = json.dumps(others).encode()  # 1,250 numbers, which torch.save takes 2 ms for
    return state | {"others": torch.frombuffer(bytearray(text), dtype=torch.uint8)}


def load_random_state(state: State) -> None:
    """Put back what `random_state` gave; a GPU's part is left out where there is none."""
    with lending:  # a site of the same process may be making its networks
        torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    others = json.loads(state["others"].numpy().tobytes())
    version, internal, gauss = others["python"]
    random.setstate((version, tuple(internal), gauss))
    kind, keys, *rest = others["numpy"]
    np.random.set_state((kind, np.array(keys, dtype=np.uint32), *rest))
