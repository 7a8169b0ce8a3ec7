"""One thread for a while."""

from __future__ import annotations

import pytest
import torch

from fedwan.metrics.threads import one_thread


def test_the_number_of_threads_comes_back_even_after_an_error() -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        with pytest.raises(ZeroDivisionError), one_thread():
            assert torch.get_num_threads() == 1
            raise ZeroDivisionError
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)
