"""A recipe's own data set."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch
from torch.utils.data import TensorDataset

from fedwan.config import Config
from fedwan.data import dataset_of
from fedwan.errors import ConfigError


def page(made: Any) -> ModuleType:
    module = ModuleType("recipe")
    module.dataset = lambda config, site: made  # type: ignore[attr-defined]
    return module


def config(batch: int = 4) -> Config:
    asked = Config("text")
    asked.data.batch = batch
    return asked


def test_any_data_set_becomes_a_shard_without_held_out_data() -> None:
    tokens = TensorDataset(torch.arange(60).view(10, 6), torch.arange(10))
    shard = dataset_of(page(tokens), config(), "s1")
    assert shard.held_out is None and shard.num_samples == 10
    rows, numbers = next(shard.loader(4, torch.Generator()))
    assert torch.equal(rows[:, 0] // 6, numbers)
    assert shard.some(3)[1].tolist() == [0, 4, 8]


def test_it_may_come_with_held_out_samples() -> None:
    one, other = [{"latents": torch.ones(2)}] * 9, [{"latents": torch.zeros(2)}] * 3
    shard = dataset_of(page((one, other)), config(), "s1")
    assert shard.held_out["latents"].shape == (3, 2)


@pytest.mark.parametrize(
    ("made", "text"),
    [
        (None, "returned a NoneType for site 's1'"),
        ([], "returned nothing for site 's1'"),
        ([torch.ones(1)] * 3, "data.batch = 4 is more than the 3 samples"),
    ],
)
def test_what_is_no_data_set_is_refused(made: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        dataset_of(page(made), config(), "s1")
