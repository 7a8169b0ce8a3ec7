"""The global model: weights, their moving average, the outer optimiser, and how far they are.

Everything that a coordinator must have again after a crash, in one safetensors file.
Memory: the weights (fp32), moments that are merged, the average of the weights alone, and the outer
state; while a round is committed, also the merged contribution and the update. Where memory has no
room for these, average, outer state and what sites fetch are in files, which it holds as far as it
can.
"""

from __future__ import annotations

import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any
from weakref import WeakSet

import safetensors.torch
import torch

from fedwan.codecs import Coded, Payload, fp32, plain
from fedwan.config import Config
from fedwan.errors import CheckpointError, ConfigError, PayloadError, UserError
from fedwan.fragments import Fragment, rounds_done
from fedwan.link import wire_pb2 as wire
from fedwan.memory import available_bytes
from fedwan.protocol.gate import LARGEST_COUNTER
from fedwan.state import (
    Layout,
    Role,
    State,
    add_prefix,
    check_tensors,
    clone,
    ema_name,
    hash_hashes,
    hash_state,
    is_moment,
    layout_from_json,
    layout_to_json,
    mapped,
    network_of,
    read_tensors,
    read_tensors_meta,
    select_prefix,
    sweep,
    write_tensors,
)
from fedwan.strategy import Strategy

CHECKPOINT = "coordinator.safetensors"
PREVIOUS = "coordinator.previous.safetensors"
NUM_COPIES = 4
"""Of the weights, which a coordinator may take besides them: average, outer state, merged
contribution and update; more are on their way to sites, on arrival one for each."""
HALVES = (torch.float16, torch.bfloat16)


def newest_whole(folder: Path) -> tuple[Path, str]:
    """The newest checkpoint that is whole, and a complaint about one that is not.

    A `CheckpointError` if there is none.
    """
    newest, previous = folder / CHECKPOINT, folder / PREVIOUS
    try:
        check_tensors(newest)
    except CheckpointError as error:
        with suppress(CheckpointError):
            check_tensors(previous)
            cause = str(error).rpartition("; ")[0]  # what would mend it is done here
            return previous, f"{cause}; the one before it takes its place"
        raise
    return newest, ""


def newest_meta(folder: Path) -> dict[str, Any]:
    """What the newest checkpoint says whose header is whole; a `CheckpointError` if none is."""
    try:
        return read_tensors_meta(folder / CHECKPOINT)
    except CheckpointError:
        with suppress(CheckpointError):
            return read_tensors_meta(folder / PREVIOUS)
        raise


def saved_version(folder: Path) -> int:
    """The furthest version of a fragment in the newest checkpoint; -1 if there is none."""
    with suppress(CheckpointError, KeyError):
        return int(max(newest_meta(folder)["versions"]))
    return -1


def go_back(folder: Path, version: int) -> None:
    """Have a run go on from one of the checkpoints that are kept; what came after it is gone.

    Raises:
        ConfigError: none is of this version.
    """
    kept: dict[int, Path] = {}
    for path in (folder / PREVIOUS, folder / CHECKPOINT):
        with suppress(CheckpointError):
            check_tensors(path)
            kept[min(read_tensors_meta(path)["versions"])] = path
    if version not in kept:
        raise ConfigError(
            f"--from-version={version} is not kept; kept are {', '.join(map(str, kept))}, and "
            "checkpoint.every=N makes one every N rounds"
        )
    if kept[version].name == PREVIOUS:
        os.replace(kept[version], folder / CHECKPOINT)


def find_checkpoint(folder: Path) -> tuple[dict[str, Any], str]:
    """What was given to `GlobalModel.save` beside the model, and a complaint if there is one.

    A checkpoint that is damaged gives way to the one before it, for good; raises as `newest_whole`.
    """
    sweep(folder)
    path, complaint = newest_whole(folder)
    if complaint:
        os.replace(path, folder / CHECKPOINT)
    return read_tensors_meta(folder / CHECKPOINT), complaint


def another_version(folder: Path, error: Exception) -> CheckpointError:
    """What a checkpoint is that lacks something."""
    return CheckpointError(
        f"checkpoint in {folder} is of another version of fedwan ({error}); "
        "resume with the one that it began with"
    )


class GlobalModel:
    """Global weights, which take `initial` over, and what evolves with them.

    `folder`: where files may lie that hold all but the weights.
    """

    def __init__(
        self,
        initial: State,
        layout: Layout,
        strategy: Strategy,
        ema_half_life: float,
        folder: Path | None = None,
    ) -> None:
        self.layout = layout
        self.state: State = {
            name: initial[name].float() if spec.role is Role.PARAMETER else initial[name]
            for name, spec in layout.items()
        }
        self._weights = {name: spec for name, spec in layout.items() if not is_moment(name)}
        num_fetched = strategy.policy.num_sites if strategy.clock == "samples" else 1
        needed = (NUM_COPIES + num_fetched) * sum(v.nbytes for v in self.state.values())
        self._copy: Callable[[State], State] = clone
        if folder is not None and available_bytes() < needed:
            self._copy = partial(mapped, folder=folder)
        self.ema = self._copy(_averages({name: self.state[name] for name in self._weights}))
        self.fragments = strategy.fragments(layout)
        self.versions = [0] * len(self.fragments)
        self._contributes = strategy.contributes
        self._down = strategy.down
        self._share = strategy.share
        self._residual: State = {}
        self._server_step = strategy.server_step(self.state, layout)
        self._offload()
        self._half_life = ema_half_life
        self._readers = WeakSet[Payload]()
        """Payloads that are of the average itself."""
        self._hashes: dict[tuple[int, int], str] = {}  # by fragment and version, the last two
        self._lock = threading.Lock()
        self._counters: dict[int, tuple[int, dict[str, float]]] = {}  # by fragment, of a version
        self._saved: list[int] = []  # versions of the newest checkpoint
        self.own = [""] * len(self.fragments)
        """By fragment, the site whose contribution its latest update is, bit for bit; or empty."""
        self.is_whole = True
        """Whether weights and outer state are of the same version: not after a commit that failed.
        """

    @property
    def is_offloaded(self) -> bool:
        """Whether average and outer state are in files."""
        return self._copy is not clone

    def _offload(self) -> None:
        if self.is_offloaded:
            self._server_step.offload(self._copy)

    def commit(
        self,
        fragment: Fragment,
        merged: State,
        samples: int,
        times: int = 1,
        run_step: int = 0,
        alone: str = "",
    ) -> Payload:
        """One outer update, of all networks or none, as sites will get it; `merged` is emptied.

        What is not in `merged` stays as it is. `alone`: the one site that it is of. A `UserError`
        if weights that are no numbers would come of it, or an outer step fails.
        """
        self.is_whole = False
        deltas = clone(merged) if alone else {}
        for name in fragment.layout.keys() - merged.keys():
            present = self.state[name]
            is_delta = self.layout[name].role is Role.PARAMETER
            merged[name] = torch.zeros_like(present) if is_delta else present.clone()
        proposal = self._server_step.propose(merged, times, run_step)
        is_own = bool(deltas) and all(
            torch.equal(proposal[name], delta.neg())
            for name, delta in deltas.items()
            if self.layout[name].role is Role.PARAMETER
        )
        deltas.clear()
        payload, residual = self._down.encode(proposal, self._residual, fragment.layout)
        update = self._decoded(payload, proposal, fragment.layout)
        with self._lock:
            self._residual |= residual
            self._server_step.commit(update)
            if len(self._readers):
                self.ema = self._copy(self.ema)  # what is being read is left to them
            self._readers.clear()
            update_ema(
                self.ema,
                {name: self.state[name] for name in update},
                self.layout,
                samples,
                self._half_life,
            )
            self.versions[fragment.index] += 1
            self.own[fragment.index] = alone if is_own else ""
        self.is_whole = True
        return payload

    def _decoded(self, payload: Payload, proposal: State, layout: Layout) -> dict[str, Coded]:
        """What the sites decode, which for a lossy codec is not what was proposed.

        A `UserError` if it is not finite.
        """
        try:
            # Buffers as they travel: what is finite in fp32 may not be in fp16.
            specs = self.layout.items()
            buffers = {n: s.dtype for n, s in specs if s.role is not Role.PARAMETER}
            update = plain({n: v.to(buffers.get(n, v.dtype)) for n, v in proposal.items()})
            if not self._down.is_exact:
                update = dict(self._down.read_each(payload, layout))
        except PayloadError as error:  # values that are not finite have no scale
            self._check(update)
            raise UserError(str(error)) from None  # nor have those that are too large
        self._check(update)
        return update

    def _check(self, update: Mapping[str, Coded]) -> None:
        """One pass over what is about to move the weights."""
        for name, coded in update.items():
            is_float = self.layout[name].dtype.is_floating_point
            if not is_float or math.isfinite(coded.sum_of_squares()):
                continue
            if not bool(coded.tensor().isfinite().all()):  # else they are too large to square
                raise UserError(
                    f"the update of {name!r} holds values that are not finite; the weights before "
                    "it are kept: lower the learning rates, or mend the outer Transform if it is "
                    "your own, and continue with --resume"
                )

    @property
    def version(self) -> int:
        """Whole rounds that every fragment has had."""
        return rounds_done(self.fragments, self.versions)

    def version_of(self, versions: Sequence[int]) -> int:
        """The same of other versions of the fragments."""
        return rounds_done(self.fragments, versions)

    def counters(self, fragment: int) -> dict[str, float]:
        """The largest integer buffer of each network, by the name of its figure."""
        version, largest = self.versions[fragment], dict[str, float]()
        if (known := self._counters.get(fragment)) and known[0] == version:
            return known[1]
        for name, spec in self.fragments[fragment].layout.items():
            if spec.role is Role.COUNTER and spec.num_values and not is_moment(name):
                what = LARGEST_COUNTER.format(network_of(name))
                largest[what] = max(largest.get(what, -math.inf), float(self.state[name].max()))
        self._counters[fragment] = version, largest
        return largest

    def bound_counters(self, fragment: Fragment, merged: State, most: float) -> bool:
        """Let no merged integer buffer be more than `most` above the largest one of its network.

        The intake sees to it, but not for contributions that came before the initial weights.
        Whether anything was cut.
        """
        present, is_cut = {} if math.isinf(most) else self.counters(fragment.index), False
        for name, spec in fragment.layout.items():
            bound = present.get(LARGEST_COUNTER.format(network_of(name)), math.inf) + most
            if spec.role is Role.COUNTER and not is_moment(name) and name in merged:
                largest = float(merged[name].max()) if spec.num_values else -math.inf
                if largest > bound:
                    merged[name] = merged[name].clamp(max=int(bound))
                    is_cut = True
        return is_cut

    def hash_of(self, fragment: Fragment) -> str:
        """`hash_state` of a fragment's global weights; 1 s a GB, once for each version."""
        with self._lock:
            index, version = fragment.index, self.versions[fragment.index]
            if (index, version) not in self._hashes:
                self._hashes.pop((index, version - 2), None)
                state = {name: self.state[name] for name in fragment.layout}
                self._hashes[index, version] = hash_state(state)
            return self._hashes[index, version]

    def known_hash(self, fragment: int, version: int) -> str:
        """The same of a version of now or one before, if it is known; empty else."""
        return self._hashes.get((fragment, version), "")

    def hash_at(self, versions: Sequence[int]) -> str:
        """One hash of all fragments at versions of now or one before; empty where none is known."""
        for fragment in self.fragments:
            self.hash_of(fragment)
        hashes = [self._hashes.get(key, "") for key in enumerate(versions)]
        return hash_hashes(hashes) if all(hashes) else ""

    def num_weight_bytes(self) -> int:
        """Of one model in fp32, without moments: what synchronous training would send."""
        layout = self._share(self._weights, 0) if self._share else self._weights
        return Fragment(0, layout).num_bytes

    def snapshot(self, kind: wire.DownloadRequest.Kind) -> tuple[Payload, tuple[int, ...]]:
        """Weights, their average or the outer state, and the version of each fragment.

        In fp32, the outer state as safetensors, whose layout sites do not know beforehand. The
        average is copied only if it changes while the payload is held.
        """
        with self._lock:
            if kind == wire.DownloadRequest.OUTER:
                payload = Payload([safetensors.torch.save(self._server_step.state())])
            elif kind == wire.DownloadRequest.EMA:
                payload, _ = fp32().encode(self.ema, {}, self._weights)
                self._readers.add(payload)
            else:
                payload, _ = fp32().encode(self._copy(self.state), {}, self.layout)
            return payload, tuple(self.versions)

    def save(self, folder: Path, meta: dict[str, Any]) -> None:
        """Write a checkpoint atomically, and keep that of other versions before it."""
        tensors = (
            add_prefix("global", self.state)
            | add_prefix("ema", self.ema)
            | add_prefix("outer", self._server_step.state())
            | add_prefix("residual", self._residual)
        )
        content = {
            **meta,
            "layout": layout_to_json(self.layout),
            "fragments": [list(fragment.layout) for fragment in self.fragments],
            "contributes": self._contributes,
            "versions": self.versions,
            "own": self.own,
        }
        previous = folder / PREVIOUS if self.versions != self._saved else None
        write_tensors(folder / CHECKPOINT, tensors, content, previous)
        self._saved = list(self.versions)

    @classmethod
    def load(cls, folder: Path, strategy: Strategy, config: Config) -> GlobalModel:
        """Read a checkpoint; a `CheckpointError` if it is of another strategy or not whole."""
        path = folder / CHECKPOINT
        tensors, meta = read_tensors(path)
        try:
            layout = layout_from_json(meta["layout"])
            if (merged := meta["contributes"]) != strategy.contributes:
                raise ValueError(f"{merged}s, not {strategy.contributes}s, were merged")
            # Copies: what was read is the file itself, whose space would be taken until the end,
            # long after it has been replaced.
            weights = clone(select_prefix("global", tensors))
            model = cls(weights, layout, strategy, config.half_life, folder)
            ema = select_prefix("ema", tensors)
            model.ema = model._copy(_averages({name: ema[name] for name in model.ema}))
            model._server_step.load_state(model._copy(select_prefix("outer", tensors)))
            model._offload()
            model._residual = clone(select_prefix("residual", tensors))
            model.versions = [int(v) for v in meta["versions"]]
            model._saved = list(model.versions)
            model.own = [str(site) for site in meta["own"]]
            if (num := len(model.versions)) != len(model.fragments):
                raise ValueError(f"{num} fragments, where it cuts {len(model.fragments)}")
        except (KeyError, TypeError, ValueError, ConfigError) as error:
            raise CheckpointError(
                f"checkpoint {path} does not fit this run ({error}); "
                "resume with the strategy, workload and settings that it began with"
            ) from None
        return model


def _averages(state: State) -> State:
    """In fp32 at least: half precision would not move by a share as small as a round's."""
    return {n: v.float() if v.dtype in HALVES else v for n, v in state.items()}


def update_ema(ema: State, state: State, layout: Layout, samples: int, half_life: float) -> None:
    """Move `ema` towards `state`, in place; counters are copied, and averages that sites have made.

    β = 0.5 ^ (samples / half-life), as in EDM2 (2312.02696): the average does not depend on how
    many steps, sites or samples (over all sites, since the last call) make a round.
    """
    weight = 1.0 - 0.5 ** (samples / half_life)
    for name in state.keys() & ema.keys():
        value, made = state[name], state.get(ema_name(name))
        if made is not None:
            ema[name].copy_(made)
        elif layout[name].role is Role.COUNTER:
            ema[name].copy_(value)
        else:
            ema[name].lerp_(value.to(ema[name].dtype), weight)
