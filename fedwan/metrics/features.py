"""The networks that metrics see images through: a trained classifier, and one of random weights.

The classifier plays the part of Inception (Heusel et al. 2017). It learns on the public training
split alone, from a fixed seed in one thread: every process of a machine gets the same weights.

Random features favour no data set (Naeem et al. 2020, 2002.09797), need no training, and see
photographs of any size; figures taken through them compare with each other alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache

import torch
from torch import Tensor, nn
from torch.nn import functional

from fedwan.data import find_source
from fedwan.data.cached import cached
from fedwan.models.layers import at_once, drop
from fedwan.rng import derive_seed, seeded_init
from fedwan.state import hash_state
from fedwan.workloads.base import Batch

NUM_FEATURES = 32
_VERSION = 1  # raise it with any change to the network or its training: old caches are left alone
_STEPS = 600
_BATCH = 64
_PEAK_LR = 4e-3
_DROPOUT = 0.3  # of features too: spreads a class out, where it would collapse to a point
_SMOOTHING = 0.1

_WIDTHS = (3, 16, 16, 32)
_SLOPE = 0.2  # a unit that is silent for real images would not notice others
_CHUNK = 64
_MOST_PIXELS = 1 << 21  # seen together by the classifier: 0.5 GB


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU kernels in one thread: how many share a sum changes its rounding."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class Classifier(nn.Module):
    """Convolutions and a dense layer of features, for images (batch, channels, side, side).

    Strided convolutions bring the side, of 4 or more, to 4 if it is a power of two, else to 5 to 7,
    of which means are taken.
    """

    def __init__(self, channels: int, side: int, num_classes: int) -> None:
        super().__init__()
        strided: list[nn.Module] = []
        while 8 << len(strided) // 2 <= side:
            strided += [nn.Conv2d(32, 32, 3, stride=2, padding=1), nn.ReLU()]
        if side & (side - 1):
            strided.append(nn.AdaptiveAvgPool2d(4))
        self.body = nn.Sequential(
            nn.Conv2d(channels, 32, 3, padding=1),
            nn.ReLU(),
            *strided,
            nn.Flatten(),
            nn.Linear(32 * 4 * 4, NUM_FEATURES),
            nn.ReLU(),
        )
        self.head = nn.Linear(NUM_FEATURES, num_classes)

    @torch.no_grad()
    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Features (N, NUM_FEATURES) and logits (N, classes) of images, on the CPU."""
        with one_thread():
            chunks = torch.split(x.detach(), at_once(x.shape, _MOST_PIXELS))
            features = torch.cat([self.body(part.to("cpu", torch.float32)) for part in chunks])
            return features, self.head(features)


@cache
def load_classifier(data_name: str, size: int = 0) -> Classifier:
    """The classifier of a data set of images, from its cache or trained now (digits: 2 s).

    For `size` see `find_source`.
    """
    source = find_source(data_name, size)
    train, _ = source.load()
    data = hash_state({"x": train.x, "y": train.y})
    name = f"classifier-{data_name}-{derive_seed(_VERSION, torch.__version__, data):016x}"
    with seeded_init(0):  # overwritten, but it must not draw from the global generator
        model = Classifier(source.shape[0], source.shape[-1], source.num_classes)
    weights = cached(
        name, model.state_dict(), lambda: train_classifier(train, source.num_classes).state_dict()
    )
    model.load_state_dict(weights)
    return model.eval().requires_grad_(False)


def train_classifier(train: Batch, num_classes: int) -> Classifier:
    """Train on images as `Classifier` takes them, in [-1, 1]; the same weights every time."""
    with seeded_init(derive_seed("classifier", _VERSION)):
        model = Classifier(train.x.shape[1], train.x.shape[-1], num_classes)
    generator = torch.Generator().manual_seed(derive_seed("classifier", _VERSION, "draws"))
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=_PEAK_LR, weight_decay=0.05, foreach=False, fused=False
    )
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, _PEAK_LR, total_steps=_STEPS)
    # Quality is measured without gradients, and the first to measure it comes through here.
    with one_thread(), torch.enable_grad():
        for _ in range(_STEPS):
            index = torch.randint(len(train.y), (_BATCH,), generator=generator)
            features = model.body(drop(train.x[index], _DROPOUT, generator))
            logits = model.head(drop(features, _DROPOUT, generator))
            loss = functional.cross_entropy(logits, train.y[index], label_smoothing=_SMOOTHING)
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            optimizer.step()
            schedule.step()
    return model


@torch.no_grad()
def see_images(images: Tensor) -> Tensor:
    """Mean response of each random filter, (N, 64), to images (N, 1 or 3, height, width)."""
    parts: list[Tensor] = []
    with one_thread():
        for chunk in torch.split(images.detach(), min(_CHUNK, at_once(images.shape))):
            x, means = chunk.to("cpu", torch.float32).expand(-1, 3, -1, -1), []
            for layer in _random_layers():
                x = functional.leaky_relu(layer(x), _SLOPE)
                means.append(x.mean(dim=(2, 3)))
            parts.append(torch.cat(means, dim=1))
    return torch.cat(parts)


@cache
def _random_layers() -> tuple[nn.Conv2d, ...]:
    layers = []
    with seeded_init(derive_seed("random features")):
        for index in range(len(_WIDTHS) - 1):
            stride = 1 if index == 0 else 2
            layer = nn.Conv2d(_WIDTHS[index], _WIDTHS[index + 1], 3, stride=stride, padding=1)
            nn.init.kaiming_normal_(layer.weight, _SLOPE)
            layers.append(layer.requires_grad_(False))
    return tuple(layers)
