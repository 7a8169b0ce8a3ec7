"""A network of the user's own that metrics see images through: `eval.features=PATH`.

A TorchScript file, as those of Inception are handed around: it gets images as uint8 (N, 3, height,
width) and gives features (N, features); one whose `forward` has `return_features`, as StyleGAN's
have, is asked for them. It runs no Python of its own.
"""

from __future__ import annotations

import hashlib
import warnings
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from fedwan.errors import ConfigError

_CHUNK = 64
_SIDE = 64  # of the image that a network is tried on

Network = Callable[[Tensor], Tensor]


def find_network(path: str) -> Path:
    """The file that `eval.features` names; a `ConfigError` if there is none."""
    found = Path(path)
    if not found.is_file():
        raise ConfigError(f"eval.features = {path!r} is no TorchScript file; give the path of one")
    return found


def network_sha256(path: str) -> str:
    """Of the file."""
    with find_network(path).open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


@cache
def load_network(path: str, device: torch.device) -> Network:
    """The network at a path: images (N, 1 or 3, height, width) in [-1, 1] to (N, features).

    A `ConfigError` if it cannot be read, or does not give features of an image.
    """
    found = find_network(path)
    try:
        with warnings.catch_warnings():  # what the field hands around is this
            warnings.simplefilter("ignore", DeprecationWarning)
            network: Any = torch.jit.load(str(found), map_location=device)  # type: ignore[no-untyped-call]
        network.eval()
        names = {argument.name for argument in network.forward.schema.arguments}
        more = {"return_features": True} if "return_features" in names else {}
        forward: Network = partial(network, **more)
        features = forward(torch.zeros(2, 3, _SIDE, _SIDE, dtype=torch.uint8, device=device))
        if features.dim() < 2 or len(features) != 2:
            raise ValueError("it gives no tensor of (images, features) for two images")
    except (RuntimeError, ValueError, OSError, TypeError, AttributeError, torch.jit.Error) as error:
        first = str(error).strip().splitlines()
        raise ConfigError(
            f"eval.features = {path!r} cannot be used: {first[-1] if first else error!r}; "
            "give a TorchScript file that takes uint8 images"
        ) from None

    @torch.no_grad()
    def see(images: Tensor) -> Tensor:
        parts = []
        for chunk in torch.split(images.detach(), _CHUNK):
            x = chunk.to(device, torch.float32).expand(-1, 3, -1, -1)
            bytes_ = ((x + 1) * 127.5).round().clamp(0, 255).to(torch.uint8)
            parts.append(forward(bytes_).flatten(1).to("cpu", torch.float32))
        return torch.cat(parts)

    return see
