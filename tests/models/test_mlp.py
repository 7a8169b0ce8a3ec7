"""The perceptron."""

from __future__ import annotations

import torch
from torch import nn

from fedwan.models.mlp import mlp


def test_it_has_as_many_hidden_layers_as_asked() -> None:
    network = mlp(3, width=8, depth=2, num_out=5)
    sizes = [(m.in_features, m.out_features) for m in network if isinstance(m, nn.Linear)]
    assert sizes == [(3, 8), (8, 8), (8, 5)]
    assert network(torch.zeros(4, 3)).shape == (4, 5)
