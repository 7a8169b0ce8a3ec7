"""What a workload's `examine` is made of: scores of samples that need no scale."""

from __future__ import annotations

import torch
from torch import Tensor


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
    flat = samples.flatten(1).float()
    num = len(flat)
    # Differences, not dot products: those lose the digits of samples that are nearly alike.
    distances = torch.cdist(flat, flat, compute_mode="donot_use_mm_for_euclid_dist")
    return distances.sum() / (num * (num - 1))
