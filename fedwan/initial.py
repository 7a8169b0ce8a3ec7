"""Weights to start from: `init.NETWORK=path.safetensors`, a plain file by names of `state_dict`.

Each site reads its own copy; that all start from the same weights is seen at Join, by their hash.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path

import safetensors
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from fedwan.errors import ConfigError
from fedwan.names import nearest
from fedwan.state import Role, role_of_buffer

__all__ = ["absent", "check_initial", "load_initial", "put"]

Shape = tuple[int, ...]


def load_initial(
    networks: Mapping[str, nn.Module],
    init: Mapping[str, str],
    exclude: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """Put initial weights from files into networks, in place.

    Args:
        networks: just built, by name; plain, or sharded as DTensors.
        init: paths by network.
        exclude: by network, patterns of names that a file may lack, as it may lack what is frozen.
    """
    check_initial(networks, init, exclude)
    for network, path in init.items():
        put(networks[network], load_file(path))


def check_initial(
    networks: Mapping[str, nn.Module],
    init: Mapping[str, str],
    exclude: Mapping[str, Sequence[str]] | None = None,
) -> None:
    """See that files fit networks, which may be on torch's meta device; reads names and shapes.

    Raises:
        ConfigError: no such network or file, or names or shapes that do not fit.
    """
    for network, path in init.items():
        key = f"init.{network}"
        if network not in networks:
            raise ConfigError(
                f"{key}: networks are {', '.join(networks)}{nearest(network, networks)}"
            )
        module, key = networks[network], f"{key} = {path!r}"
        missing = absent(module, _shapes(key, Path(path)), key)
        patterns = (exclude or {}).get(network, ())
        frozen = {name for name, value in module.named_parameters() if not value.requires_grad}
        spectral = {n for n, v in module.named_buffers() if role_of_buffer(n, v) is Role.SPECTRAL}
        for name in missing:
            if name not in frozen | spectral and not any(fnmatchcase(name, p) for p in patterns):
                raise ConfigError(
                    f"{key} lacks {name!r}, which is trained; give a file with all trained tensors"
                )


def absent(module: nn.Module, shapes: Mapping[str, Shape], what: str) -> list[str]:
    """Names of a module's tensors that are not among the given ones; tied ones count as one.

    Raises:
        ConfigError: the module has no tensor of a name, or one of another shape; `what` has them.
    """
    tensors = _tensors(module)
    for name, shape in shapes.items():
        if name not in tensors:
            raise ConfigError(
                f"{what} holds {name!r}, which the module has not{nearest(name, tensors)}"
            )
        if shape != (wanted := tuple(tensors[name].shape)):
            raise ConfigError(
                f"{what}: {name!r} is of shape {shape}, and the module's of {wanted}; both "
                "are to have the same sizes"
            )
    given = {id(tensors[name]) for name in shapes}
    return [name for name, value in tensors.items() if id(value) not in given]


@torch.no_grad()
def put(module: nn.Module, tensors: Mapping[str, Tensor]) -> None:
    """Write tensors into a module by name, in its own dtypes, on its own devices."""
    targets = _tensors(module)
    for name, value in tensors.items():
        target = targets[name]
        if hasattr(target, "device_mesh"):
            from torch.distributed.tensor import DTensor, distribute_tensor

            assert isinstance(target, DTensor)
            value = distribute_tensor(value.to(target), target.device_mesh, target.placements)
        target.copy_(value)


def _tensors(module: nn.Module) -> dict[str, Tensor]:
    """Parameters and persistent buffers themselves, not detached."""
    state = module.state_dict(keep_vars=True)
    return {name: value for name, value in state.items() if isinstance(value, Tensor)}


def _shapes(key: str, path: Path) -> dict[str, Shape]:
    if not path.is_file():
        raise ConfigError(f"{key} is no file on this machine; give the path of a safetensors file")
    try:
        with safetensors.safe_open(path, framework="pt") as file:
            return {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    except (safetensors.SafetensorError, OSError) as error:
        raise ConfigError(
            f"{key} is no safetensors file ({error}); write one with "
            "safetensors.torch.save_file(module.state_dict(), path)"
        ) from None
