"""How metrics see samples: as features, and as figures that only this kind of data has."""

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

from fedwan.data import Source
from fedwan.metrics.classifier import Classifier, load_classifier
from fedwan.metrics.modes import count_modes
from fedwan.metrics.stacked_modes import count_stacked_modes

__all__ = ["Features", "Seen", "see", "see_through"]

_AT_ONCE = 256


class Features(Protocol):
    """A network of your own that metrics see samples through, such as Inception on large images.

    Anything that can be called so; the built-in one is `Classifier.features`. A module should be in
    evaluation mode, and on the device that samples are on.
    """

    def __call__(self, x: Tensor, /) -> Tensor:
        """Samples (N, …), images in [-1, 1], to features (N, features), for any N."""
        ...


class Seen(NamedTuple):
    """Samples as the metrics see them."""

    features: Tensor
    """(N, features)"""
    figures: dict[str, Any]
    """What is specific to the data: `histogram`, and `modes`, `good` and `mode_kl` of modes."""


def see(source: Source, x: Tensor) -> Seen:
    """Samples (N, …) as their source has it: points themselves, images through a classifier.

    Raises:
        ValueError: images that no classifier is known for.
    """
    if source.mixture is not None:
        points = x.detach().cpu()
        return Seen(points, count_modes(points, *source.mixture())._asdict())
    if source.stack_of:
        return _see_stack(source, x)
    if source.shape[1:] != (8, 8):
        raise ValueError(
            f"samples of {source.name} are {source.shape}, and the built-in classifier sees 8x8 "
            "images; pass a network of your own as features"
        )
    features, logits = _classifier(source.name).features_and_logits(x)
    counts = torch.bincount(logits.argmax(dim=1), minlength=source.num_classes).double()
    return Seen(features, {"histogram": (counts / len(x)).tolist()})


@torch.no_grad()
def see_through(features: Features, x: Tensor) -> Seen:
    """Samples (N, …) through a network of the user's own, 256 at a time.

    Raises:
        ValueError: it does not return as many rows of features.
    """
    seen = torch.cat([features(part) for part in torch.split(x, _AT_ONCE)])
    if seen.dim() != 2 or len(seen) != len(x):
        raise ValueError(
            f"features of {len(x)} samples are of shape {tuple(seen.shape)}; "
            f"return ({len(x)}, features)"
        )
    return Seen(seen.cpu(), {})


def _see_stack(source: Source, x: Tensor) -> Seen:
    """Each channel through the classifier of its own data set, the features side by side."""
    classifier = _classifier(source.stack_of)
    channels = [classifier.features_and_logits(channel) for channel in x.chunk(x.shape[1], dim=1)]
    features = torch.cat([features for features, _ in channels], dim=1)
    probabilities = torch.stack([logits.softmax(dim=1) for _, logits in channels], dim=1)
    return Seen(features, count_stacked_modes(probabilities)._asdict())


@cache
def _classifier(data_name: str) -> Classifier:
    return load_classifier(data_name)
