"""Parameters that nothing trains: they do not travel, so that they must stay as they are."""

from __future__ import annotations

import torch
from torch import Tensor

from fedwan.codecs.base import span_values, spans
from fedwan.errors import UserError
from fedwan.pieces import local
from fedwan.state import State

Marks = dict[str, tuple[int, int, int]]


def check_frozen(tensors: State, marks: Marks) -> None:
    """A `UserError` where a tensor was written to since it had these marks."""
    changed = {name for name, mark in marks_of(tensors).items() if mark != marks[name]}
    if changed:
        raise UserError(
            f"parameter {min(changed)!r} was frozen when training began (no gradient was "
            "required, or no optimiser held it), so that it does not travel, and has changed; "
            "let it require a gradient and its optimiser hold it when fedwan.join is called, "
            "and freeze it afterwards, until it is to move; or make it a buffer; a network "
            "that only follows goes into `state`, not into `networks`"
        )


def marks_of(state: State) -> Marks:
    """What tells whether a tensor was written to; less than a forward pass, 0.3 s a GB on a CPU.

    Its version alone does not: writes by `.data` and by fused optimisers leave that as it is.
    """
    prints = {name: _fingerprint(local(value)) for name, value in state.items()}
    return {n: (local(v).data_ptr(), v._version, int(prints[n])) for n, v in state.items()}


def _fingerprint(value: Tensor) -> Tensor:
    """32 bits of a tensor's bytes, span by span: the sum of their squares, as integers.

    In a plain sum what goes up here and down there is not seen; nor would a square see signs.
    """
    flat = value.reshape(-1)
    data = (torch.view_as_real(flat) if flat.is_complex() else flat).reshape(-1).view(torch.uint8)
    is_aligned = (data.data_ptr() | len(data)) % 4 == 0
    words = data.view(torch.int32) if is_aligned else data.to(torch.int32)
    found = torch.zeros((), dtype=torch.int32, device=value.device)
    for span in spans(len(words), span_values(len(words), words.device)):
        part = words[span] ^ (words[span] >> 31)
        found += part.mul_(part).sum(dtype=torch.int32)
    return found
