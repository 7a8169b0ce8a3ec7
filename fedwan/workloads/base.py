"""The contract between a workload recipe (`sites/NAME.py`) and the engine of a site.

A recipe is one page. The engine knows it only through the names below, and never by its own name.
It needs the first alone, of which `fedwan.workloads.descent` and its `Simple` take the steps:

    build(config, device)   a workload, a `Descent`: networks and optimisers, initial weights from
                            `seed`. It may be called under `torch.device("meta")`, to learn what the
                            networks consist of: it should put no tensor into a cache
    NETWORKS                kinds of the networks that are trained, by name; else they are those
                            that `build` makes optimisers for: adversarial if several
    Model                   a dataclass, the settings under `model.*`; else there are none. A field
                            may say what it takes: `setting(32, span(1))`, `fedwan.config_tree`
    USES                    see `fedwan.uses`; what of `fedwan.workloads.settings.OPTIONAL` its
                            steps follow, and conditions of `model.*`
    DEFAULTS                what takes the place of settings that were left open
    CAPTIONS                True: its samples are dicts with `caption`, a text, see `open_shard`
    PAIRS                   whether it learns from pairs of an input and its target; None: either
    HAS_EXPERTS             True: each of its networks may be one a site, `num_experts` of them
    check(config)           refuses what is wrong in a resolved configuration
    dataset(config, site)   its own data, see `fedwan.data.dataset_of`

A workload may have more than a `Descent` has:

    prepare(shard, folder)  given the site's shard and folder before the first step; gives the shard
                            to train on
    samples_from_inputs     True: `sample` makes its samples of inputs that the site holds, as
                            translations are. Others are of noise and weights, and leave the site
    examine(train, held_out, seed)
                            figures for `fedwan doctor` of some dozens of training samples and as
                            many held-out ones of the same classes, in evaluation mode and without
                            gradients; draws depend on the seed. Scalars (no `.item()`) by name,
                            made with `share_above` and `spread`:

        memory/NETWORK      how often the network fits a training sample better than a held-out
                            one; 0.5 where it has not learnt its shard by heart
        separation/NETWORK  how often it scores a real sample above a generated one
        spread/NETWORK      spread of what it generates over that of real samples
        variety/NETWORK     the same of images made of other images, all alike at the beginning
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor

NetworkKind = Literal["adversarial", "regression"]
"""How a network learns, which decides the outer optimiser it bears: a GAN's two networks chase each
other (`adversarial`), a flow's velocity has a fixed target (`regression`)."""

Reduce = Callable[[], None]
"""Called once all networks' gradients are complete and before their optimisers step. Local
strategies do nothing there; synchronous ones replace `.grad` by its mean over the sites."""


class Batch(NamedTuple):
    """One batch on the site's device."""

    x: Tensor
    """Samples: images (batch, channels, height, width) in [-1, 1], or points (batch, 2)."""
    y: Tensor
    """Class labels, (batch,), int64."""


def share_above(scores: Tensor, others: Tensor) -> Tensor:
    """Share of pairs of (n,) and (m,) in which the score is above; ties count half. In [0, 1].

    The area under the ROC curve (Mann and Whitney 1947): 0.5 if both look alike, 1 if they are
    apart. Of n scores each, 0.5 has a standard error of 1 / sqrt(6 n): 0.05 of 64.

    >>> float(share_above(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])))
    0.75
    """
    gap = scores.flatten().unsqueeze(1) - others.flatten()
    return gap.sign().mean() / 2 + 0.5


def spread(samples: Tensor) -> Tensor:
    """Mean Euclidean distance of two different samples of (n, …), a scalar: small in collapse."""
    return torch.pdist(samples.flatten(1).float()).mean()
