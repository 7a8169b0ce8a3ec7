"""The feature network of image metrics: a small classifier, trained once and cached on disk.

It plays the part that Inception plays for large images (Heusel et al. 2017): its penultimate layer
gives the features of the Frechet distance, precision and recall, its classes the histogram. It
learns on the public training split alone, in about a second on one core, from a fixed seed in one
thread: every process of a machine gets the same weights, whether it trained or read them.
"""

from __future__ import annotations

import logging
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedwan.data import find_source
from fedwan.errors import CheckpointError
from fedwan.metrics.threads import one_thread
from fedwan.rng import derive_seed, seeded_init
from fedwan.state import State, clone, hash_state, read_tensors, write_tensors
from fedwan.workloads.base import Batch

__all__ = ["NUM_FEATURES", "Classifier", "cache_folder", "load_classifier", "train_classifier"]

NUM_FEATURES = 32
_VERSION = 1  # raise it with any change to the network or its training: old caches are left alone
_STEPS = 600
_BATCH = 64
_PEAK_LR = 4e-3
_DROPOUT = 0.3  # of features too: spreads a class out, where it would collapse to a point
_SMOOTHING = 0.1

_log = logging.getLogger(__name__)


class Classifier(nn.Module):
    """Two convolutions and a dense layer of features, for images (batch, channels, 8, 8)."""

    def __init__(self, channels: int, num_classes: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            nn.Conv2d(32, 32, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, NUM_FEATURES),
            nn.ReLU(),
        )
        self.head = nn.Linear(NUM_FEATURES, num_classes)

    def forward(self, x: Tensor) -> Tensor:
        """Logits, (batch, classes)."""
        logits: Tensor = self.head(self.body(x))
        return logits

    @torch.no_grad()
    def features_and_logits(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, NUM_FEATURES) and logits (N, classes) of images, on the CPU."""
        with one_thread():
            features = self.body(x.detach().to("cpu", torch.float32))
            return features, self.head(features)

    def features(self, x: Tensor, /) -> Tensor:
        """Features (N, NUM_FEATURES) of images, on the CPU; see `fedwan.metrics.Features`."""
        return self.features_and_logits(x)[0]


def cache_folder() -> Path:
    """Where trained classifiers are kept between runs."""
    return Path.home() / ".cache" / "fedwan"


def load_classifier(data_name: str, folder: Path | None = None) -> Classifier:
    """The classifier of a data set of 8x8 images, from the cache or trained now (about a second).

    A cache that cannot be read, or whose weights do not match their hash, is trained and written
    anew; one that cannot be written costs only that second in the next process.

    Args:
        data_name: as in `data.name`.
        folder: of the cache; None takes `cache_folder()`.
    """
    source = find_source(data_name)
    train, _ = source.load()
    path = (folder or cache_folder()) / f"classifier-{data_name}-{_key(train)}.safetensors"
    with seeded_init(0):  # overwritten, but it must not draw from the global generator
        model = Classifier(source.shape[0], source.num_classes)
    weights = _read(path, model)
    if weights is None:
        weights = clone(train_classifier(train, source.num_classes).state_dict())
        try:
            write_tensors(path, weights, {"sha256": hash_state(weights)})
        except OSError as error:
            _log.warning("classifier not cached at %s: %s", path, error)
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def train_classifier(train: Batch, num_classes: int) -> Classifier:
    """Train on images (N, channels, 8, 8) in [-1, 1] with labels; the same weights every time."""
    with seeded_init(derive_seed("classifier", _VERSION)):
        model = Classifier(train.x.shape[1], num_classes)
    generator = torch.Generator().manual_seed(derive_seed("classifier", _VERSION, "draws"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_LR, weight_decay=0.05, foreach=False, fused=False
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_LR, total_steps=_STEPS)
    # Quality is measured without gradients, and the first to measure it comes through here.
    with one_thread(), torch.enable_grad():
        for _ in range(_STEPS):
            index = torch.randint(len(train.y), (_BATCH,), generator=generator)
            features = model.body(_drop(train.x[index], generator))
            logits = model.head(_drop(features, generator))
            loss = functional.cross_entropy(logits, train.y[index], label_smoothing=_SMOOTHING)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model


def _drop(x: Tensor, generator: torch.Generator) -> Tensor:
    # torch's own dropout draws from the global generator, which is not ours to move.
    kept = torch.rand(x.shape, generator=generator) >= _DROPOUT
    return x * kept / (1 - _DROPOUT)


def _key(train: Batch) -> str:
    """Of everything that the weights follow from."""
    data = hash_state({"x": train.x, "y": train.y})
    return f"{derive_seed(_VERSION, torch.__version__, data):016x}"


def _read(path: Path, model: Classifier) -> State | None:
    """Cached weights, or None where there are none that can be trusted."""
    if not path.exists():
        return None
    try:
        weights, meta = read_tensors(path)
    except CheckpointError:
        _log.warning("classifier trained anew: %s cannot be read", path)
        return None
    expected = {name: value.shape for name, value in model.state_dict().items()}
    if {name: value.shape for name, value in weights.items()} != expected or meta.get(
        "sha256"
    ) != hash_state(weights):
        _log.warning("classifier trained anew: the weights in %s do not match their hash", path)
        return None
    return weights
