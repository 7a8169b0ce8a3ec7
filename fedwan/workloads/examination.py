"""What a workload's `examine` is made of: scores of samples that need no scale.

    share_above   how often a score of one group is above one of another (the area under the ROC
                  curve, Mann and Whitney 1947): 0.5 if the groups look alike, 1 if they are apart
    spread        mean distance between two samples: small where a generator has collapsed

Of n scores in each group, a share of 0.5 has a standard error of 1 / sqrt(6 n): 0.05 of 64.
"""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["share_above", "spread"]


def share_above(scores: Tensor, others: Tensor) -> Tensor:
    """Share of pairs of (n,) and (m,) in which the score is above; ties count half. In [0, 1].

    >>> float(share_above(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 2.0])))
    0.75
    """
    gap = scores.flatten().unsqueeze(1) - others.flatten()
    return gap.sign().mean() / 2 + 0.5


def spread(samples: Tensor) -> Tensor:
    """Mean Euclidean distance between two different samples of (n, …), a scalar; n at least 2."""
    flat = samples.flatten(1).float()
    num = len(flat)
    # Differences, not dot products: those lose the digits of samples that are nearly alike.
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum() / (num * (num - 1))
