"""A model's state as a flat dict of tensors: names, roles, hashing, and safetensors files.

A tensor's name is `network/tensor`, e.g. `generator/main.0.weight`. Its role decides how sites'
values become one (see `fedwan.coordinator.merge`):

    parameter   travels as a delta (or a gradient) through the outer optimiser
    mean        running mean or any other float buffer: averaged
    variance    running variance: pooled by total variance, so it is never below zero
    counter     integer buffer: the largest value
    spectral    spectral norm's singular vectors: stay home, recomputed from the merged weight
    excluded    named by `network.NETWORK.exclude`: stays home, each site's own
    frozen      a parameter that nobody steps: stays home, the same at every site
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import tempfile
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextlib import suppress
from enum import StrEnum
from functools import partial
from itertools import accumulate
from json import JSONDecodeError
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

import numpy as np
import safetensors.torch
import torch
import xxhash
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.utils.spectral_norm import SpectralNorm

from fedwan.errors import CheckpointError, UserError
from fedwan.files import on_disk, write_atomically

State = dict[str, Tensor]
"""Tensors by name."""
ALIGNMENT = 64
"""Of tensors in a file that is mapped, in bytes."""
NUM_ITERATIONS = 5
"""Of spectral norm's power method, each time that weights were written."""


class Role(StrEnum):
    """How a tensor is merged."""

    PARAMETER = "parameter"
    MEAN = "mean"
    VARIANCE = "variance"
    COUNTER = "counter"
    SPECTRAL = "spectral"
    EXCLUDED = "excluded"
    FROZEN = "frozen"


class TensorSpec(NamedTuple):
    """What both ends know of a tensor before any byte of it travels."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    role: Role

    @property
    def num_values(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)


Layout = dict[str, TensorSpec]
"""Specs by tensor name, in name order."""

_AT_HOME = (Role.SPECTRAL, Role.EXCLUDED, Role.FROZEN)
_SPECTRAL_BUFFERS = ("_u", "_v", "weight_u", "weight_v")


class OnDemand(Mapping[str, Tensor]):
    """Tensors by name that are made when they are taken, so that only one exists at a time."""

    def __init__(self, names: Iterable[str], make: Callable[[str], Tensor]) -> None:
        self._names = dict.fromkeys(names)
        self._make = make

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._names:
            raise KeyError(name)
        return self._make(name)

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


def network_of(name: str) -> str:
    """The network that a tensor belongs to.

    >>> network_of("generator/main.0.weight")
    'generator'
    """
    return name.partition("/")[0]


def is_moment(name: str) -> bool:
    """Whether a tensor travels beside the model: a moment, or an average over every step.

    >>> is_moment("generator/main.0.weight|exp_avg"), is_moment("generator/main.0.weight")
    (True, False)
    """
    return "|" in name


def ema_name(name: str) -> str:
    """Of a parameter, the name of its average over every step.

    >>> ema_name("net/weight")
    'net/weight|ema'
    """
    return f"{name}|ema"


def role_of_buffer(name: str, value: Tensor) -> Role:
    """How a buffer is merged, by its name and kind."""
    leaf = name.rpartition(".")[2]
    if leaf in _SPECTRAL_BUFFERS and value.dim() == 1:
        return Role.SPECTRAL
    if not value.is_floating_point():
        return Role.COUNTER
    return Role.VARIANCE if leaf == "running_var" else Role.MEAN


def means_of_variances(layout: Layout) -> dict[str, str]:
    """By the name of each running variance that has one beside it, that of its running mean.

    >>> mean, variance = (TensorSpec((2,), torch.float32, r) for r in (Role.MEAN, Role.VARIANCE))
    >>> means_of_variances({"g/running_mean": mean, "g/running_var": variance, "g/sq": variance})
    {'g/running_var': 'g/running_mean'}
    """
    found: dict[str, str] = {}
    for name, spec in layout.items():
        mean = name.removesuffix("running_var") + "running_mean"
        if spec.role is Role.VARIANCE and mean in layout and layout[mean].role is Role.MEAN:
            found[name] = mean
    return found


def _travelling(
    networks: Mapping[str, nn.Module], home: Mapping[str, Role]
) -> dict[str, tuple[Tensor, Role]]:
    """Tensors that do not stay home, with their roles, in name order."""
    found: dict[str, tuple[Tensor, Role]] = {}
    for network, module in networks.items():
        if "/" in network:
            raise UserError(f"network name {network!r} holds a '/'; choose another name")
        persistent = module.state_dict(keep_vars=True)
        for name, parameter in module.named_parameters():
            found[f"{network}/{name}"] = parameter.detach(), Role.PARAMETER
        for name, buffer in module.named_buffers():
            if name in persistent:
                found[f"{network}/{name}"] = buffer, role_of_buffer(name, buffer)
    if odd := [name for name in found if "|" in name]:
        raise UserError(
            f"tensor {odd[0]!r} has a '|' in its name, which stands between a parameter and its "
            "moments; choose another name"
        )
    roles = {name: home.get(name, role) for name, (_, role) in found.items()}
    return {
        name: (found[name][0], roles[name]) for name in sorted(found) if roles[name] not in _AT_HOME
    }


def state_of(networks: Mapping[str, nn.Module], home: Mapping[str, Role] | None = None) -> State:
    """The tensors that travel, in name order, sharing memory with the modules (no copy).

    `home` has those of another role than their kind's, which stay home, as spectral norm's do.
    """
    return {name: value for name, (value, _) in _travelling(networks, home or {}).items()}


def layout_of(networks: Mapping[str, nn.Module], home: Mapping[str, Role] | None = None) -> Layout:
    """Shape, dtype and role of each tensor of `state_of(networks, home)`."""
    return {
        name: TensorSpec(tuple(value.shape), value.dtype, role)
        for name, (value, role) in _travelling(networks, home or {}).items()
    }


def layout_to_json(layout: Layout) -> str:
    """A layout as compact JSON."""
    rows = {n: [list(s.shape), str(s.dtype)[6:], s.role.value] for n, s in layout.items()}
    return json.dumps(rows, separators=(",", ":"))


def layout_from_json(text: str) -> Layout:
    """The inverse of `layout_to_json`; a `ValueError` if the text is not a layout."""
    layout: Layout = {}
    try:
        for name, (shape, dtype_name, role) in json.loads(text).items():
            dtype = getattr(torch, dtype_name)
            if not isinstance(dtype, torch.dtype) or any(int(s) < 0 for s in shape):
                raise ValueError(f"tensor {name!r} has dtype {dtype_name!r} and shape {shape}")
            layout[name] = TensorSpec(tuple(int(s) for s in shape), dtype, Role(role))
    except (AttributeError, TypeError, OverflowError, RecursionError, JSONDecodeError) as error:
        raise ValueError(f"not a layout: {error}") from error
    return dict(sorted(layout.items()))


def clone(state: Mapping[str, Tensor]) -> State:
    """A copy of each tensor, on the tensor's device."""
    return {name: value.detach().clone() for name, value in state.items()}


def mapped(state: Mapping[str, Tensor], folder: Path) -> State:
    """A copy of each tensor in one file that has no name, which memory need not hold as a whole.

    Room for it is taken at once: a `DiskFull` where there is not enough.
    """
    sizes = (-(-value.nbytes // ALIGNMENT) * ALIGNMENT for value in state.values())
    *starts, num_bytes = accumulate(sizes, initial=0)
    num_bytes = max(1, num_bytes)
    with on_disk(folder, num_bytes), tempfile.TemporaryFile(dir=folder) as file:
        os.posix_fallocate(file.fileno(), 0, num_bytes)
        room = torch.from_numpy(np.memmap(file, np.uint8, "r+", shape=(num_bytes,)))
    return {
        name: room[start : start + value.nbytes].view(value.dtype).view(value.shape).copy_(value)
        for start, (name, value) in zip(starts, state.items(), strict=True)
    }


def hash_state(state: Mapping[str, Tensor]) -> str:
    """SHA-256 over name, dtype, shape and bytes of each tensor, in name order (hex).

    Costs one host copy of the largest tensor if the state is on a GPU.
    """
    digest = hashlib.sha256()
    for name in sorted(state):
        value = state[name]
        digest.update(f"{name}|{value.dtype}|{tuple(value.shape)}|".encode())
        digest.update(tensor_bytes(value))
    return digest.hexdigest()


def hash_hashes(hashes: Iterable[str]) -> str:
    """One hash of several, in their order."""
    return hashlib.sha256("".join(hashes).encode()).hexdigest()


def add_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """Each name behind `prefix:`, to keep several states in one file."""
    return {f"{prefix}:{name}": value for name, value in state.items()}


def select_prefix(prefix: str, state: Mapping[str, Tensor]) -> State:
    """The inverse of `add_prefix`, for the names that carry the prefix."""
    head = f"{prefix}:"
    return {name[len(head) :]: value for name, value in state.items() if name.startswith(head)}


def spectral_norms(networks: Mapping[str, nn.Module]) -> list[Callable[[], None]]:
    """What recomputes, in place, the singular vectors of each spectral norm for present weights.

    Power iteration, Miyato et al. 2018 (1802.05957), algorithm 1, from the vectors at hand. Of
    torch both forms: the parametrisation, and the hook of `torch.nn.utils.spectral_norm`. What they
    do is collective where weights lie in pieces, as under FSDP2.
    """
    found: list[Callable[[], None]] = []
    for module in (m for network in networks.values() for m in network.modules()):
        for chain in getattr(module, "parametrizations", {}).values():
            for part in chain:
                if hasattr(part, "_u") and hasattr(part, "_power_method"):
                    found.append(partial(_refresh, part, chain))
        for hook in module._forward_pre_hooks.values():
            if isinstance(hook, SpectralNorm):
                found.append(partial(_refresh_hooked, module, hook))
    return found


@torch.no_grad()
def _refresh(part: Any, chain: Any) -> None:
    weight = part._reshape_weight_to_matrix(_in_one(chain.original.detach()))
    part._power_method(weight, NUM_ITERATIONS)


@torch.no_grad()
def _refresh_hooked(module: nn.Module, hook: SpectralNorm) -> None:
    left, right = (getattr(module, f"{hook.name}_{side}") for side in "uv")
    weight = hook.reshape_weight_to_matrix(_in_one(getattr(module, f"{hook.name}_orig")))
    for _ in range(NUM_ITERATIONS):
        functional.normalize(weight.mT @ left, dim=0, eps=hook.eps, out=right)
        functional.normalize(weight @ right, dim=0, eps=hook.eps, out=left)


def _in_one(weight: Tensor) -> Tensor:
    full: Tensor = weight.full_tensor() if hasattr(weight, "full_tensor") else weight
    return full


def sweep(folder: Path, name: str = "*") -> None:
    """Remove what a process that was killed in `write_atomically` has left, by names of files."""
    for left in folder.glob(f".{name}.*.tmp"):
        left.unlink(missing_ok=True)


_DTYPES = {dtype: name for name, dtype in safetensors.torch._TYPES.items()}
"""How a file's header calls dtypes, as safetensors has it."""


def is_storable(dtype: torch.dtype) -> bool:
    """Whether checkpoints can hold tensors of it."""
    return dtype in _DTYPES


def tensor_bytes(value: Tensor) -> memoryview:
    """A tensor's bytes, sharing its memory; a copy if it lies elsewhere or scattered."""
    flat = value.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    if flat.is_cuda:
        # Into pinned memory, which torch lends again and again: 54 GB/s on an H100, where memory
        # that is new each time takes 2.
        room = torch.empty(flat.shape, dtype=flat.dtype, device="cpu", pin_memory=True)
        flat = room.copy_(flat)
    flat = flat.cpu()
    data: memoryview = flat.view(torch.uint8).numpy().data
    return data


def write_tensors(
    path: Path,
    state: Mapping[str, Tensor],
    meta: Mapping[str, Any],
    previous: Path | None = None,
    check: Callable[[], object] | None = None,
) -> None:
    """Write a state and a JSON-ready `meta` to one safetensors file, atomically.

    Each tensor has a checksum, and so has all that is said about them. What the file replaces is
    kept as `previous`, if given; `check` may raise to leave it there after all. Costs one host copy
    of the largest tensor; safetensors' own wants all at once.
    """
    in_order = sorted(state, key=lambda name: (-state[name].element_size(), name))  # aligned
    rows: dict[str, Any] = {}
    end = 0
    for name in in_order:
        value = state[name]
        start, end = end, end + value.numel() * value.element_size()
        dtype, shape = _DTYPES[value.dtype], list(value.shape)
        rows[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    said = json.dumps(meta, sort_keys=True)

    def write(file: BinaryIO) -> None:
        sums = dict.fromkeys(in_order, _NO_CHECKSUM)
        file.write(_header(rows, said, sums))
        for name in in_order:
            data = tensor_bytes(state[name])
            sums[name] = _checksum(_described(name, state[name]), data)
            file.write(data)
        file.seek(0)
        file.write(_header(rows, said, sums))

    write_atomically(path, write, previous, num_bytes=end, check=check)


_NO_CHECKSUM = "0" * 16


def _checksum(*parts: bytes | memoryview) -> str:
    digest = xxhash.xxh3_64()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()


def _described(name: str, value: Tensor) -> bytes:
    return f"{name}|{value.dtype}|{tuple(value.shape)}|".encode()


def checksums(state: Mapping[str, Tensor]) -> dict[str, str]:
    """Of each tensor's name, type, shape and bytes, 64 bits in hex; 0.1 s a GB on a CPU."""
    return {n: _checksum(_described(n, v), tensor_bytes(v)) for n, v in state.items()}


def _header(rows: Mapping[str, Any], said: str, checksums: Mapping[str, str]) -> bytes:
    """As long whatever the checksums are."""
    sums = json.dumps(checksums, separators=(",", ":"))
    metadata = {
        "fedwan": said,
        "checksums": sums,
        "checksum": _checksum(said.encode(), sums.encode()),
    }
    table = json.dumps({"__metadata__": metadata, **rows}, separators=(",", ":")).encode()
    table += b" " * (-len(table) % 8)
    return len(table).to_bytes(8, "little") + table


def read_tensors(
    path: Path, prefix: str = "", names: Collection[str] | None = None
) -> tuple[State, dict[str, Any]]:
    """Read what `write_tensors` wrote; tensors whose names begin with a prefix, or these names.

    Raises:
        CheckpointError: the file is missing, truncated, damaged, or not one of fedwan's.
    """
    state: State = {}
    is_wanted = names.__contains__ if names is not None else lambda name: name.startswith(prefix)
    meta = _read(path, state.__setitem__, is_wanted)
    if lacking := set(names or ()) - state.keys():
        raise CheckpointError(f"checkpoint {path} lacks {min(lacking)!r}; restore it from a copy")
    return state, meta


def check_tensors(path: Path) -> None:
    """Read a file to its end and keep nothing; raises as `read_tensors` does."""
    _read(path, lambda name, value: None, lambda name: True)


def read_tensors_meta(path: Path) -> dict[str, Any]:
    """The `meta` alone, as `read_tensors` reads it."""
    return _read(path, lambda name, value: None, lambda name: False)


def _read(
    path: Path,
    take: Callable[[str, Tensor], None],
    is_wanted: Callable[[str], bool],
) -> dict[str, Any]:
    try:
        with safetensors.safe_open(path, framework="pt", device="cpu") as file:
            metadata = file.metadata() or {}
            said, sums = metadata["fedwan"], metadata["checksums"]
            checksums = json.loads(sums)
            names = set(file.keys())
            if (
                metadata["checksum"] != _checksum(said.encode(), sums.encode())
                or names != checksums.keys()
            ):
                raise ValueError("its header is damaged")
            for name in sorted(filter(is_wanted, names)):
                value = file.get_tensor(name)
                if _checksum(_described(name, value), tensor_bytes(value)) != checksums[name]:
                    raise ValueError(f"tensor {name!r} is damaged")
                take(name, value)
            meta: dict[str, Any] = json.loads(said)
            return meta
    except FileNotFoundError:
        raise CheckpointError(
            f"no checkpoint at {path}; start the run afresh, without --resume"
        ) from None
    except (safetensors.SafetensorError, KeyError, ValueError, OSError) as error:
        mend = "restore it from a copy, or start the run afresh without --resume"
        before = path.with_suffix(".previous.safetensors")
        with suppress(CheckpointError):
            check_tensors(before)
            mend = (
                f"{before.name} beside it is whole: --resume of a run that has not ended goes on "
                f"from it, and where it has ended, rename it to {path.name}"
            )
        raise CheckpointError(f"checkpoint {path} cannot be read ({error}); {mend}") from None
