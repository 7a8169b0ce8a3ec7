"""Tensors that take long to make, kept in a file for all processes of this machine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from fedwan.errors import CheckpointError
from fedwan.state import State, read_tensors, write_tensors

_log = logging.getLogger(__name__)


def cached(name: str, like: Mapping[str, Tensor], make: Callable[[], State]) -> State:
    """What the file of a name in `~/.cache/fedwan` holds, or what `make` gives and is written now.

    The name must tell all that the tensors depend on; `like` has their names, shapes and dtypes.
    Two processes at once both make them, and each writes a whole file. One that cannot be written
    is a warning.
    """
    try:
        path = Path.home() / ".cache" / "fedwan" / f"{name}.safetensors"
    except RuntimeError as error:
        _log.warning("not cached: %s", error)
        return make()
    try:
        found = read_tensors(path)[0]
        if _kinds(found) == _kinds(like):
            return found
    except CheckpointError:  # it is not there, or damaged
        pass
    made = make()
    try:
        write_tensors(path, made, {})
    except OSError as error:
        _log.warning("not cached at %s: %s", path, error)
    return made


def _kinds(state: Mapping[str, Tensor]) -> dict[str, object]:
    return {name: (value.shape, value.dtype) for name, value in state.items()}
