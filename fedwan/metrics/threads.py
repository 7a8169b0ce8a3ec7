"""One thread for a while, so that sums round the same in every process of a machine."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

__all__ = ["one_thread"]


@contextmanager
def one_thread() -> Iterator[None]:
    """Run torch's CPU kernels in one thread, then as many as before.

    How many threads share a sum changes its rounding. What two processes must agree on to the bit,
    such as the weights of a feature network, is computed under this.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
